"""The numbers behind a report as plain JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distserve_planner.json_values import plain
from distserve_planner.report.section import Section
from distserve_planner.report.systems import Case
from distserve_planner.search.result import Row

__all__ = ["document", "plain"]

SCHEMA = "report/1"


def document(case: Case, sections: Sequence[Section], effort: str) -> dict[str, Any]:
    """`schema: report/1`: the case, the search's result, and per figure its data; None where it has none."""
    problem, result = case.problem, case.result
    cluster = problem.cluster
    return {
        "schema": SCHEMA,
        "effort": effort,
        "case": {
            "model": problem.latency.model_name,
            "dtype": problem.latency.dtype,
            "device": cluster.device,
            "nodes": cluster.num_nodes,
            "devices": cluster.num_devices,
            "workload": case.workload,
            "slo": plain(problem.slo),
            "assumptions": plain(problem.assumptions),
        },
        "search": {
            "objective": plain(result.objective),
            "winner": _row(result.winner),
            "rows": [_row(row) for row in case.rows],
            "diagnosis": plain(result.diagnosis),
            "statistics": plain(result.statistics),
            "notes": list(result.notes),
        },
        "figures": {
            section.key: {"missing": section.missing} if section.missing else plain(section.data)
            for section in sections
        },
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "placement": str(row.deployment),
        "deployment": plain(row.deployment),
        "devices": row.deployment.devices,
        "score": plain(row.score),
        "figure": row.figure,
        "reason": row.reason,
        "attainment": plain(row.entry.at) if row.entry is not None else None,
    }
