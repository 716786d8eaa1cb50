"""The requests of a run: a workload's lengths, scaled and cut, at a rate."""

from __future__ import annotations

import numpy as np

from distserve_planner.workload import Trace, named_workload
from distserve_tools.load.lengths import scaled
from distserve_tools.testbed.plan import ScaledWorkload


def requests_at(workload: ScaledWorkload, rate_rps: float, count: int, seed: int, max_context: int) -> Trace:
    """`count` requests with Poisson arrivals; the same seed gives the same ones at every rate."""
    trace = named_workload(workload.name).resample(seed, rate_rps, count)
    return scaled(trace, workload.scale, max_context)


def lone_requests(workload: ScaledWorkload, count: int, gap_s: float, max_context: int) -> Trace:
    """Requests of the workload's mean lengths, `gap_s` apart."""
    lengths = named_workload(workload.name).lengths
    trace = Trace(
        np.arange(count) * gap_s,
        np.full(count, max(1, round(lengths.input.mean)), np.int64),
        np.full(count, max(2, round(lengths.output.mean)), np.int64),
        f"lone {workload.label}",
    )
    return scaled(trace, workload.scale, max_context)
