"""Eq. 1 to 3 of the paper against a simulated queue and against each other."""

from __future__ import annotations

import math

import numpy as np
import pytest

from distserve_planner.queueing import (
    crossover_rate,
    md1_ttft_s,
    pipeline_ttft_s,
    two_way_pipeline_ttft_s,
    two_way_tensor_ttft_s,
)


def simulated_md1(rate: float, service: float, count: int) -> float:
    rng = np.random.default_rng(0)
    free = total = 0.0
    for arrival in np.cumsum(rng.exponential(1 / rate, count)).tolist():
        free = max(free, arrival) + service
        total += free - arrival
    return total / count


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
def test_md1_matches_a_simulated_queue(load: float) -> None:
    assert md1_ttft_s(load / 0.05, 0.05) == pytest.approx(simulated_md1(load / 0.05, 0.05, 200_000), rel=0.02)


def test_forms_agree_where_they_must() -> None:
    for rate in (0.1, 3.0, 9.0):
        assert two_way_pipeline_ttft_s(rate, 0.1) == pytest.approx(pipeline_ttft_s(rate, 0.1, 0.05))
        assert two_way_tensor_ttft_s(rate, 0.1, 1.6) == pytest.approx(md1_ttft_s(rate, 0.1 / 1.6))
        assert pipeline_ttft_s(rate, 0.1, 0.1) == pytest.approx(md1_ttft_s(rate, 0.1))


def test_saturated_queues_never_answer() -> None:
    assert md1_ttft_s(10, 0.1) == math.inf
    assert pipeline_ttft_s(20, 0.1, 0.05) == math.inf
    assert two_way_pipeline_ttft_s(20, 0.1) == math.inf
    assert two_way_tensor_ttft_s(16, 0.1, 1.6) == math.inf


@pytest.mark.parametrize("speedup", [1.2, 1.5, 1.8, 1.95])
def test_tensor_wins_below_the_crossover_and_pipeline_above(speedup: float) -> None:
    rate = crossover_rate(0.1, speedup)
    assert rate is not None
    low, high = 0.99 * rate, 1.01 * rate
    assert two_way_tensor_ttft_s(low, 0.1, speedup) < two_way_pipeline_ttft_s(low, 0.1)
    assert two_way_tensor_ttft_s(high, 0.1, speedup) > two_way_pipeline_ttft_s(high, 0.1)


def test_crossover_moves_with_k() -> None:
    rates = [crossover_rate(0.1, k) for k in (1.1, 1.4, 1.7)]
    assert rates == sorted(rates, key=lambda r: r or 0)
    assert crossover_rate(0.1, 2.0) is None
    assert crossover_rate(0.1, 1.0) == 0.0


def test_speedup_must_be_positive() -> None:
    with pytest.raises(ValueError, match="speedup=0"):
        two_way_tensor_ttft_s(1, 0.1, 0)
