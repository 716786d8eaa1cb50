"""Goodput of the systems that a report compares: from the search where it has it, else by bisection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distserve_planner.goodput import Goodput
from distserve_planner.report.systems import Case
from distserve_planner.search.deployment import Deployment
from distserve_planner.search.tasks import DeploymentTask, PhaseTask
from distserve_planner.search.workers import Workers


def deployment_goodputs(
    case: Case, deployments: Sequence[Deployment], workers: Workers
) -> dict[Deployment, float]:
    """Requests/s of all devices of each, both objectives met together; 0 if at no rate."""
    known = _known(case)
    unknown = [d for d in dict.fromkeys(deployments) if d not in known]
    results = workers.map([DeploymentTask(d) for d in unknown])
    found = {d: r.rate for d, r in zip(unknown, results, strict=True) if isinstance(r, Goodput)}
    return {d: known[d] if d in known else found[d] for d in deployments}


def phase_goodputs(tasks: Sequence[PhaseTask], workers: Workers) -> Mapping[PhaseTask, Goodput]:
    """Goodput of phases alone on one instance, as Algorithm 1 sizes them."""
    results = workers.map(tasks)
    return {t: r for t, r in zip(tasks, results, strict=True) if isinstance(r, Goodput)}


def _known(case: Case) -> dict[Deployment, float]:
    """Goodputs that the search has found; not those of candidates that it dropped early."""
    if case.result.objective.kind not in ("per-device", "cluster"):
        return {}
    return {
        row.deployment: row.entry.rate
        for row in case.result.rows
        if row.entry is not None and row.entry.rate > 0
    }
