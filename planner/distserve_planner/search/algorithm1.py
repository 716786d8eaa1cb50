"""Algorithm 1 (high node affinity): phases sized apart, then replicated and combined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil

from distserve.core.shapes import Shape
from distserve_planner.goodput import Goodput
from distserve_planner.search.assignment import assign
from distserve_planner.search.bounds import transfer_ceiling
from distserve_planner.search.candidates import high_hops
from distserve_planner.search.deployment import Deployment, Group
from distserve_planner.search.problem import Problem
from distserve_planner.search.system_spec import kv_routes
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

    By rate over devices used, or by rate alone. Instances of one phase have one shape, as in the paper; of
    each pair of shapes the best numbers are kept.
    all_shapes: also those with a lower rate than another of no more devices; they may still be quicker.

    The paper's rate of a combination is the slower phase's. Where KV passes the network it is often less,
    and other numbers, or other shapes, are best: those that find room on one node.
    """
    options = _options(
        problem.cluster.num_devices,
        _sized(problem, phases, "prefill", all_shapes),
        _sized(problem, phases, "decode", all_shapes),
    )

    def score(candidate: Candidate) -> tuple[float, int]:
        used = candidate.deployment.devices
        return (candidate.predicted / used if per_device else candidate.predicted), -used

    options.sort(key=lambda c: str(c.deployment))
    options.sort(key=score, reverse=True)
    best: dict[tuple[Shape, Shape], tuple[tuple[float, int], Candidate]] = {}
    worst_kept = (0.0, 0)
    for option in options:  # optimistic scores: once all are below what is kept, nothing can change
        if score(option) <= worst_kept:
            break
        assert option.deployment.prefill is not None
        assert option.deployment.decode is not None
        pair = option.deployment.prefill.shape, option.deployment.decode.shape
        if pair in best and best[pair][0] >= score(option):
            continue
        candidate = _with_transfer(problem, option)
        if candidate is None or (pair in best and best[pair][0] >= score(candidate)):
            continue
        best[pair] = score(candidate), candidate
        if len(best) >= keep:
            worst_kept = sorted((kept for kept, _ in best.values()), reverse=True)[keep - 1]
    found = sorted(best.values(), key=lambda item: (-item[0][0], -item[0][1], str(item[1].deployment)))
    return [candidate for _, candidate in found[:keep]]


def _options(devices: int, prefills: Sequence[_Sized], decodes: Sequence[_Sized]) -> list[Candidate]:
    """Balanced numbers of each pair of shapes, transfer aside."""
    found = []
    for prefill, decode in product(prefills, decodes):
        for n in range(1, (devices - decode.shape.ranks) // prefill.shape.ranks + 1):
            left = devices - n * prefill.shape.ranks
            m = min(max(1, ceil(n * prefill.rate / decode.rate)), left // decode.shape.ranks)
            found += [_candidate(prefill, n, decode, count) for count in {max(1, m - 1), m}]
    return found


def _with_transfer(problem: Problem, candidate: Candidate) -> Candidate | None:
    """With the rate that the links allow, too; None if it has no place on the cluster."""
    deployment = candidate.deployment
    placed = assign(deployment, problem.cluster)
    if placed is None:
        return None
    if problem.assumptions.transfer == "free":
        return candidate
    limit = transfer_ceiling(problem, kv_routes(problem, deployment, placed))
    return Candidate(deployment, min(candidate.predicted, limit))


def replicas(problem: Problem, phases: Phases, rate: float, keep: int) -> list[Candidate]:
    """n = ceil(R / goodput) of each phase, the fewest devices first (last lines of Algorithm 1).

    Differs from the paper where rounding up matters: the shape is chosen by devices needed for R, not by
    goodput per device before rounding. Combinations whose KV the links carry at R go before others.
    """
    sized = []
    for role in ("prefill", "decode"):
        options = [
            (ceil(rate / s.rate) * s.shape.ranks, -s.rate / s.shape.ranks, s, ceil(rate / s.rate))
            for s in _sized(problem, phases, role)
        ]
        options.sort(key=lambda option: (option[0], option[1], option[2].shape.pp))
        sized.append(options[:keep])
    pairs = (_with_transfer(problem, _candidate(p[2], p[3], d[2], d[3])) for p, d in product(*sized))
    combined = [candidate for candidate in pairs if candidate is not None]
    combined.sort(key=lambda c: (c.predicted < rate, c.deployment.devices, -c.predicted))
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
