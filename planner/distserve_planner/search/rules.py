"""The authors' search, for comparison: their enumeration and bisection over their event model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from distserve.core.parsing import ConfigError
from distserve.core.shapes import Shape
from distserve_planner.goodput import Requests
from distserve_planner.latency import LatencyModel
from distserve_planner.memory import MemoryRule
from distserve_planner.search.candidates import pp_degrees
from distserve_planner.search.problem import Problem
from distserve_planner.search.tasks import RulesTask
from distserve_planner.simdistserve import Latencies, simulate
from distserve_planner.simulator.authors import AuthorsPhase
from distserve_planner.slo import Slo

Backend = Literal["distserve", "vllm"]
LONGEST_PIPELINE = 8  # their table of KV capacities ends there


@dataclass(frozen=True)
class RulesSettings:
    """Their command line: requests per run, highest rate per device, and where bisection stops."""

    requests: int = 300
    max_rate: float = 5.0
    stop: float = 0.25
    backend: Backend = "distserve"
    high_affinity: bool = False


def configurations(problem: Problem, settings: RulesSettings) -> list[tuple[Shape, Shape | None]]:
    """Their enumeration, those of measured degrees and known capacity; equal pipelines once.

    Low affinity: segments of both phases fit a node, pp is pp_cross x pp_local of divisors of the layers.
    """
    model, cluster = problem.model, problem.cluster
    per_node, total = cluster.devices_per_node, cluster.num_devices
    pps = pp_degrees(model, model.num_layers)
    known = _runnable(problem, problem.latency)
    if settings.backend == "vllm":
        return [(s, None) for s in known if s.ranks <= total]
    found: dict[tuple[Shape, Shape | None], None] = {}
    local = [s for s in known if s.tp <= per_node or settings.high_affinity]
    if settings.high_affinity:
        pairs = product(local, local)
        return [(p, d) for p, d in pairs if p.ranks + d.ranks <= total]
    for cross in (pp for pp in pps if pp <= cluster.num_nodes):
        for prefill, decode in product(local, local):
            if prefill.pp % cross or decode.pp % cross:
                continue
            segment = (prefill.ranks + decode.ranks) // cross
            parts = (prefill.pp // cross in pps) and (decode.pp // cross in pps)
            if parts and segment <= per_node and cross * segment <= total:
                found[prefill, decode] = None
    return list(found)


def _runnable(problem: Problem, latency: LatencyModel) -> list[Shape]:
    pps = [pp for pp in pp_degrees(problem.model, problem.model.num_layers) if pp <= LONGEST_PIPELINE]
    shapes = [Shape(tp, pp) for tp in latency.measured_tp for pp in pps]
    return [shape for shape in shapes if problem.kv_tokens(shape) > 0]


def phase(problem: Problem, shape: Shape, backend: Backend) -> AuthorsPhase:
    """Times and capacity of an instance under these rules."""
    latency = problem.latency
    if backend == "vllm" and problem.unified_latency is not None:
        latency = problem.unified_latency
    if not latency.degree(shape.tp).prefill:
        raise ConfigError(f"tp={shape.tp}: {latency.device} has no prefill coefficients for it")
    return AuthorsPhase(latency.degree(shape.tp), shape.pp, problem.kv_tokens(shape))


def run_once(
    problem: Problem, requests: Requests, prefill: Shape, decode: Shape | None, rate: float, count: int
) -> Latencies:
    """`count` requests at `rate` per second, from an empty system until it is empty again."""
    backend: Backend = "vllm" if decode is None else "distserve"
    return simulate(
        phase(problem, prefill, backend),
        None if decode is None else phase(problem, decode, backend),
        (requests.times[:count] / rate).tolist(),
        requests.inputs[:count],
        requests.outputs[:count],
    )


def best_rate(problem: Problem, task: RulesTask) -> float:
    """Their bisection: highest rate per device found to pass, 0 if none did."""
    devices = task.prefill.ranks + (task.decode.ranks if task.decode is not None else 0)
    slo: Slo = problem.slo
    low, high, best = 0.0, task.max_rate, 0.0
    while high - low > task.stop:
        middle = (low + high) / 2
        seen = run_once(problem, problem.requests, task.prefill, task.decode, middle * devices, task.requests)
        if seen.passes(slo):
            low = best = middle
        else:
            high = middle
    return best


def authors_memory(problem: Problem) -> Problem:
    """The same problem with their reserve rule for KV memory."""
    return replace(problem, memory=MemoryRule.simdistserve())
