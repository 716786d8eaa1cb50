"""The latency model: closed forms, degrees, pipelines, mixed steps."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from distserve.core.parsing import ConfigError
from distserve_planner.cluster import Link
from distserve_planner.coefficients import DecodePiece, Degree, HeadCost, PrefillPiece
from distserve_planner.devices import latency_model
from distserve_planner.latency import InstanceLatency, LatencyModel, Overhead, allreduce_s
from distserve_planner.models_catalog import model_dimensions

SLOW = Link(3.125e9, 20e-6)  # 25 Gbps


def opt66(tp: int, pp: int = 1) -> InstanceLatency:
    return latency_model("a100-80g", "opt-66b").instance(tp, pp, stage_link=SLOW)


def custom(overhead: Overhead | None = None, head: HeadCost | None = None) -> LatencyModel:
    degree = Degree(
        1,
        (PrefillPiece(0.010, 1e-4, 1e-8, 1e-3, 128), PrefillPiece(0.004, 1.5e-4, 1e-8, 1e-3)),
        (DecodePiece(0.02, 1e-6, 1e-4, 16), DecodePiece(0.015, 1e-6, 4e-4)),
        head or HeadCost(),
    )
    return LatencyModel(
        "opt-13b", model_dimensions("opt-13b"), "test", "fp16", (degree,), overhead or Overhead()
    )


def test_prefill_is_the_papers_formula() -> None:
    # appendix A with the authors' coefficients: OPT-13B, tp = 1, 18.1025 + 0.101912 t + 7.12226e-6 t2 ms,
    # and 2 ms + 0.1 us per token of overhead per iteration
    model = latency_model("a100-80g", "facebook/opt-13b")
    t, t2 = 300 + 500, 300**2 + 500**2
    expected = 18.1025 + 0.101912 * t + 7.12226e-6 * t2 + 2 + 1e-4 * t
    assert model.instance(1).prefill_stage_s(t, t2, 2) == pytest.approx(expected / 1e3, rel=1e-5)


@pytest.mark.parametrize(
    ("batch", "expected_ms"), [(94, 19.9347 + 0.038507 * 94), (95, 7.16619 + 0.158311 * 95)]
)
def test_decode_changes_coefficients_at_the_authors_threshold(batch: int, expected_ms: float) -> None:
    model = latency_model("a100-80g", "opt-13b").with_overhead(Overhead())
    slope_ms = 0.000626936 if batch < 95 else 0.0005798
    seconds = model.instance(1).decode_stage_s(batch, 10_000)
    assert seconds == pytest.approx((expected_ms + slope_ms * 10_000) / 1e3, rel=1e-5)


@pytest.mark.parametrize("batch", [1, 7, 16, 17, 300, 1000])
@pytest.mark.parametrize("steps", [0, 1, 2, 77])
def test_span_equals_its_steps(batch: int, steps: int) -> None:
    instance = custom(Overhead(1e-3, 1e-7)).instance(1)
    context = 128 * batch
    one_by_one = sum(instance.decode_stage_s(batch, context + i * batch) for i in range(steps))
    assert instance.decode_span_s(batch, context, steps) == pytest.approx(one_by_one, rel=1e-12)


@pytest.mark.parametrize("seconds", [0.0, 0.0199, 0.05, 1.0, 12.345])
def test_steps_within_is_the_inverse_of_span(seconds: float) -> None:
    instance = custom().instance(1)
    steps = instance.decode_steps_within(3, 900, seconds)
    assert instance.decode_span_s(3, 900, steps) <= seconds
    assert instance.decode_span_s(3, 900, steps + 1) > seconds


def test_steps_within_counts_a_step_that_ends_exactly_then() -> None:
    instance = custom().instance(1)
    for steps in range(1, 60):
        assert instance.decode_steps_within(5, 640, instance.decode_span_s(5, 640, steps)) == steps


def test_pipeline_divides_the_layers_and_pays_hops_and_overhead_once() -> None:
    whole, half = opt66(4), opt66(4, 2)
    work = whole.prefill_stage_s(512, 512**2, 1) - whole.overhead_s(512)
    assert half.prefill_stage_s(512, 512**2, 1) == pytest.approx(work / 2 + half.overhead_s(512))
    hop = SLOW.latency_s + 512 * 9216 * 2 / SLOW.bandwidth_bytes_s
    assert half.hop_s(512) == pytest.approx(hop)
    assert half.prefill_total_s(512, 512**2, 1) == pytest.approx(work + half.overhead_s(512) + hop)
    assert whole.prefill_total_s(512, 512**2, 1) == pytest.approx(whole.prefill_stage_s(512, 512**2, 1))


def test_uneven_stages_are_timed_by_the_largest() -> None:
    three = latency_model("a100-80g", "opt-13b").with_overhead(Overhead()).instance(1, 3, stage_link=SLOW)
    one = latency_model("a100-80g", "opt-13b").with_overhead(Overhead()).instance(1)
    assert three.decode_stage_s(8, 4000) == pytest.approx(one.decode_stage_s(8, 4000) * 14 / 40)
    assert three.decode_total_s(8, 4000) == pytest.approx(one.decode_stage_s(8, 4000) + 2 * three.hop_s(8))


def test_head_is_on_the_last_stage_beside_the_overhead_of_the_first() -> None:
    model = custom(Overhead(3e-3), HeadCost(2e-3, 1e-3))
    one, two = model.instance(1), model.instance(1, 2, stage_link=Link(1e15))
    layers = 0.02 + 1e-4 * 4 + 1e-6 * 400
    assert one.decode_stage_s(4, 400) == pytest.approx(layers + 3e-3 + 6e-3)
    assert two.decode_stage_s(4, 400) == pytest.approx(layers / 2 + 6e-3)
    assert two.decode_stage_s(0, 0) == pytest.approx(0.01 + 3e-3)
    assert two.decode_total_s(4, 400) == pytest.approx(layers + 9e-3)


def test_pipeline_without_a_link_is_refused() -> None:
    with pytest.raises(ConfigError, match="stage_link"):
        custom().instance(1, 2)


def test_authors_pipeline_rule_adds_pp_squared_ms() -> None:
    model = custom(replace(Overhead.simdistserve(2), iteration_s=0.0, per_context_token_s=0.0))
    plain = custom().instance(1, 2, stage_link=Link(1e15))
    ruled = model.instance(1, 2, stage_link=Link(1e15))
    assert ruled.prefill_stage_s(64, 4096, 1) - plain.prefill_stage_s(64, 4096, 1) == pytest.approx(2e-3)
    assert ruled.prefill_total_s(64, 4096, 1) - plain.prefill_total_s(64, 4096, 1) == pytest.approx(4e-3)


def test_mixed_step_is_between_its_parts_and_their_sum() -> None:
    instance = latency_model("a100-80g", "opt-13b").instance(1)
    prefill, decode = instance.prefill_stage_s(256, 256**2, 1), instance.decode_stage_s(32, 32 * 500)
    mixed = instance.mixed_stage_s(256, 256**2, 32, 32 * 500)
    assert max(prefill, decode) < mixed < prefill + decode
    assert instance.mixed_stage_s(0, 0, 32, 16_000) == instance.decode_stage_s(32, 16_000)
    assert instance.mixed_stage_s(256, 256**2, 0, 0) == instance.prefill_stage_s(256, 256**2, 1)


def test_a_piece_of_a_prompt_that_goes_on_needs_no_head_unless_others_decode() -> None:
    model = custom(Overhead(1e-3), HeadCost(2e-3, 1e-4))
    whole, inner = (model.instance(1).prefill_stage_s(32, 9000, 1, ends) for ends in (1, 0))
    assert whole - inner == pytest.approx(2.1e-3)
    totals = [model.instance(1).prefill_total_s(32, 9000, 1, ends) for ends in (1, 0)]
    assert totals == pytest.approx([whole, inner])
    # of steps of which a quarter end their prompt, the mean
    assert model.instance(1).prefill_stage_s(32, 9000, 1, 0.25) == pytest.approx(inner + 2.1e-3 / 4)
    beside = [model.instance(1).mixed_stage_s(31, 9000, 1, 400, 1, ends) for ends in (1, 0)]
    assert beside[0] - beside[1] == pytest.approx(1e-4)
    assert beside[1] > inner + 2e-3


def test_transfer_of_the_papers_example() -> None:
    # section 3.3: 10 requests/s of 512-token OPT-66B prompts need 90 Gbps
    instance = opt66(4)
    ten = instance.transfer_s(5120, Link(90e9 * 2**30 / 1e9 / 8))
    assert ten == pytest.approx(1.0, rel=0.01)
    assert instance.transfer_s(512, Link(1e9, 0.5), lanes=4) == pytest.approx(0.5 + 2359296 * 512 / 4e9)


def test_allreduce_is_the_ring() -> None:
    assert allreduce_s(1e6, 1, Link(1e9, 1e-3)) == 0
    assert allreduce_s(1e6, 4, Link(1e9, 1e-3)) == pytest.approx(1e-3 + 1.5e-3)


def test_instances_cross_process_borders() -> None:
    instance = opt66(2)
    copy = pickle.loads(pickle.dumps(instance))
    assert copy.decode_span_s(700, 10_000, 9) == instance.decode_span_s(700, 10_000, 9)


def test_lm_is_the_shortest_prompt_near_the_best_rate() -> None:
    model = custom().with_overhead(Overhead())
    lm = model.lm_tokens_for(1)
    rate = {n: n / model.degree(1).prefill_seconds(n, n * n, 1) for n in range(16, 2049, 16)}
    assert rate[lm] >= 0.95 * max(rate.values())
    assert all(rate[n] < 0.95 * max(rate.values()) for n in rate if n < lm)


def test_pieces_must_rise_and_end_open() -> None:
    with pytest.raises(ConfigError, match="must be open"):
        Degree(1, decode=(DecodePiece(1, 0, 0, 8),))
    with pytest.raises(ConfigError, match="bounds must rise"):
        Degree(1, decode=(DecodePiece(1, 0, 0, 8), DecodePiece(1, 0, 0, 4), DecodePiece(1, 0, 0)))
