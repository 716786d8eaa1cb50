"""A closer look at one deployment at one rate: stages, usage, and what limits it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from distserve_planner.goodput import Precision, Requests, most_requests, warm_up_requests
from distserve_planner.simulator.records import Outcome
from distserve_planner.simulator.spec import SystemSpec
from distserve_planner.simulator.usage import Usage, usage
from distserve_planner.slo import Attainment, Slo, attainment

PERCENTILES = (50, 90, 95, 99)
QUEUE_SAMPLES = 48
PROGRESS_REQUESTS = 500


@dataclass(frozen=True)
class Diagnosis:
    """Figures of one simulated rate.

    stages_s: mean seconds of each stage. ttft_s, tpot_s: by `PERCENTILES`. prefill_queue, decode_queue: at
    `queue_times_s`, requests waiting for prefill and for admission to decode.
    """

    rate: float
    attainment: Attainment
    stages_s: Mapping[str, float]
    ttft_s: Mapping[int, float]
    tpot_s: Mapping[int, float]
    usage: Usage
    queue_times_s: tuple[float, ...]
    prefill_queue: tuple[int, ...]
    decode_queue: tuple[int, ...]
    preemptions: int
    refused: int


def diagnose(
    system: SystemSpec,
    requests: Requests,
    rate: float,
    slo: Slo,
    precision: Precision,
    progress: Callable[[int, int], None] | None = None,
) -> Diagnosis:
    """Simulates `precision.max_requests` (or what the trace has) between warm-up and cool-down.

    progress: told how many requests of how many have ended.
    """
    warm_up = warm_up_requests(requests, rate, slo)
    count = max(1, most_requests(requests, warm_up, precision))
    warm_up = min(warm_up, max(0, (len(requests) - count) // 2))
    run = requests.simulation(system, rate, 2 * warm_up + count)
    if progress is not None:
        for done in range(0, warm_up + count, PROGRESS_REQUESTS):
            run.run(done)
            progress(done, warm_up + count)
    run.run(warm_up + count)
    outcome = run.outcome(warm_up, warm_up + count)
    used = usage(run, outcome, requests.inputs[warm_up : warm_up + count])
    times = np.linspace(outcome.arrival[0], outcome.arrival[-1], QUEUE_SAMPLES)
    everyone = run.outcome(0, warm_up + count)
    waiting, admission = everyone.queue_at(times)
    return Diagnosis(
        rate,
        attainment(outcome, slo),
        {name: float(t.mean()) if len(t) else 0.0 for name, t in outcome.stages_s().items()},
        _percentiles(outcome, "ttft_s"),
        _percentiles(outcome, "tpot_s"),
        used,
        tuple(float(t - times[0]) for t in times),
        tuple(int(n) for n in waiting),
        tuple(int(n) for n in admission),
        outcome.preemptions,
        int(outcome.refused.sum()),
    )


def _percentiles(outcome: Outcome, name: str) -> dict[int, float]:
    values = getattr(outcome, name)
    finite = values[np.isfinite(values)]
    return {p: float(np.percentile(finite, p)) if len(finite) else float("inf") for p in PERCENTILES}
