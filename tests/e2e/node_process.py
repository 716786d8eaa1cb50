"""A node of a deployment as its own `distserve serve`, and what a test does to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from distserve_tools import die_with_parent
from distserve_tools.client import Client, RequestError
from distserve_tools.processes import ProcessId, descendants

T = TypeVar("T")


class NodeProcess:
    """`distserve serve --node NAME`; `prefix`: a command to run it with. Its log is `folder`/NAME.log."""

    def __init__(self, repository: Path, name: str, folder: Path, prefix: Sequence[str] = ()) -> None:
        self.name = name
        self.log_path = folder / f"{name}.log"
        command = [sys.executable, "-m", "distserve_tools", "serve", "--model-repository", str(repository)]
        command += ["--node", name, "--no-openai", "--echo-log"]
        guard = [sys.executable, die_with_parent.__file__, str(os.getpid())]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen([*guard, *prefix, *command], stdout=log, stderr=subprocess.STDOUT)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def processes(self, words: str) -> list[ProcessId]:
        """Those below it whose command line has these words."""
        return [p for p in descendants(self.process.pid) if words in _arguments(p.pid)]

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60.0)

    def kill(self) -> None:
        """As when its host loses power: everything at once, and nobody tidies up."""
        below = descendants(self.process.pid)
        self.process.kill()
        for process in below:
            process.kill()
        self.process.wait(10.0)
        for path in Path("/dev/shm").glob(f"distserve_{self.process.pid}_*"):
            path.unlink()


def until(done: Callable[[], T | None], timeout_s: float, nodes: Sequence[NodeProcess] = ()) -> T:
    """What `done` returns once it is something; the nodes' logs are shown if that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not (found := done()):
        alive = all(node.process.poll() is None for node in nodes)
        if time.monotonic() > deadline or not alive:
            logs = "\n".join(f"--- {node.name}\n{node.log[-6000:]}" for node in nodes)
            raise AssertionError(
                f"{'not after' if alive else 'a node has ended within'} {timeout_s:g} s\n{logs}"
            )
        time.sleep(0.1)
    return found


def usable(client: Client) -> dict[str, Any] | None:
    """The orchestrator's entries by instance, once all of them can take requests."""
    try:
        entries = client.control("status", timeout_s=2.0)["instances"]
    except RequestError:
        return None
    return {e["instance"]: e for e in entries} if all(e["usable"] for e in entries) else None


def _arguments(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
