"""Colocated baselines: one engine for both phases, with each shape and policy."""

from __future__ import annotations

from collections.abc import Sequence

from distserve_planner.search.algorithm1 import Candidate
from distserve_planner.search.bounds import decode_ceiling, prefill_ceiling
from distserve_planner.search.deployment import Deployment
from distserve_planner.search.problem import Problem


def bounded_unified(problem: Problem, units: Sequence[Deployment]) -> list[Candidate]:
    """Units bounded by the time of both phases: 1 / (1 / prefill rate + 1 / decode rate) with full batches.

    Chunked prefill computes prompts in the shadow of decode's weight reads: only the longer of both counts.
    """
    bounded = []
    for unit in units:
        assert unit.unified is not None
        spec = problem.instance(unit.unified.shape, unified=True, chunk_tokens=unit.chunk_tokens)
        prefill, decode = prefill_ceiling(problem, spec), decode_ceiling(problem, spec)
        both = min(prefill, decode) if unit.family == "chunked_prefill" else 1 / (1 / prefill + 1 / decode)
        bounded.append(Candidate(unit, both))
    return bounded
