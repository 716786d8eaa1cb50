"""Who used the processor during a run: engines, Triton, stubs, orchestrator, generator, everybody else."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from distserve_tools.processes import descendants

ENGINE, STAGE_STUBS, ORCHESTRATOR, TRITON, GENERATOR = (
    "engines",
    "stage stubs",
    "orchestrator",
    "tritonserver",
    "generator",
)
PARTS = (ENGINE, STAGE_STUBS, ORCHESTRATOR, TRITON, GENERATOR)
_ENGINE_MODULES = ("distserve.engine", "distserve_tools.testbed.replay_engine")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CpuSeconds:
    """Processor time by part, in seconds: totals of a moment, or what passed between two."""

    parts: Mapping[str, float]
    others: float  # of processes that are none of these
    wall: float

    def since(self, before: CpuSeconds) -> CpuSeconds:
        parts = {name: self.parts[name] - before.parts.get(name, 0.0) for name in self.parts}
        return CpuSeconds(parts, self.others - before.others, self.wall - before.wall)

    @property
    def beside_engines(self) -> float:
        return sum(seconds for name, seconds in self.parts.items() if name != ENGINE)

    def plus(self, other: CpuSeconds) -> CpuSeconds:
        parts = {name: self.parts.get(name, 0.0) + other.parts.get(name, 0.0) for name in PARTS}
        return CpuSeconds(parts, self.others + other.others, self.wall + other.wall)


def processor_time(servers: Iterable[int]) -> CpuSeconds:
    """Totals now. `servers`: pids of tritonserver (or other server) processes; this process generates."""
    parts = dict.fromkeys(PARTS, 0.0)
    parts[GENERATOR] = _process_seconds(os.getpid())
    for server in servers:
        parts[TRITON] += _process_seconds(server)
        for process in descendants(server):
            parts[part_of(_command(process.pid))] += _process_seconds(process.pid)
    busy = _machine_busy_seconds()
    return CpuSeconds(parts, busy - sum(parts.values()), _uptime_seconds())


def part_of(command: str) -> str:
    """The part that a process below a server belongs to, by its command line."""
    if "triton_python_backend_stub" in command:
        return ORCHESTRATOR if "/orchestrator/" in command else STAGE_STUBS
    if any(module in command for module in _ENGINE_MODULES) or "vllm" in command.lower():
        return ENGINE
    return TRITON


def _process_seconds(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended
        return 0.0
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _machine_busy_seconds() -> float:
    """User, nice, system, interrupts and steal of all cores, in containers as in the host: `/proc/stat`."""
    numbers = [int(n) for n in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _idle, _iowait, irq, softirq, steal = numbers
    return (user + nice + system + irq + softirq + steal) / _TICKS


def _uptime_seconds() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])
