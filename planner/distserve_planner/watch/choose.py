"""Which placement is best for the latest workload, and what changing to it takes.

A search small enough to be done while serving: a few shapes of each phase, bounded in closed form, and only
deployments around the number of instances that the rate needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from distserve.core.shapes import Shape
from distserve_planner.goodput import Precision, Requests, Verdict, probe
from distserve_planner.search.algorithm1 import Candidate
from distserve_planner.search.assignment import assign
from distserve_planner.search.bounds import decode_ceiling, prefill_ceiling
from distserve_planner.search.candidates import shapes, unified_units
from distserve_planner.search.deployment import Deployment, Group
from distserve_planner.search.problem import Problem
from distserve_planner.search.system_spec import system_spec
from distserve_planner.search.unified import bounded_unified
from distserve_planner.slo import Attainment
from distserve_planner.workload.model import Workload
from distserve_planner.workload.trace import Trace

QUICK = Precision(300, 900, 300, z=1.96, step=0.05)
REQUESTS = 3000  # drawn from what was fitted to the latest requests
_SHAPES = 2  # of each phase
_TRIES = 24  # simulations of one search
_STEP = 0.15  # by which a deployment that is far too small grows

Probe = Callable[[Deployment, float], Verdict]
"""Simulates a deployment at a rate, under the latest workload."""


def recent_problem(problem: Problem, recent: Trace, seed: int = 0) -> Problem:
    """The problem with requests like the latest ones: arrivals and lengths fitted to them, drawn anew."""
    workload = Workload.fit(recent, max_total_tokens=problem.model.max_context)
    requests = Requests(workload.resample(seed, 1.0, REQUESTS)).allowing(problem.assumptions.max_tokens)
    return replace(problem, requests=requests, precision=QUICK, long_precision=QUICK)


Bounded = list[tuple[Shape, float]]


class Search:
    """What is searched: a problem, how a deployment is tried, and the bounds, which are computed once."""

    def __init__(self, problem: Problem, run: Probe) -> None:
        self.problem, self.run = problem, run
        fitting = shapes(problem).fitting
        self._bounds = {
            role: {shape: min(bound(problem, problem.instance(shape)), 1e9) for shape in fitting}
            for role, bound in (("prefill", prefill_ceiling), ("decode", decode_ceiling))
        }
        units = bounded_unified(problem, unified_units(problem, fitting))
        units = [unit for unit in units if 0 < unit.predicted < inf]
        units.sort(key=lambda unit: -unit.predicted / unit.deployment.devices)
        self._units: dict[str, Candidate] = {}
        for unit in units:
            self._units.setdefault(unit.deployment.family, unit)

    def shapes_of(self, role: str, group: Group | None) -> Bounded:
        """The present shape of a phase, and those with the best bound per device, with their bounds."""
        bounds = self._bounds[role]
        order = sorted(bounds, key=lambda s: (-bounds[s] / s.ranks, s.ranks))
        first = [group.shape] if group is not None else []
        return [(shape, bounds[shape]) for shape in list(dict.fromkeys([*first, *order]))[:_SHAPES]]

    def bound(self, role: str, group: Group) -> float:
        """Optimistic requests/s of a phase."""
        return group.count * self._bounds[role][group.shape]

    def units(self, present: Deployment) -> list[Candidate]:
        """The best colocated instance of each policy, and the present one."""
        found = list(self._units.values())
        if present.unified is not None:
            found += bounded_unified(self.problem, [present.with_units(1)])
        return found


def simulated(problem: Problem) -> Probe:
    """A probe that runs each simulation once, however often it is asked."""
    seen: dict[tuple[Deployment, float], Verdict] = {}

    def run(deployment: Deployment, rate: float) -> Verdict:
        key = (deployment, rate)
        if key not in seen:
            seen[key] = _probe(problem, deployment, rate)
        return seen[key]

    return run


def _probe(problem: Problem, deployment: Deployment, rate: float) -> Verdict:
    placed = assign(deployment, problem.cluster)
    if placed is None:
        raise ValueError(f"{deployment} does not fit the cluster")
    system = system_spec(problem, deployment, placed)
    return probe(system, problem.requests, rate, problem.slo, problem.precision)


@dataclass(frozen=True)
class Choice:
    """The deployment chosen, and how it does at the rate that it was chosen for."""

    deployment: Deployment
    rate: float
    attainment: Attainment
    meets: bool
    tried: int


def fewest_devices(
    search: Search, present: Deployment, rate: float, most: int | None = None
) -> Choice | None:
    """The deployment with the fewest devices (at most `most`) that meets `rate`; if none was found, the one
    tried with the highest attainment. None if nothing fits in."""
    problem, run = search.problem, search.run
    limit = problem.cluster.num_devices if most is None else most
    queue = sorted(candidates(search, present, rate), key=lambda d: (d.devices, str(d)))
    queue = [d for d in queue if _fits(problem, d, limit)]
    best: Choice | None = None
    seen: set[Deployment] = set()
    tried = 0
    while queue and tried < _TRIES:
        deployment = queue.pop(0)
        if deployment in seen:
            continue
        seen.add(deployment)
        tried += 1
        verdict = run(deployment, rate)
        choice = Choice(deployment, rate, verdict.attainment, verdict.meets, tried)
        if verdict.meets:
            return _trimmed(choice, run)
        if best is None or verdict.attainment.both > best.attainment.both:
            best = choice
        larger = _larger(deployment, verdict.attainment, problem)
        if _fits(problem, larger, limit):
            queue.append(larger)
            queue.sort(key=lambda d: (d.devices, str(d)))
    return best


def best_on_devices(search: Search, present: Deployment, rate: float) -> Choice | None:
    """The highest attainment on as many devices as the present deployment has: what a change of roles, of
    tp and pp, or to unified instances can do without a device more."""
    devices = present.devices
    options = [d for d in _splits(search, present, devices) if _fits(search.problem, d, devices)]
    options.sort(key=lambda d: (_needed(search, d, rate), str(d)))  # the least strained first
    best: Choice | None = None
    for tried, deployment in enumerate(options[:_TRIES], 1):
        verdict = search.run(deployment, rate)
        if best is None or verdict.attainment.both > best.attainment.both:
            best = Choice(deployment, rate, verdict.attainment, verdict.meets, tried)
    return best


def candidates(search: Search, present: Deployment, rate: float) -> list[Deployment]:
    """For each pair of shapes, and each colocated one, as many instances as the bounds say are needed."""
    found = [
        Deployment("high", Group(p, ceil(rate / pr)), Group(d, ceil(rate / dr)))
        for p, pr in search.shapes_of("prefill", present.prefill)
        for d, dr in search.shapes_of("decode", present.decode)
        if "high" in search.problem.families
    ]
    for unit in search.units(present):
        found.append(unit.deployment.with_units(max(1, ceil(rate / unit.predicted))))
    return found


def _splits(search: Search, present: Deployment, devices: int) -> list[Deployment]:
    found = []
    for p, _ in search.shapes_of("prefill", present.prefill):
        for d, _ in search.shapes_of("decode", present.decode):
            for n in range(1, (devices - d.ranks) // p.ranks + 1):
                m = (devices - n * p.ranks) // d.ranks
                found.append(Deployment("high", Group(p, n), Group(d, m)))
    if "high" not in search.problem.families:
        found.clear()
    for unit in search.units(present):
        found.append(unit.deployment.with_units(max(1, devices // unit.deployment.devices)))
    return found


def _needed(search: Search, deployment: Deployment, rate: float) -> float:
    """How far the scarcer phase is used, by the bounds."""
    if deployment.prefill is None or deployment.decode is None:
        unit = bounded_unified(search.problem, [deployment.with_units(1)])[0]
        return rate / (unit.predicted * deployment.units)
    phases = (("prefill", deployment.prefill), ("decode", deployment.decode))
    return rate / min(search.bound(role, group) for role, group in phases)


def _larger(deployment: Deployment, seen: Attainment, problem: Problem) -> Deployment:
    """More of the phase that missed; of both where both did badly, for a full decode phase also holds
    prefill up."""
    if deployment.prefill is None or deployment.decode is None:
        return deployment.with_units(deployment.units + _more(deployment.units, seen.both))
    n, m = deployment.prefill.count, deployment.decode.count
    first = seen.missed(problem.slo) == "TTFT"
    if max(seen.ttft, seen.tpot) < 0.5:
        return deployment.with_counts(n + _more(n, seen.ttft), m + _more(m, seen.tpot))
    return deployment.with_counts(n + first * _more(n, seen.ttft), m + (not first) * _more(m, seen.tpot))


def _more(count: int, share: float) -> int:
    return max(1, round(_STEP * count)) if share < 0.5 else 1


def _trimmed(choice: Choice, run: Probe) -> Choice:
    """Without what growing in steps, or two phases at once, gave too much."""
    while True:
        for smaller in _smaller(choice.deployment):
            verdict = run(smaller, choice.rate)
            if verdict.meets:
                choice = replace(choice, deployment=smaller, attainment=verdict.attainment)
                break
        else:
            return choice


def _smaller(deployment: Deployment) -> list[Deployment]:
    if deployment.prefill is None or deployment.decode is None:
        return [deployment.with_units(deployment.units - 1)] if deployment.units > 1 else []
    n, m = deployment.prefill.count, deployment.decode.count
    found = [deployment.with_counts(n, m - 1)] if m > 1 else []
    return [*found, deployment.with_counts(n - 1, m)] if n > 1 else found


def _fits(problem: Problem, deployment: Deployment, most: int) -> bool:
    return deployment.devices <= most and assign(deployment, problem.cluster) is not None


def common_part(present: Sequence[tuple[str, Group]], wanted: Sequence[tuple[str, Group]]) -> dict[str, int]:
    """Instances of each role that stay through a change: those of the same role and shape."""
    after = {(role, group.shape): group.count for role, group in wanted}
    return {role: min(group.count, after.get((role, group.shape), 0)) for role, group in present}
