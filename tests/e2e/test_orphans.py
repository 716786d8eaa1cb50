"""Servers whose end nobody sees to: not reaped, and stubs believe in them, or killed with the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from distserve_tools.chaos.deployment import TWO_OF_EACH, write_repository
from distserve_tools.chaos.model import tiny_model
from distserve_tools.launch import ServerOptions, TritonServer
from distserve_tools.processes import ProcessId, descendants, wait_gone
from distserve_tools.shared_regions import sweep

GONE_S = 20.0


def shared_memory() -> set[Path]:
    """The regions of this process's servers, those of other tests too."""
    return set(Path("/dev/shm").glob(f"distserve_{os.getpid()}_*")) - set(Path("/dev/shm").glob("*_claim"))


def test_nothing_outlives_a_server_that_is_not_reaped(tmp_path: Path) -> None:
    repository = write_repository(tmp_path / "repository", tiny_model(tmp_path / "model"), TWO_OF_EACH)
    before = shared_memory()
    with TritonServer(ServerOptions(repository)) as server:
        assert shared_memory() > before
        left = descendants(server.pid)
        assert len(left) == 9  # five stubs, four engines
        os.kill(server.pid, signal.SIGKILL)
        time.sleep(0.5)
        assert Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        assert not wait_gone(left, GONE_S)
        assert shared_memory() <= before


SERVE = """
import sys, time
from pathlib import Path
from distserve_tools.launch import ServerOptions, TritonServer
with TritonServer(ServerOptions(Path(sys.argv[1]))):
    print("up", flush=True)
    time.sleep(600)
"""


def test_memory_of_a_server_that_was_killed_with_its_launcher_is_swept_up(tmp_path: Path) -> None:
    repository = write_repository(tmp_path / "repository", tiny_model(tmp_path / "model"), TWO_OF_EACH)
    command = [sys.executable, "-c", SERVE, str(repository)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "up\n"
        mine = f"distserve_{launcher.pid}_*"
        everything = {ProcessId.of(launcher.pid), *descendants(launcher.pid)}
        sweep()
        assert len(list(Path("/dev/shm").glob(mine))) > 5  # it lives: nothing of it has been touched
        for process in everything:
            process.kill()
        assert not wait_gone(everything - {ProcessId.of(launcher.pid)}, GONE_S)
    assert list(Path("/dev/shm").glob(mine))
    end = time.monotonic() + GONE_S
    while list(Path("/dev/shm").glob(mine)):  # a stub may have been forking just when it was killed
        assert time.monotonic() < end
        sweep()
        time.sleep(0.1)
