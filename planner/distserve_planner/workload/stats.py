"""What a trace looks like: counts, rate, burstiness, percentiles, correlation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distserve_planner.workload.lengths import spearman
from distserve_planner.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class LengthStats:
    """Mean and percentiles of token counts."""

    mean: float
    p5: float
    p50: float
    p90: float
    p99: float
    max: int


@dataclass(frozen=True, slots=True)
class TraceStats:
    """rate_rps, gap_cv and duration_s are None for a trace without times; correlation is Spearman's."""

    requests: int
    duration_s: float | None
    rate_rps: float | None
    gap_cv: float | None
    input: LengthStats
    output: LengthStats
    correlation: float

    def to_mapping(self) -> dict[str, Any]:
        """Plain dictionaries, for JSON."""
        return asdict(self)


def trace_stats(trace: Trace) -> TraceStats:
    """Statistics of a trace."""
    timed = trace.timed and trace.duration_s > 0
    gaps = np.diff(trace.arrival_s)
    return TraceStats(
        requests=len(trace),
        duration_s=trace.duration_s if timed else None,
        rate_rps=trace.rate_rps if timed else None,
        gap_cv=float(gaps.std(ddof=1) / gaps.mean()) if timed and len(gaps) > 1 else None,
        input=_lengths(trace.input_tokens),
        output=_lengths(trace.output_tokens),
        correlation=spearman(trace.input_tokens, trace.output_tokens),
    )


def _lengths(values: NDArray[np.int64]) -> LengthStats:
    p5, p50, p90, p99 = (float(v) for v in np.percentile(values, [5, 50, 90, 99]))
    return LengthStats(float(values.mean()), p5, p50, p90, p99, int(values.max()))
