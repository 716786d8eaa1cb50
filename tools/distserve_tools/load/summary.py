"""One run in numbers: percentiles, attainment, stage shares, and whether the generator itself kept up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from distserve_planner.slo import Slo, independent_requests, wilson
from distserve_tools.load.record import STAGES, Record

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Summary:
    """Times in seconds; percentiles over the requests that succeeded, attainment over all of them."""

    requests: int
    failed: int
    duration_s: float
    offered_rps: float
    output_tokens_per_s: float
    generator_lag_p99_s: float
    attainment: float  # share that meets both objectives; failed requests do not
    attainment_low: float
    attainment_high: float
    ttft_attainment: float
    tpot_attainment: float
    ttft_s: Mapping[str, float]
    tpot_s: Mapping[str, float]
    itl_s: Mapping[str, float]
    e2e_s: Mapping[str, float]
    stages_s: Mapping[str, float]  # mean seconds of each stage
    errors: Mapping[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(records: Sequence[Record], slo: Slo, warmup_s: float = 0.0) -> Summary:
    """Over the requests planned at `warmup_s` or later. Raises `ValueError` if there are none."""
    counted = [r for r in records if r.planned_s >= warmup_s]
    if not counted:
        raise ValueError(f"warmup_s={warmup_s:g}: leaves no request of {len(records)}")
    good = [r for r in counted if r.ok]
    ttft_met = np.array([r.ok and r.ttft_s <= slo.ttft_s for r in counted])
    tpot_met = np.array([r.ok and r.tpot_s <= slo.tpot_s for r in counted])
    met = ttft_met & tpot_met
    low, high = wilson(float(met.mean()), independent_requests(met), 1.96)
    begin = min(r.sent_s for r in counted)
    duration = max(r.end_s for r in counted) - begin
    span = max(r.planned_s for r in counted) - min(r.planned_s for r in counted)
    return Summary(
        requests=len(counted),
        failed=len(counted) - len(good),
        duration_s=duration,
        offered_rps=(len(counted) - 1) / span if span > 0 else 0.0,
        output_tokens_per_s=sum(r.output_tokens for r in good) / duration if duration > 0 else 0.0,
        generator_lag_p99_s=float(np.percentile([r.lag_s for r in counted], 99)),
        attainment=float(met.mean()),
        attainment_low=low,
        attainment_high=high,
        ttft_attainment=float(ttft_met.mean()),
        tpot_attainment=float(tpot_met.mean()),
        ttft_s=_percentiles([r.ttft_s for r in good]),
        tpot_s=_percentiles([r.tpot_s for r in good if r.output_tokens > 1]),
        itl_s=_percentiles([gap for r in good for gap in r.gaps_s]),
        e2e_s=_percentiles([r.end_s - r.sent_s for r in good]),
        stages_s={s: float(np.mean([r.stages.get(s, 0.0) for r in good])) if good else 0.0 for s in STAGES},
        errors=_errors(counted),
    )


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    out = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return {"mean": float(np.mean(values)), **out}


def _errors(records: Sequence[Record]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for record in records:
        if record.error:
            kind = record.error[:120]
            counts[kind] = counts.get(kind, 0) + 1
    return counts
