"""One run: a trace sent to one system, what came back, and who used the processor meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from distserve_planner.slo import Slo
from distserve_planner.workload import Trace
from distserve_tools.load.generator import make_jobs, run_open_loop
from distserve_tools.load.record import STAGES, Record
from distserve_tools.testbed.cpu_account import CpuSeconds, processor_time
from distserve_tools.testbed.engine_counters import Counters, counted_since
from distserve_tools.testbed.pace import LoadedRun, Pace
from distserve_tools.testbed.prediction import Predicted
from distserve_tools.testbed.systems import Served

TIMEOUT_S = 300.0


@dataclass
class Run:
    """The last three are filled in later: predictions of the same requests, with the terms of the campaign,
    and at the pace that each engine had in this run.
    """

    system: str
    rate_rps: float
    repeat: int
    trace: Trace
    records: Sequence[Record]
    cpu: CpuSeconds
    engines: Counters = field(default_factory=dict)
    predicted: Predicted | None = None
    paces: Mapping[str, Pace] = field(default_factory=dict)  # by instance
    predicted_at_pace: Predicted | None = None

    def attainment(self, slo: Slo) -> float:
        """Failed requests are misses."""
        return float(np.mean([r.met(slo) for r in self.records]))

    @property
    def tokens(self) -> int:
        return sum(r.output_tokens for r in self.records)

    def loaded(self) -> LoadedRun:
        taken = (self.cpu.beside_engines + max(0.0, self.cpu.others)) / self.cpu.wall
        return LoadedRun(self.engines, self.cpu.wall, taken)

    @property
    def lag_p99_s(self) -> float:
        return float(np.percentile([r.lag_s for r in self.records], 99))

    def stage_means(self) -> dict[str, float]:
        """Mean seconds of each stage over the requests that succeeded."""
        good = [r for r in self.records if r.ok]
        return {s: float(np.mean([r.stages.get(s, 0.0) for r in good])) if good else 0.0 for s in STAGES}


def idle_time(everybody: Iterable[Served], seconds: float) -> CpuSeconds:
    """What all systems take while nothing is asked of them. The generator sleeps."""
    pids = [pid for system in everybody for pid in system.pids]
    before = processor_time(pids)
    time.sleep(seconds)
    return processor_time(pids).since(before)


def run_once(
    system: Served, everybody: Iterable[Served], trace: Trace, rate_rps: float, repeat: int, vocab: int
) -> Run:
    """`everybody`: all systems that are up; what the idle ones take counts, too."""
    pids = [pid for other in everybody for pid in other.pids]
    jobs = make_jobs(trace, vocab, repeat)
    counters, before = system.counters(), processor_time(pids)
    records = asyncio.run(run_open_loop(lambda start: system.target(start, TIMEOUT_S), trace, jobs))
    cpu = processor_time(pids).since(before)
    engines = counted_since(system.counters(), counters)
    return Run(system.name, rate_rps, repeat, trace, records, cpu, engines)
