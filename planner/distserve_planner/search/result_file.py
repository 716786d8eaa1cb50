"""A search's result as JSON values, and back: `planner report --result` draws it without searching again."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from distserve.core.parsing import ConfigError, parse
from distserve_planner.json_values import plain
from distserve_planner.search.assignment import assign
from distserve_planner.search.candidates import shapes
from distserve_planner.search.diagnosis import Diagnosis
from distserve_planner.search.problem import Family, Problem
from distserve_planner.search.result import Objective, Row, SearchResult, Statistics


@dataclass(frozen=True)
class Saved:
    """What of a `SearchResult` does not follow from the problem. winner: index among the rows.

    problem: fingerprint of what was searched, so that another profile or trace is noticed.
    """

    problem: str
    families: tuple[Family, ...]
    objective: Objective
    winner: int
    rows: tuple[Row, ...]
    statistics: Statistics
    diagnosis: Diagnosis | None = None
    notes: tuple[str, ...] = ()


def to_values(problem: Problem, result: SearchResult) -> dict[str, Any]:
    """Plain JSON values; what is not finite becomes None."""
    winner = [row.deployment for row in result.rows].index(result.winner.deployment)
    saved = Saved(
        fingerprint(problem),
        problem.families,
        result.objective,
        winner,
        result.rows,
        result.statistics,
        result.diagnosis,
        result.notes,
    )
    values = plain(saved)
    assert isinstance(values, dict)
    return values


def from_values(problem: Problem, values: object, where: str) -> tuple[Problem, SearchResult]:
    """The problem, for all families, with those that were searched; and what was found.

    Raises `ConfigError` if it was another problem, or for values of another form.
    """
    saved = parse(Saved, _with_infinity(values), where)
    if saved.problem != fingerprint(problem):
        raise ConfigError(
            f"{where}: the model, profile, workload or cluster files have changed since this search; search "
            "again"
        )
    if not 0 <= saved.winner < len(saved.rows):
        raise ConfigError(f"{where}.winner={saved.winner}: must be one of the {len(saved.rows)} rows")
    winner = saved.rows[saved.winner]
    placed = assign(winner.deployment, problem.cluster)
    if placed is None:
        raise ConfigError(f"{where}: {winner.deployment} does not fit the cluster")
    result = SearchResult(
        saved.objective,
        winner,
        placed,
        saved.diagnosis,
        saved.rows,
        best_by_family(saved.rows),
        shapes(problem),
        saved.statistics,
        saved.notes,
    )
    return replace(problem, families=saved.families), result


def best_by_family(rows: tuple[Row, ...]) -> dict[Family, Row]:
    """The best row of each family."""
    best: dict[Family, Row] = {}
    for row in sorted(rows, key=lambda r: -r.score):
        best.setdefault(row.deployment.family, row)
    return best


def fingerprint(problem: Problem) -> str:
    """The same for the same latency models, cluster, requests, objectives and assumptions."""
    requests = problem.requests
    seen = (
        problem.latency,
        problem.unified_latency,
        problem.cluster,
        problem.slo,
        problem.assumptions,
        problem.memory,
        problem.precision,
        (len(requests), requests.mean_input, requests.mean_output, requests.mean_square, requests.times[-1]),
    )
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]


_INFINITE = ("ttft_s", "tpot_s", "bound")  # numbers of which None says that they have no end


def _with_infinity(value: Any) -> Any:
    """Puts infinity back, and percentiles' keys to numbers."""
    if isinstance(value, Mapping):
        return {
            (int(key) if isinstance(key, str) and key.isdigit() else key): (
                math.inf
                if item is None and (key in _INFINITE or str(key).isdigit())
                else _with_infinity(item)
            )
            for key, item in value.items()
        }
    return [_with_infinity(item) for item in value] if isinstance(value, list) else value
