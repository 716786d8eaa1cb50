"""How much is simulated for a report: quick for a first look, full for numbers to rely on."""

from __future__ import annotations

from dataclasses import dataclass

from distserve_planner.goodput import Precision


@dataclass(frozen=True)
class Effort:
    """precision, long_precision: of the search and of every goodput. trace_requests: drawn for all of them.

    curve_points, curve_requests: rates on a curve, and requests measured at each. joint_points: deployments
    simulated jointly beside the arithmetic, where a figure has both. timed_search_s: sizes of the search-time
    figure grow until one search takes longer.
    """

    name: str
    precision: Precision
    long_precision: Precision
    trace_requests: int
    curve_points: int
    curve_requests: int
    joint_points: int
    timed_search_s: float

    @classmethod
    def quick(cls) -> Effort:
        """Under a minute on two cores for a model of one device on one node."""
        return cls(
            "quick",
            Precision(400, 1000, 200, step=0.05),
            Precision(1000, 2500, 500, step=0.05, patient=True),
            trace_requests=12_000,
            curve_points=8,
            curve_requests=700,
            joint_points=3,
            timed_search_s=5.0,
        )

    @classmethod
    def full(cls) -> Effort:
        """The search's own precision, and curves whose points are within about two percentage points."""
        return cls(
            "full",
            Precision(),
            Precision(4000, 20_000, 4000, patient=True),
            trace_requests=60_000,
            curve_points=14,
            curve_requests=3000,
            joint_points=8,
            timed_search_s=120.0,
        )
