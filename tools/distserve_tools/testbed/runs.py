"""One run: a trace sent to one system, what came back, and who used the processor meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distserve_planner.slo import Slo
from distserve_planner.workload import Trace
from distserve_tools.load.generator import make_jobs, run_open_loop
from distserve_tools.load.record import STAGES, Record
from distserve_tools.testbed.cpu_account import CpuSeconds, processor_time
from distserve_tools.testbed.engine_counters import counted_since
from distserve_tools.testbed.prediction import Predicted
from distserve_tools.testbed.systems import Served

TIMEOUT_S = 300.0


@dataclass
class Run:
    """`predicted` is filled in later, for the same requests."""

    system: str
    rate_rps: float
    repeat: int
    trace: Trace
    records: Sequence[Record]
    cpu: CpuSeconds
    engines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # counters, by instance
    predicted: Predicted | None = None

    def attainment(self, slo: Slo) -> float:
        """Failed requests are misses."""
        return float(np.mean([r.met(slo) for r in self.records]))

    def predicted_attainment(self, slo: Slo) -> float:
        assert self.predicted is not None
        return float(self.predicted.met(slo).mean())

    @property
    def tokens(self) -> int:
        return sum(r.output_tokens for r in self.records)

    @property
    def lag_p99_s(self) -> float:
        return float(np.percentile([r.lag_s for r in self.records], 99))

    def stage_means(self) -> dict[str, float]:
        """Mean seconds of each stage over the requests that succeeded."""
        good = [r for r in self.records if r.ok]
        return {s: float(np.mean([r.stages.get(s, 0.0) for r in good])) if good else 0.0 for s in STAGES}

    def to_dict(self) -> dict[str, Any]:
        """For the JSON file: every request, measured and predicted."""
        requests: list[dict[str, Any]] = [record.to_log() for record in self.records]
        if self.predicted is not None:
            for entry, ttft, tpot in zip(requests, self.predicted.ttft_s, self.predicted.tpot_s, strict=True):
                entry["predicted"] = {"ttft_s": round(float(ttft), 6), "tpot_s": round(float(tpot), 6)}
        return {
            "system": self.system,
            "rate_rps": self.rate_rps,
            "repeat": self.repeat,
            "generator_lag_p99_s": self.lag_p99_s,
            "engines": self.engines,
            "cpu_s": {**self.cpu.parts, "other processes": self.cpu.others, "wall": self.cpu.wall},
            "requests": requests,
        }


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
