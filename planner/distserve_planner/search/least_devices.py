"""Fewest devices for a target rate: the paper's R."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import ceil, inf

from distserve_planner.goodput import Verdict
from distserve_planner.search.algorithm1 import Candidate
from distserve_planner.search.assignment import assign
from distserve_planner.search.deployment import Deployment
from distserve_planner.search.problem import Problem
from distserve_planner.search.ranking import Ranked
from distserve_planner.search.tasks import RateTask
from distserve_planner.search.workers import Workers

POOLING = 1.1  # several instances behind one queue do better than as many queues of one
MOST_TRIES = 400


def sized_units(units: Sequence[Candidate], rate: float) -> list[Candidate]:
    """Each unit as often as the rate needs at least: n = ceil(R / goodput), with the optimistic bound."""
    sized = []
    for unit in units:
        if unit.predicted > 0:
            count = ceil(rate / (POOLING * unit.predicted)) if unit.predicted < inf else 1
            sized.append(Candidate(unit.deployment.with_units(count), count * unit.predicted))
    return sized


def least_devices(
    workers: Workers, problem: Problem, candidates: Sequence[Candidate], rate: float, more: int = 3
) -> list[Ranked]:
    """The deployments with the fewest devices that meet `rate`, both objectives together.

    Candidates are tried by rising number of devices. One that passes is tried again in a long run. One that
    fails comes back with one more instance of the phase that missed (a unit more where phases are paired or
    colocated), until it does not fit the cluster. `more` failures are kept to say why they lost.
    """
    queue = _Queue(problem)
    for candidate in candidates:
        queue.push(candidate)
    heap = queue.heap
    passed: list[Ranked] = []
    failed: dict[str, Ranked] = {}
    tries = 0
    while heap and tries < MOST_TRIES:
        if passed and heap[0][0] >= passed[0].deployment.devices:
            break
        wave = [heapq.heappop(heap)[-1] for _ in range(min(len(heap), workers.jobs))]
        tries += len(wave)
        verdicts = workers.map([RateTask(c.deployment, rate) for c in wave])
        again = [c for c, v in zip(wave, verdicts, strict=True) if isinstance(v, Verdict) and v.meets]
        long = workers.map([RateTask(c.deployment, rate, long=True) for c in again])
        confirmed = dict(zip((c.deployment for c in again), long, strict=True))
        for candidate, first in zip(wave, verdicts, strict=True):
            verdict = confirmed.get(candidate.deployment, first)
            assert isinstance(verdict, Verdict)
            entry = _ranked(candidate, verdict, rate)
            if verdict.meets:
                passed.append(entry)
            else:
                failed[_shapes(candidate.deployment)] = entry
                queue.push(_larger(candidate, verdict, problem))
        passed.sort(key=lambda r: (r.deployment.devices, -(r.at.both if r.at else 0.0), str(r.deployment)))
    lost = sorted(failed.values(), key=lambda r: (r.deployment.devices, str(r.deployment)))
    return passed + lost[:more]


class _Queue:
    """Deployments to try, fewest devices first; among equals by name, then in the order they came.

    A name does not tell how a pipeline lies on nodes, so two deployments may share it.
    """

    def __init__(self, problem: Problem) -> None:
        self.heap: list[tuple[int, float, str, int, Candidate]] = []
        self._cluster = problem.cluster
        self._count = 0

    def push(self, candidate: Candidate) -> None:
        """Takes a candidate if it fits the cluster."""
        deployment = candidate.deployment
        if deployment.devices <= self._cluster.num_devices and assign(deployment, self._cluster) is not None:
            self._count += 1
            key = (deployment.devices, -candidate.predicted, str(deployment), self._count)
            heapq.heappush(self.heap, (*key, candidate))


def _larger(candidate: Candidate, verdict: Verdict, problem: Problem) -> Candidate:
    deployment = candidate.deployment
    if deployment.family == "high":
        assert deployment.prefill is not None
        assert deployment.decode is not None
        n, m = deployment.prefill.count, deployment.decode.count
        waits_for_prefill = verdict.attainment.missed(problem.slo) == "TTFT"
        larger = deployment.with_counts(n + waits_for_prefill, m + (not waits_for_prefill))
        return Candidate(larger, candidate.predicted)
    count = deployment.units
    return Candidate(deployment.with_units(count + 1), candidate.predicted * (count + 1) / count)


def _shapes(deployment: Deployment) -> str:
    return " ".join(f"{role} {group.shape}" for role, group in deployment.groups)


def _ranked(candidate: Candidate, verdict: Verdict, rate: float) -> Ranked:
    met = verdict.meets
    return Ranked(
        candidate.deployment, rate if met else 0.0, candidate.predicted, rate,
        verdict.attainment if met else None, None if met else verdict.attainment, long=met, probes=1,
    )  # fmt: skip
