"""A server that dies and that nobody reaps: its process id stays taken, and Triton's stubs believe in it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from distserve_tools.chaos.deployment import TWO_OF_EACH, write_repository
from distserve_tools.chaos.model import tiny_model
from distserve_tools.launch import ServerOptions, TritonServer
from distserve_tools.processes import descendants, wait_gone

GONE_S = 20.0


def shared_memory() -> set[Path]:
    """The regions of this process's servers, those of other tests too."""
    return set(Path("/dev/shm").glob(f"distserve_{os.getpid()}_*"))


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
