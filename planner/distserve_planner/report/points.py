"""One simulated rate of one deployment, and what a report reads off it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from distserve_planner.goodput import warm_up_requests
from distserve_planner.report.systems import Case, System
from distserve_planner.search.assignment import assign
from distserve_planner.search.deployment import Deployment
from distserve_planner.search.problem import Problem
from distserve_planner.search.system_spec import system_spec
from distserve_planner.simulator.records import STAGES, Outcome
from distserve_planner.simulator.spec import SystemSpec
from distserve_planner.slo import attainment


@dataclass(frozen=True)
class PointTask:
    """rate: requests/s of all devices of `deployment`. scales: factors on the objectives."""

    deployment: Deployment
    rate: float
    requests: int
    scales: tuple[float, ...] = ()


@dataclass(frozen=True)
class Point:
    """Shares that meet both objectives, TTFT, TPOT; `low` to `high` is the 95 % interval of `both`.

    at_scales: `both` at each scale of the task. stages_s: mean seconds by stage. transfer_s: of KV, at
    the percentiles `TRANSFER_PERCENTILES`.
    """

    rate: float
    both: float
    low: float
    high: float
    ttft: float
    tpot: float
    ttft_p90_s: float
    tpot_p90_s: float
    at_scales: tuple[float, ...]
    stages_s: tuple[float, ...]
    transfer_s: tuple[float, ...]


TRANSFER_PERCENTILES = (*range(0, 99, 2), 99)


def outcome_at(problem: Problem, system: SystemSpec, rate: float, count: int) -> Outcome:
    """`count` requests at `rate` requests/s (fewer if the trace is short), warm-up and cool-down left out."""
    requests = problem.requests
    warm_up = warm_up_requests(requests, rate, problem.slo)
    count = max(1, min(count, len(requests) - 2 * warm_up))
    run = requests.simulation(system, rate, min(len(requests), 2 * warm_up + count))
    run.run(warm_up + count)
    return run.outcome(warm_up, warm_up + count)


def simulate_point(problem: Problem, task: PointTask) -> Point:
    """Runs one task; the deployment must fit the cluster."""
    placed = assign(task.deployment, problem.cluster)
    if placed is None:
        raise ValueError(f"{task.deployment} does not fit the cluster")
    outcome = outcome_at(problem, system_spec(problem, task.deployment, placed), task.rate, task.requests)
    slo = problem.slo
    seen = attainment(outcome, slo)
    stages = outcome.stages_s()
    transfer = stages[STAGES[3]]
    return Point(
        task.rate,
        seen.both,
        seen.low,
        seen.high,
        seen.ttft,
        seen.tpot,
        seen.ttft_s,
        seen.tpot_s,
        tuple(attainment(outcome, slo.scaled(scale)).both for scale in task.scales),
        tuple(float(stages[name].mean()) if len(stages[name]) else 0.0 for name in STAGES),
        tuple(float(v) for v in np.percentile(transfer, TRANSFER_PERCENTILES)) if len(transfer) else (),
    )


@dataclass(frozen=True)
class Swept:
    """A system's points by rising rate; `goodput`: requests/s per device, see `goodput_of`."""

    role: str
    label: str
    deployment: str
    devices: int
    goodput: float
    points: tuple[Point, ...]

    @property
    def rates(self) -> list[float]:
        """Requests/s per device."""
        return [point.rate / self.devices for point in self.points]


def rate_grid(goodputs: list[float], count: int) -> tuple[float, ...]:
    """Rates per device from a fifth of the worst system's goodput to a third above the best one's."""
    best = max(goodputs)
    low = 0.25 * min([g for g in goodputs if g > 0.05 * best])
    return tuple(float(r) for r in np.linspace(low, 1.35 * best, count))


def point_tasks(
    system: System, rates: tuple[float, ...], requests: int, scales: tuple[float, ...] = ()
) -> list[PointTask]:
    """One task per rate (per device)."""
    return [PointTask(system.deployment, r * system.deployment.devices, requests, scales) for r in rates]


def simulator(case: Case) -> partial[Point]:
    """`simulate_point` for the case's problem, to be mapped over tasks."""
    return partial(simulate_point, case.problem)
