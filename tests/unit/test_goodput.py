"""Attainment, its interval, and the search for the highest rate."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from distserve.core.parsing import ConfigError
from distserve.core.scheduler import Limits
from distserve_planner.coefficients import DecodePiece, Degree, PrefillPiece
from distserve_planner.goodput import Precision, Requests, goodput, grid_exponent, grid_rate, lone, probe
from distserve_planner.latency import LatencyModel
from distserve_planner.models_catalog import model_dimensions
from distserve_planner.queueing import md1_ttft_s
from distserve_planner.simulator.records import Outcome
from distserve_planner.simulator.spec import InstanceSpec, SystemSpec
from distserve_planner.slo import Slo, attainment, independent_requests, percentile, wilson
from distserve_planner.workload.trace import Trace

PROMPT = 512


def prefill_system(service_s: float, count: int = 1) -> SystemSpec:
    degree = Degree(1, (PrefillPiece(service_s, 0.0),), (DecodePiece(0.02, 0.0),))
    latency = LatencyModel("opt-125m", model_dimensions("opt-125m"), "test", "fp16", (degree,))
    spec = InstanceSpec(latency.instance(1), 10_000, Limits(64, PROMPT))
    return SystemSpec(prefill=(spec,) * count)


def requests(count: int = 20_000, seed: int = 3) -> Requests:
    gaps = np.random.default_rng(seed).standard_exponential(count)
    return Requests(Trace(np.cumsum(gaps), np.full(count, PROMPT), np.full(count, 1)))


def outcome(ttft: list[float], tpot: list[float]) -> Outcome:
    refused = np.isinf(ttft)
    first = np.where(refused, -1.0, ttft)
    output = np.full(len(ttft), 11)
    zero = np.zeros(len(ttft))
    finish = first + 10 * np.array(tpot)
    return Outcome(zero, zero, first, first, first, finish, output, refused)


def test_attainment_counts_requests_that_meet_both() -> None:
    seen = attainment(outcome([0.1, 0.3, 0.1, 0.3], [0.05, 0.05, 0.2, 0.2]), Slo(0.2, 0.1))
    assert (seen.ttft, seen.tpot, seen.both) == (0.5, 0.5, 0.25)
    assert seen.low < 0.25 < seen.high
    apart = attainment(outcome([0.1, 0.3, 0.1, 0.3], [0.05, 0.05, 0.2, 0.2]), Slo(0.2, 0.1, separate=True))
    assert apart.both == 0.5


def test_refused_requests_miss() -> None:
    seen = attainment(outcome([0.1, math.inf], [0.05, 0.05]), Slo(0.2, 0.1))
    assert seen.both == 0.5
    assert seen.ttft_s == math.inf


def test_percentile_interpolates_as_numpy_does() -> None:
    values = np.random.default_rng(0).random(37)
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        assert percentile(values, share) == pytest.approx(np.quantile(values, share))


def test_wilson_interval() -> None:
    # Wilson (1927), 90 of 100 at 95 %: 0.826 to 0.945
    low, high = wilson(0.9, 100, 1.96)
    assert (low, high) == (pytest.approx(0.8257, abs=1e-3), pytest.approx(0.9448, abs=1e-3))
    assert wilson(0.0, 0, 1.96) == (0.0, 1.0)


def test_requests_that_hang_together_count_for_fewer() -> None:
    generator = np.random.default_rng(5)
    alone = generator.random(4000) < 0.9
    together = np.repeat(generator.random(40) < 0.9, 100)
    assert independent_requests(alone) > 2500
    assert independent_requests(together) < 100


def test_goodput_is_where_the_md1_queue_meets_its_objective() -> None:
    """P90 of the M/D/1 sojourn from a long simulation brackets the rate that the bisection finds."""
    system, given, slo = prefill_system(0.1), requests(), Slo(0.3, 1.0)
    precision = Precision(1000, 3000)
    found = goodput(system, given, slo, precision, devices=1, ceiling=10.0)
    assert 0 < found.rate < 10
    assert found.at is not None
    assert found.above is not None
    assert found.at.both >= 0.9
    assert found.above.low < 0.9  # the later half of it misses
    # the mean at that rate must be below the objective that nine in ten meet
    assert md1_ttft_s(found.rate, 0.1) < 0.3


def test_goodput_does_not_depend_on_the_bracket() -> None:
    system, given, slo, precision = prefill_system(0.1), requests(), Slo(0.3, 1.0), Precision(500, 1500)
    rates = {
        goodput(system, given, slo, precision, devices=1, ceiling=ceiling, floor=floor, first_step=step).rate
        for ceiling, floor, step in (
            (9.9, 0.0, 16),
            (40.0, 0.0, 3),
            (5.0, 0.0, 1),
            (9.9, 3.0, 16),
            (7.0, 5.0, 1),
        )
    }
    assert len(rates) == 1


def test_twice_the_instances_do_more_than_twice_as_much() -> None:
    """A central queue pools; goodput per device rises."""
    slo, given, precision = Slo(0.3, 1.0), requests(), Precision(1000, 2000)
    one = goodput(prefill_system(0.1), given, slo, precision, devices=1, ceiling=10.0)
    two = goodput(prefill_system(0.1, 2), given, slo, precision, devices=2, ceiling=20.0)
    assert two.rate > 2 * one.rate


def test_floor_that_is_missed_costs_one_probe() -> None:
    found = goodput(
        prefill_system(0.1), requests(), Slo(0.3, 1.0), Precision(), devices=1, ceiling=10.0, floor=9.5
    )
    assert (found.rate, found.probes) == (0.0, 1)
    assert found.above is not None
    assert found.above.ttft < 0.9


def test_impossible_for_a_lone_request_is_said_at_once() -> None:
    found = goodput(prefill_system(0.1), requests(), Slo(0.09, 1.0), Precision(), devices=1, ceiling=10.0)
    assert (found.rate, found.probes) == (0.0, 0)
    assert found.lone is not None
    assert found.lone.ttft_s == pytest.approx(0.1)
    assert lone(prefill_system(0.1), requests(), Slo(0.11, 1.0)).both == 1.0


def test_attainment_does_not_rise_with_rate() -> None:
    system, given, slo = prefill_system(0.1), requests(), Slo(0.3, 1.0)
    precision = Precision(2000, 2000)
    seen = [probe(system, given, rate, slo, precision).attainment for rate in (1, 3, 5, 6, 7, 8, 9)]
    for slower, faster in pairwise(seen):
        assert faster.both <= slower.both + (slower.high - slower.low)


def test_grid_of_rates() -> None:
    precision = Precision(step=0.02)
    for exponent in (-40, 0, 37):
        assert grid_exponent(grid_rate(exponent, precision), precision) == exponent
        assert grid_exponent(1.01 * grid_rate(exponent, precision), precision) == exponent


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ttft_s": 0, "tpot_s": 1}, "ttft_s=0: must be above 0"),
        ({"ttft_s": 1, "tpot_s": -1}, "tpot_s=-1: must be above 0"),
        ({"ttft_s": 1, "tpot_s": 1, "attainment": 90}, "attainment=90"),
    ],
)
def test_objectives_out_of_range_are_named(values: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Slo(**values)  # type: ignore[arg-type]


def test_too_few_requests_for_the_rate_are_an_error() -> None:
    with pytest.raises(ConfigError, match="requests=120: too few"):
        probe(prefill_system(0.1), requests(120), 5.0, Slo(0.3, 1.0), Precision())


def test_patience_sees_a_batch_that_grows_slowly() -> None:
    """Near its limit a decode batch wanders for thousands of requests before TPOT is missed."""
    degree = Degree(1, (PrefillPiece(0.1, 0.0),), (DecodePiece(0.02, 0.0, 1e-3),))
    latency = LatencyModel("opt-125m", model_dimensions("opt-125m"), "test", "fp16", (degree,))
    system = SystemSpec(decode=(InstanceSpec(latency.instance(1), 10_000, Limits(1000, PROMPT)),))
    count = 12_000
    gaps = np.random.default_rng(5).standard_exponential(count)
    trace = Trace(np.cumsum(gaps), np.full(count, 20), np.full(count, 101), "decode")
    slo, rate = Slo(1.0, 0.2), 8.5
    hasty = probe(system, Requests(trace), rate, slo, Precision(500, 6000, 500))
    patient = probe(system, Requests(trace), rate, slo, Precision(500, 6000, 500, patient=True))
    assert hasty.meets
    assert not patient.meets
    assert patient.attainment.requests > hasty.attainment.requests
