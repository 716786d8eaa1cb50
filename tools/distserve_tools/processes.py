"""Processes that a server leaves in the process table, and free ports. Linux only (`/proc`)."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT = 10_000
_LEAST_CHOICE = 1000


@dataclass(frozen=True)
class ProcessId:
    """A process by pid and start time, so that a reused pid is never taken for it."""

    pid: int
    started: int  # clock ticks after boot

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Of a process that lives. Raises `ProcessLookupError`."""
        stat = _stat(pid)
        if stat is None:
            raise ProcessLookupError(pid)
        return cls(pid, stat.started)

    def alive(self) -> bool:
        stat = _stat(self.pid)
        return stat is not None and stat.started == self.started and stat.state != "Z"

    def kill(self) -> None:
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def descendants(pid: int) -> set[ProcessId]:
    """All children of `pid`, and theirs; not `pid` itself."""
    children: dict[int, list[ProcessId]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            stat = _stat(int(entry.name))
            if stat is not None:
                children.setdefault(stat.parent, []).append(ProcessId(int(entry.name), stat.started))
    found: set[ProcessId] = set()
    todo = [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            if child not in found:
                found.add(child)
                todo.append(child.pid)
    return found


def session_members(session: int) -> set[ProcessId]:
    """All processes of a session, also those whose parent is gone; zombies left out."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            stat = _stat(int(entry.name))
            if stat is not None and stat.session == session and stat.state != "Z":
                found.add(ProcessId(int(entry.name), stat.started))
    return found


def wait_gone(processes: set[ProcessId], timeout_s: float) -> set[ProcessId]:
    """Waits until none of them lives; returns those that still do after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    left = {p for p in processes if p.alive()}
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = {p for p in left if p.alive()}
    return left


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Distinct TCP ports that were free a moment ago.

    Below those that the kernel gives to outgoing connections: one of them may take a port that a server wants
    to have back when it is started again.
    """
    lowest_outgoing = int(_PORT_RANGE.read_text().split()[0])
    below = range(_LOWEST_PORT, lowest_outgoing)
    if len(below) < _LEAST_CHOICE:
        below = range(_LOWEST_PORT, 1 << 16)
    tried = iter(random.SystemRandom().sample(below, len(below)))
    return [next(port for port in tried if port_is_free(port, host)) for _ in range(count)]


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError:
            return False
        return True


class _Stat(NamedTuple):
    state: str
    parent: int
    session: int
    started: int


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before ')' may hold spaces
    return _Stat(fields[0], int(fields[1]), int(fields[3]), int(fields[19]))
