"""Closed forms of decode time hold for any coefficients, batch and context."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distserve_planner.coefficients import DecodePiece, Degree, PrefillPiece
from distserve_planner.latency import InstanceLatency, LatencyModel
from distserve_planner.models_catalog import model_dimensions

seconds = st.floats(1e-6, 1e-1)


@st.composite
def instances(draw: st.DrawFn) -> InstanceLatency:
    bound = draw(st.integers(1, 300))
    slope = draw(st.one_of(st.just(0.0), st.floats(1e-12, 1e-5)))
    pieces = (DecodePiece(draw(seconds), slope, draw(seconds), bound), DecodePiece(draw(seconds), slope))
    degree = Degree(1, (PrefillPiece(draw(seconds), draw(seconds)),), pieces)
    return LatencyModel("opt-13b", model_dimensions("opt-13b"), "any", "fp16", (degree,)).instance(1)


@given(instances(), st.integers(1, 600), st.integers(1, 4000), st.floats(0, 60))
def test_steps_within_is_the_largest_that_fits(
    instance: InstanceLatency, batch: int, context: int, budget: float
) -> None:
    total = batch * context
    steps = instance.decode_steps_within(batch, total, budget)
    assert instance.decode_span_s(batch, total, steps) <= budget
    assert instance.decode_span_s(batch, total, steps + 1) > budget


@given(instances(), st.integers(1, 600), st.integers(1, 4000), st.integers(0, 500), st.integers(0, 500))
def test_spans_join(instance: InstanceLatency, batch: int, context: int, first: int, then: int) -> None:
    total = batch * context
    whole = instance.decode_span_s(batch, total, first + then)
    parts = instance.decode_span_s(batch, total, first)
    parts += instance.decode_span_s(batch, total + first * batch, then)
    assert abs(whole - parts) <= 1e-9 * max(whole, 1e-9)
