"""Finds the best of many candidates by evaluating few: bounds first, then a floor that rises."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from distserve_planner.goodput import Goodput
from distserve_planner.search.algorithm1 import Candidate
from distserve_planner.search.deployment import Deployment
from distserve_planner.search.tasks import DeploymentTask
from distserve_planner.search.workers import Workers
from distserve_planner.slo import Attainment


@dataclass(frozen=True)
class Ranked:
    """A candidate after the search.

    rate: requests/s of all its devices, 0 if it never met the objectives or fell short of `floor`.
    bound: optimistic rate. floor: rate that it had to reach when it was tried, 0 for none; `above` is how it
    did at the first rate that it did not meet. Not tried at all: `tried` is False, its bound was too low.
    """

    deployment: Deployment
    rate: float
    bound: float
    floor: float = 0.0
    at: Attainment | None = None
    above: Attainment | None = None
    lone: Attainment | None = None
    tried: bool = True
    long: bool = False
    probes: int = 0


Score = Callable[[Deployment], float]  # divides rates to compare them: devices, or 1 for all of a cluster
Progress = Callable[[int, int], None]


def rank(
    workers: Workers, candidates: Sequence[Candidate], divisor: Score, progress: Progress | None = None
) -> list[Ranked]:
    """All candidates, the best first; the best one is confirmed by a long run.

    Candidates are tried by falling bound, in waves. One whose bound is below the best rate found is not
    tried; one that misses the objectives at that rate is dropped after a single simulation. Then the leader
    is run long, and loses its place if it falls behind, until the leader is one that was run long. As long
    runs find lower rates than short ones, candidates that only fell short of a rate that did not last are
    tried again, at the one that did.
    """
    pending = sorted(
        candidates,
        key=lambda c: (-c.predicted / divisor(c.deployment), c.deployment.devices, str(c.deployment)),
    )
    total = len(pending)
    ranked: list[Ranked] = []
    best = 0.0
    wave_size = max(2, workers.jobs)
    while pending and pending[0].predicted / divisor(pending[0].deployment) > best:
        wave, pending = pending[:wave_size], pending[wave_size:]
        ranked += _try(workers, wave, best, divisor, long=False)
        best = max([best, *(r.rate / divisor(r.deployment) for r in ranked)])
        if progress is not None:
            progress(total - len(pending), total)
    ranked += [
        Ranked(c.deployment, 0.0, c.predicted, best * divisor(c.deployment), tried=False) for c in pending
    ]
    if progress is not None:
        progress(total, total)
    return _confirm(workers, ranked, divisor)


def _try(
    workers: Workers, wave: Sequence[Candidate], best: float, divisor: Score, long: bool
) -> list[Ranked]:
    tasks = []
    for candidate in wave:
        deployment = candidate.deployment
        floor = best * divisor(deployment) / deployment.devices
        tasks.append(DeploymentTask(deployment, floor, candidate.predicted, long, 1 if long else 8))
    results = workers.map(tasks)
    ranked = []
    for candidate, task, result in zip(wave, tasks, results, strict=True):
        assert isinstance(result, Goodput)
        ranked.append(
            Ranked(
                candidate.deployment, result.rate, candidate.predicted, task.floor * task.deployment.devices,
                result.at, result.above, result.lone, True, long, result.probes,
            )
        )  # fmt: skip
    return ranked


def _confirm(workers: Workers, ranked: list[Ranked], divisor: Score) -> list[Ranked]:
    def order(entry: Ranked) -> tuple[float, bool, int, float, str]:
        at = entry.at.both if entry.at is not None else 0.0
        score = entry.rate / divisor(entry.deployment)
        return (-score, not entry.long, entry.deployment.devices, -at, str(entry.deployment))

    best = 0.0  # among those run long
    while True:
        ranked.sort(key=order)
        leaders = [r for r in ranked if not r.long and r.rate / divisor(r.deployment) > best]
        if leaders:
            wave = leaders[: workers.jobs]
            results = _try(
                workers, [Candidate(r.deployment, 1.02 * r.rate) for r in wave], best, divisor, long=True
            )
            best = max([best, *(r.rate / divisor(r.deployment) for r in results)])
        else:
            wave = _may_still_win(ranked, best, divisor)[: max(2, workers.jobs)]
            if not wave:
                return ranked
            results = _try(
                workers, [Candidate(r.deployment, r.bound) for r in wave], best, divisor, long=False
            )
        for old, new in zip(wave, results, strict=True):
            ranked[ranked.index(old)] = replace(new, bound=old.bound, probes=old.probes + new.probes)


def _may_still_win(ranked: Sequence[Ranked], best: float, divisor: Score) -> list[Ranked]:
    """Those that are only known to miss a higher rate than `best`, or were not tried as it seemed too low."""
    found = [
        r
        for r in ranked
        if not r.long
        and not r.rate
        and r.lone is None
        and r.bound / divisor(r.deployment) > best
        and r.floor / divisor(r.deployment) > best * (1 + 1e-9)
    ]
    return sorted(found, key=lambda r: (-r.bound / divisor(r.deployment), str(r.deployment)))
