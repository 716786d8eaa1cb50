"""The authors' exhaustive search, on all cores."""

from __future__ import annotations

import time
from dataclasses import dataclass

from distserve.core.shapes import Shape
from distserve_planner.search.problem import Problem
from distserve_planner.search.rules import RulesSettings, configurations
from distserve_planner.search.tasks import RulesTask
from distserve_planner.search.workers import Workers


@dataclass(frozen=True)
class RulesRow:
    """rate: requests per second and device, 0 if none passed."""

    prefill: Shape
    decode: Shape | None
    devices: int
    rate: float


@dataclass(frozen=True)
class RulesResult:
    """Rows by falling rate, then fewer devices."""

    rows: tuple[RulesRow, ...]
    seconds: float


def rules_search(problem: Problem, settings: RulesSettings, jobs: int) -> RulesResult:
    """Tries every configuration, as they do."""
    began = time.monotonic()
    configs = configurations(problem, settings)
    tasks = [RulesTask(p, d, settings.requests, settings.max_rate, settings.stop) for p, d in configs]
    with Workers(problem, jobs) as workers:
        rates = [rate for rate in workers.map(tasks) if isinstance(rate, float)]
    rows = [
        RulesRow(p, d, p.ranks + (d.ranks if d is not None else 0), rate)
        for (p, d), rate in zip(configs, rates, strict=True)
    ]
    rows.sort(key=lambda row: (-row.rate, row.devices))
    return RulesResult(tuple(rows), time.monotonic() - began)
