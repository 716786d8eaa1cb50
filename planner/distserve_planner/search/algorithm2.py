"""Algorithm 2 (low node affinity): pairs of segments that share nodes, sized together."""

from __future__ import annotations

from collections.abc import Sequence

from distserve_planner.search.algorithm1 import Candidate, Phases
from distserve_planner.search.candidates import tasks_of_pair
from distserve_planner.search.deployment import Deployment
from distserve_planner.search.problem import Problem

# Decode alone sees Poisson arrivals; behind a prefill instance they are smoother, and a pair may do better.
SMOOTHING = 1.05


def bounded_units(problem: Problem, units: Sequence[Deployment], phases: Phases) -> list[Candidate]:
    """Units with a bound: neither phase does better in a pair than by itself (up to `SMOOTHING`)."""
    grid = 1 + problem.phase_precision.step  # the phases' rates are points of a grid, true ones lie above
    bounded = []
    for unit in units:
        prefill, decode = (phases[task] for task in tasks_of_pair(unit))
        bounded.append(Candidate(unit, grid * min(prefill.rate, SMOOTHING * decode.rate)))
    return bounded
