"""Two hosts on one machine: two network namespaces, joined by one link that can be cut.

The process that makes them must be in a namespace of its own (`in_a_namespace`), which is the first host.
Nothing has a name outside, so all is gone with the processes in it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType

from distserve_tools import die_with_parent

A, B = "10.77.1.1", "10.77.2.1"
_LINK_A, _LINK_B = "10.77.0.1", "10.77.0.2"
_UNSHARE = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]


def why_not() -> str | None:
    """What this machine lacks for it."""
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    tried = subprocess.run(
        [*_UNSHARE, "ip", "link", "add", "x", "type", "veth"], capture_output=True, text=True
    )
    return None if tried.returncode == 0 else f"network namespaces are not permitted: {tried.stderr.strip()}"


def in_a_namespace(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a command in a new namespace, in which there is nothing."""
    return subprocess.run([*_UNSHARE, *command], capture_output=True, text=True, timeout=timeout_s)


class TwoHosts:
    """This namespace has the address `A`, another one `B`. `limited`: to `rate`, if `tc` can do that."""

    def __init__(self, rate: str) -> None:
        self._rate = rate
        self.limited = False

    def __enter__(self) -> TwoHosts:
        here = os.readlink("/proc/self/ns/net")
        guard = [sys.executable, die_with_parent.__file__, str(os.getpid())]
        self._holder = subprocess.Popen([*guard, _program("unshare"), "--net", "sleep", "100000"])
        while os.readlink(f"/proc/{self._holder.pid}/ns/net") == here:
            time.sleep(0.01)
        self.on_b = [_program("nsenter"), f"--net=/proc/{self._holder.pid}/ns/net"]
        _run(
            "ip",
            "link",
            "add",
            "to_b",
            "type",
            "veth",
            "peer",
            "name",
            "to_a",
            "netns",
            str(self._holder.pid),
        )
        for prefix, device, address, link in (([], "to_b", A, _LINK_A), (self.on_b, "to_a", B, _LINK_B)):
            _run(*prefix, "ip", "link", "set", "lo", "up")
            _run(*prefix, "ip", "address", "add", f"{address}/32", "dev", "lo")
            _run(*prefix, "ip", "address", "add", f"{link}/30", "dev", device)
            _run(*prefix, "ip", "link", "set", device, "up")
            shaper = ["root", "tbf", "rate", self._rate, "burst", "16kb", "latency", "400ms"]
            limit = subprocess.run(
                [*prefix, "tc", "qdisc", "add", "dev", device, *shaper], capture_output=True
            )
            self.limited = limit.returncode == 0
        _run("ip", "route", "add", B, "via", _LINK_B, "src", A)
        self._route_of_b()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._holder.kill()
        self._holder.wait(10.0)

    def cut(self) -> None:
        """B has no network any more; A sends into the void."""
        _run(*self.on_b, "ip", "link", "set", "to_a", "down")

    def mend(self) -> None:
        _run(*self.on_b, "ip", "link", "set", "to_a", "up")
        self._route_of_b()

    def _route_of_b(self) -> None:
        _run(*self.on_b, "ip", "route", "add", A, "via", _LINK_A, "src", B)


def _program(name: str) -> str:
    path = shutil.which(name)
    assert path is not None
    return path


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
