"""Shipped profiles and analytic devices: what is measured, what is predicted, and how far they agree."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from distserve.core.parsing import ConfigError
from distserve_planner.devices import device_names, device_spec, latency_model, shipped_profile
from distserve_planner.profile_file import Profile


@pytest.mark.parametrize(
    ("model", "tp", "predicted"),
    [
        ("opt-13b", 1, False), ("opt-13b", 4, False), ("opt-13b", 8, True), ("opt-66b", 3, False),
        ("opt-66b", 6, True), ("opt-66b", 1, True), ("opt-175b", 4, False), ("opt-175b", 3, True),
        ("opt-175b", 8, True),
    ],
)  # fmt: skip
def test_degrees_that_were_not_fitted_are_marked(model: str, tp: int, predicted: bool) -> None:
    assert latency_model("a100-80g", model).degree(tp).predicted is predicted
    assert latency_model("a100-80g", model).instance(tp).predicted is predicted


def test_a_prediction_says_from_what() -> None:
    model = latency_model("a100-80g", "opt-175b")
    assert model.degree(3).note == "tp=3 predicted: prefill from tp=2, 4; decode from tp=2, 4"
    assert model.degree(8).note == "tp=8 predicted: prefill from tp=1, 2, 4"
    assert latency_model("a100-80g", "opt-66b").degree(6).note == (
        "tp=6 predicted: prefill from tp=4, 8; decode from tp=4, 8"
    )


@pytest.mark.parametrize("model", ["opt-66b", "opt-175b"])
def test_more_devices_are_never_slower(model: str) -> None:
    latency = latency_model("a100-80g", model)
    degrees = [latency.degree(tp) for tp in (1, 2, 3, 4, 6, 8)]
    for tokens in (128, 512, 1024, 2000):
        times = [d.prefill_seconds(tokens, tokens**2, 1) for d in degrees]
        assert times == sorted(times, reverse=True)
        assert all(t > 0 for t in times)


def test_between_two_degrees_times_lie_between_theirs() -> None:
    latency = latency_model("a100-80g", "opt-175b")
    two, three, four = (latency.degree(tp) for tp in (2, 3, 4))
    for batch in (1, 9, 10, 64, 200):
        low, middle, high = (d.decode_seconds(batch, 600 * batch) for d in (four, three, two))
        assert low <= middle <= high
    # T = q + p / tp through both neighbours: a third of the way in 1 / tp
    expected = two.prefill_seconds(512, 512**2, 1) / 3 + four.prefill_seconds(512, 512**2, 1) * 2 / 3
    assert three.prefill_seconds(512, 512**2, 1) == pytest.approx(expected)


def test_the_broken_prefill_fit_is_replaced_but_its_decode_kept() -> None:
    eight = latency_model("a100-80g", "opt-175b").degree(8)
    assert eight.decode_seconds(4, 2000) == pytest.approx(68.4022e-3 + 2000 * 1.60969e-6 - 4 * 0.856398e-3)
    assert 0.1 < eight.prefill_seconds(512, 512**2, 1) < 0.25  # the broken fit says 0.1194 for any length
    assert eight.prefill_seconds(2000, 2000**2, 1) > 3 * eight.prefill_seconds(256, 256**2, 1)


@pytest.mark.parametrize(("model", "tp"), [("opt-13b", 1), ("opt-66b", 2), ("opt-66b", 4), ("opt-175b", 2)])
def test_roofline_agrees_with_the_authors_measurements(model: str, tp: int) -> None:
    """An analytic model, fitted to other kernels, must be within a third of the real engine's times."""
    measured = latency_model("a100-80g", model).degree(tp)
    analytic = latency_model("a100-80g-roofline", model).degree(tp)
    for tokens in (512, 1024, 2000):
        ratio = analytic.prefill_seconds(tokens, tokens**2, 1) / measured.prefill_seconds(
            tokens, tokens**2, 1
        )
        assert 0.67 < ratio < 1.1
    for batch in (1, 16, 64):
        ratio = analytic.decode_seconds(batch, 512 * batch) / measured.decode_seconds(batch, 512 * batch)
        assert 0.67 < ratio < 1.15


def test_faster_devices_are_faster() -> None:
    a, h, h200 = (latency_model(d, "llama-3-8b").degree(1) for d in ("a100-80g", "h100-80g", "h200-141g"))
    assert a.prefill_seconds(2048, 2048**2, 1) > 2 * h.prefill_seconds(2048, 2048**2, 1)
    assert a.decode_seconds(1, 1024) > h.decode_seconds(1, 1024) > h200.decode_seconds(1, 1024)


def test_roofline_is_continuous_and_rises() -> None:
    degree = latency_model("h100-80g", "llama-3-70b").degree(4)
    times = [degree.prefill_seconds(n, n * n, 1) for n in range(1, 1500)]
    steps = [b - a for a, b in pairwise(times)]
    assert min(steps) > 0
    assert max(steps) < 0.01 * times[0]


def test_grouped_queries_read_less_cache() -> None:
    wide, grouped = (latency_model("h100-80g", m).degree(1) for m in ("llama-2-13b", "llama-3-8b"))
    ratio = wide.decode[0].per_context_token_s / grouped.decode[0].per_context_token_s
    assert ratio == pytest.approx((40 * 40) / (32 * 8))


def test_every_shipped_device_has_a_source() -> None:
    for name in device_names():
        assert device_spec(name).source
        profile = shipped_profile(name, "opt-66b")
        assert profile is None or profile.source


def test_profile_survives_its_file(tmp_path: Path) -> None:
    profile = shipped_profile("a100-80g", "opt-175b")
    assert profile is not None
    profile.save(tmp_path / "p.yaml")
    assert Profile.load(tmp_path / "p.yaml") == profile
    assert latency_model(str(tmp_path / "p.yaml"), "opt-175b").degrees == profile.degrees


@pytest.mark.parametrize(
    ("device", "model", "dtype", "message"),
    [
        ("a100-80", "opt-13b", None, "did you mean 'a100-80g'"),
        ("a100-80g", "opt-13", None, "did you mean 'opt-13b'"),
        ("h100-80g", "opt-13b", "fp32", "fp16 and bf16 only"),
    ],
)
def test_unknown_names_are_refused(device: str, model: str, dtype: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        latency_model(device, model, dtype)


def test_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    profile = shipped_profile("a100-80g", "opt-13b")
    assert profile is not None
    profile.save(tmp_path / "p.yaml")
    with pytest.raises(ConfigError, match="not of opt-66b: hidden_size=5120 for 9216"):
        latency_model(str(tmp_path / "p.yaml"), "opt-66b")
    with pytest.raises(ConfigError, match="dtype=fp16, asked for bf16"):
        latency_model(str(tmp_path / "p.yaml"), "opt-13b", "bf16")


def test_unknown_key_in_a_profile_is_named() -> None:
    profile = shipped_profile("a100-80g", "opt-13b")
    assert profile is not None
    with pytest.raises(ConfigError, match="unknown key 'lm_token'; did you mean 'lm_tokens'"):
        Profile.parse(profile.dump() + "lm_token: 512\n")
    with pytest.raises(ConfigError, match="needs 'schema: profile/1'"):
        Profile.parse(profile.dump().replace("profile/1", "profile/2"))


def test_heads_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ConfigError, match="tp=4"):
        latency_model("h100-80g", "smollm2-135m").degree(4)
