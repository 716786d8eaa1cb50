"""When the supervisor of a server starts it again, with what, and when it gives up."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distserve.serving.access import Access
from distserve_tools import supervise
from distserve_tools.launch import ServerStartError
from distserve_tools.processes import free_ports
from distserve_tools.supervise import MAX_SERVER_STARTS, STARTS_WITH_ALL, Supervisor


class Server:
    """A server without processes, that is dead or does not answer."""

    def __init__(self, repository: Path, lives: bool, starts: bool) -> None:
        self.repository, self.log_path = repository, repository / "log"
        self.http_url = f"127.0.0.1:{free_ports(1)[0]}"  # nobody listens
        self.access = Access.made()
        self.pid, self.exit_code = 1 << 30, -6
        self.lives, self.starts = lives, starts
        self.revived: list[bool] = []
        self.killed = 0

    def alive(self) -> bool:
        return self.lives

    def note_processes(self) -> None:
        pass

    def kill(self) -> None:
        self.killed += 1
        self.lives = False

    def revive(self, with_what_loads: bool) -> None:
        self.revived.append(with_what_loads)
        if not self.starts:
            raise ServerStartError("no")
        self.lives = True


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(supervise, "_LONGEST_PAUSE_S", 0.002)
    monkeypatch.setattr(supervise, "_LIVE_CHECK_S", 0.01)


def watched(server: Server, until: Callable[[Supervisor], object], **options: Any) -> list[str]:
    """What the supervisor says until the condition comes true."""
    events: list[str] = []
    supervisor = Supervisor(server, events.append, interval_s=0.005, **options)  # type: ignore[arg-type]
    supervisor.start()
    try:
        deadline = time.monotonic() + 20
        while not until(supervisor):
            assert time.monotonic() < deadline, events
            time.sleep(0.005)
        return [*events, supervisor.given_up or ""]
    finally:
        supervisor.stop()


def test_a_server_that_never_comes_back_is_given_up(tmp_path: Path) -> None:
    server = Server(tmp_path, lives=False, starts=False)
    events = watched(server, lambda supervisor: supervisor.given_up)
    assert server.revived == [n >= STARTS_WITH_ALL for n in range(MAX_SERVER_STARTS)]
    assert events[-1].startswith("tritonserver ended with code -6, 6 times in succession; log: ")


def test_a_server_that_comes_back_is_started_once(tmp_path: Path) -> None:
    server = Server(tmp_path, lives=False, starts=True)
    loaded: list[str] = []
    events = watched(server, lambda _: loaded, after_load=loaded.append)
    assert (server.revived, loaded, server.killed) == ([False], ["orchestrator"], 0)
    assert events[0].startswith("tritonserver ended with code -6; starting it again")


def test_a_server_that_does_not_answer_is_killed_and_started_again(tmp_path: Path) -> None:
    server = Server(tmp_path, lives=True, starts=True)
    events = watched(server, lambda _: server.revived, hung_s=0.1)
    assert server.killed >= 1
    assert events[0] == "tritonserver has not answered for 0 s; killing it"
