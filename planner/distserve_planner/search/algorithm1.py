"""Algorithm 1 (high node affinity): phases sized apart, then replicated and combined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from distserve.core.shapes import Shape
from distserve_planner.goodput import Goodput
from distserve_planner.search.assignment import assign
from distserve_planner.search.candidates import high_hops
from distserve_planner.search.deployment import Deployment, Group
from distserve_planner.search.problem import Problem
from distserve_planner.search.tasks import PhaseTask

Phases = Mapping[PhaseTask, Goodput]


@dataclass(frozen=True)
class Candidate:
    """A deployment and what its phases by themselves let expect of it: requests per second of all devices."""

    deployment: Deployment
    predicted: float


@dataclass(frozen=True)
class _Sized:
    shape: Shape
    rate: float


def combinations(
    problem: Problem, phases: Phases, *, per_device: bool, keep: int, all_shapes: bool = False
) -> list[Candidate]:
    """The `keep` best numbers of prefill and decode instances on at most all devices, best first.

    By rate over devices used, or by rate alone. Instances of one phase have one shape, as in the paper.
    all_shapes: also those with a lower rate than another of no more devices; they may still be quicker.
    """
    devices = problem.cluster.num_devices
    prefills = _sized(problem, phases, "prefill", all_shapes)
    decodes = _sized(problem, phases, "decode", all_shapes)
    found: list[tuple[float, int, Candidate]] = []
    for prefill in prefills:
        for decode in decodes:
            best: tuple[float, int, Candidate] | None = None
            for n in range(1, (devices - decode.shape.ranks) // prefill.shape.ranks + 1):
                left = devices - n * prefill.shape.ranks
                m = min(max(1, ceil(n * prefill.rate / decode.rate)), left // decode.shape.ranks)
                for count in {max(1, m - 1), m}:
                    option = _candidate(prefill, n, decode, count)
                    used = option.deployment.devices
                    score = option.predicted / used if per_device else option.predicted
                    key = (score, -used)
                    if best is None or key > best[:2]:
                        best = (score, -used, option)
            if best is not None:
                found.append(best)
    found.sort(key=lambda item: (-item[0], -item[1], str(item[2].deployment)))
    fitting = (item[2] for item in found if assign(item[2].deployment, problem.cluster) is not None)
    return [candidate for candidate, _ in zip(fitting, range(keep), strict=False)]


def replicas(problem: Problem, phases: Phases, rate: float, keep: int) -> list[Candidate]:
    """n = ceil(R / goodput) of each phase, the fewest devices first (last lines of Algorithm 1).

    Differs from the paper where rounding up matters: the shape is chosen by devices needed for R, not by
    goodput per device before rounding.
    """
    sized = []
    for role in ("prefill", "decode"):
        options = [
            (ceil(rate / s.rate) * s.shape.ranks, -s.rate / s.shape.ranks, s, ceil(rate / s.rate))
            for s in _sized(problem, phases, role)
        ]
        options.sort(key=lambda option: (option[0], option[1], option[2].shape.pp))
        sized.append(options[:keep])
    combined = [_candidate(p[2], p[3], d[2], d[3]) for p in sized[0] for d in sized[1]]
    combined.sort(key=lambda c: (c.deployment.devices, -c.predicted))
    return combined[:keep]


def _candidate(prefill: _Sized, n: int, decode: _Sized, m: int) -> Candidate:
    deployment = Deployment("high", Group(prefill.shape, n), Group(decode.shape, m))
    return Candidate(deployment, min(n * prefill.rate, m * decode.rate))


def _sized(problem: Problem, phases: Phases, role: str, all_shapes: bool = False) -> list[_Sized]:
    """Shapes that meet the phase's objective at some rate, unless another beats it with no more devices."""
    options = [
        _Sized(task.shape, result.rate)
        for task, result in phases.items()
        if task.role == role and result.rate > 0 and task.cross_hops == high_hops(problem, task.shape)
    ]
    return [
        a
        for a in options
        if all_shapes
        or not any(
            b.shape.ranks <= a.shape.ranks
            and b.rate >= a.rate
            and (b.shape.ranks, -b.rate) < (a.shape.ranks, -a.rate)
            for b in options
        )
    ]
