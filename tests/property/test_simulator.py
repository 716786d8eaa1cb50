"""Properties of the simulator: conservation, a monotone clock, and spans equal to single rounds."""

from __future__ import annotations

from typing import Literal
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distserve.core.decode_set import DecodeSet
from distserve.core.model_config import ModelConfig
from distserve.core.scheduler import Limits
from distserve_planner.cluster import Link
from distserve_planner.coefficients import DecodePiece, Degree, PrefillPiece
from distserve_planner.latency import LatencyModel
from distserve_planner.models_catalog import model_dimensions
from distserve_planner.simulator.spec import InstanceSpec, Route, SystemSpec
from distserve_planner.simulator.system import Simulation
from distserve_planner.slo import Slo, attainment

Form = Literal["disaggregated", "prefill", "decode", "prefill_first", "chunked_prefill"]

PIECES = Degree(
    1,
    (PrefillPiece(0.01, 1e-4, 1e-8),),
    (DecodePiece(0.02, 1e-6, 4e-5, 3), DecodePiece(0.018, 1e-6, 9e-5)),
)


def model() -> ModelConfig:
    return model_dimensions("opt-125m")


def instance(blocks: int, pp: int = 1, limits: Limits | None = None) -> InstanceSpec:
    latency = LatencyModel("opt-125m", model(), "test", "fp16", (PIECES,))
    return InstanceSpec(
        latency.instance(1, pp, stage_link=Link(1e9, 1e-4)), blocks, limits or Limits(6, 64, 32)
    )


def system(form: Form, count: int, pp: int, blocks: int) -> SystemSpec:
    one = (instance(blocks, pp),) * count
    routes = {(i, j): Route((i, 10 + j), 1e-3, 1e-4) for i in range(count) for j in range(count)}
    if form == "disaggregated":
        return SystemSpec(prefill=one, decode=one, routes=routes)
    if form == "prefill":
        return SystemSpec(prefill=one)
    if form == "decode":
        return SystemSpec(decode=one)
    return SystemSpec(unified=one, policy=form)


REQUESTS = st.lists(
    st.tuples(st.floats(0, 0.3), st.integers(1, 90), st.integers(1, 60)), min_size=1, max_size=40
)


@settings(max_examples=120, deadline=None)
@given(
    REQUESTS,
    st.sampled_from(["disaggregated", "prefill", "decode", "prefill_first", "chunked_prefill"]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([12, 200]),
)
def test_requests_and_blocks_are_conserved_and_stages_are_in_order(
    requests: list[tuple[float, int, int]], form: Form, count: int, pp: int, blocks: int
) -> None:
    arrivals = np.cumsum([gap for gap, _, _ in requests])
    run = Simulation(
        system(form, count, pp, blocks), arrivals.tolist(), [r[1] for r in requests], [r[2] for r in requests]
    )
    run.run()
    outcome = run.outcome()
    assert not outcome.refused.any()  # 12 blocks hold the longest request
    for stage, seconds in outcome.stages_s().items():
        assert (seconds >= 0).all(), stage
    total = sum(outcome.stages_s().values())
    assert total == pytest.approx(outcome.finish - outcome.arrival)
    for part in (*run.prefill, *run.decode, *run.unified):
        assert part.scheduler.blocks.free == blocks
        assert not part.scheduler.waiting


@settings(max_examples=60, deadline=None)
@given(REQUESTS, st.sampled_from(["disaggregated", "decode", "prefill_first"]), st.integers(1, 2))
def test_a_span_of_rounds_equals_its_single_rounds(
    requests: list[tuple[float, int, int]], form: Form, pp: int
) -> None:
    arrivals = np.cumsum([gap for gap, _, _ in requests]).tolist()
    runs = []
    for single in (False, True):
        run = Simulation(
            system(form, 1, pp, 500), arrivals, [r[1] for r in requests], [r[2] for r in requests]
        )
        if single:
            with mock.patch.object(DecodeSet, "horizon", return_value=1):
                run.run()
        else:
            run.run()
        runs.append(run.outcome())
    assert runs[0].finish == pytest.approx(runs[1].finish, abs=1e-6)
    assert runs[0].ready == pytest.approx(runs[1].ready, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(REQUESTS, st.integers(1, 3))
def test_the_clock_is_monotone(requests: list[tuple[float, int, int]], count: int) -> None:
    arrivals = np.cumsum([gap for gap, _, _ in requests]).tolist()
    run = Simulation(
        system("disaggregated", count, 1, 12), arrivals, [r[1] for r in requests], [r[2] for r in requests]
    )
    seen: list[float] = []
    step = type(run.clock).step

    def watched(clock: object) -> None:
        step(clock)  # type: ignore[arg-type]
        seen.append(run.clock.now)

    with mock.patch.object(type(run.clock), "step", watched):
        run.run()
    assert seen == sorted(seen)


def test_a_longer_run_continues_a_shorter_one_bit_for_bit() -> None:
    generator = np.random.default_rng(1)
    arrivals = np.cumsum(generator.standard_exponential(300) / 8).tolist()
    inputs, outputs = generator.integers(1, 80, 300).tolist(), generator.integers(1, 60, 300).tolist()
    whole = Simulation(system("disaggregated", 2, 2, 40), arrivals, inputs, outputs)
    whole.run()
    pieces = Simulation(system("disaggregated", 2, 2, 40), arrivals, inputs, outputs)
    for count in (50, 120, 300):
        pieces.run(count)
    assert (whole.outcome().finish == pieces.outcome().finish).all()


def test_requests_longer_than_the_pool_are_refused_not_stuck() -> None:
    run = Simulation(system("disaggregated", 1, 1, 4), [0.0, 0.1], [100, 10], [1, 5])
    run.run()
    assert run.outcome().refused.tolist() == [True, False]
    assert np.isinf(run.outcome().ttft_s[0])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.floats(0.5, 20), st.floats(1.05, 4), st.sampled_from([30, 400]))
def test_attainment_does_not_rise_with_rate_beyond_its_interval(
    seed: int, rate: float, factor: float, blocks: int
) -> None:
    generator = np.random.default_rng(seed)
    gaps = generator.standard_exponential(600)
    inputs, outputs = generator.integers(1, 200, 600).tolist(), generator.integers(1, 60, 600).tolist()
    slo = Slo(0.08, 0.03)
    seen = []
    for at in (rate, rate * factor):
        arrivals = (np.cumsum(gaps) / at).tolist()
        run = Simulation(system("disaggregated", 1, 1, blocks), arrivals, inputs, outputs)
        run.run()
        seen.append(attainment(run.outcome(100, 500), slo, z=2.58))
    slower, faster = seen
    assert faster.both <= slower.both + (slower.high - slower.low)
