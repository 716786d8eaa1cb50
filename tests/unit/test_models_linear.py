"""Which forms of a weight are kept on which host, and the angles of the rotary embedding."""

from __future__ import annotations

import pytest
import torch

from distserve.core.model_config import RopeConfig
from distserve.models.linear import Linear, LinearPlan, Prepack, plan_linears
from distserve.models.rotary import RotaryTable, inverse_frequencies

GB = 10**9
CPU = torch.device("cpu")


def plan(
    prepack: Prepack = "auto",
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    weight_bytes: int = GB,
    native: bool = True,
) -> LinearPlan:
    return plan_linears(prepack, device, dtype, weight_bytes, 16 * GB, native)


def test_fp32_on_intel_keeps_both_forms_while_they_are_small() -> None:
    assert plan(weight_bytes=2 * GB) == LinearPlan(packed=True, plain=True)
    assert plan(weight_bytes=2 * GB + 1) == LinearPlan(packed=True, plain=False)


def test_elsewhere_the_packed_form_serves_everything() -> None:
    assert plan(native=False) == LinearPlan(packed=True, plain=False)
    assert plan(dtype=torch.bfloat16) == LinearPlan(packed=True, plain=False)


def test_no_packing_on_gpus_or_in_fp16() -> None:
    for prepack in ("auto", "both", "packed", "off"):
        assert plan(prepack, device=torch.device("cuda")) == LinearPlan(packed=False, plain=False)
        assert plan(prepack, dtype=torch.float16) == LinearPlan(packed=False, plain=False)


def test_a_choice_overrides() -> None:
    assert plan("off") == LinearPlan(packed=False, plain=False)
    assert plan("packed") == LinearPlan(packed=True, plain=False)
    assert plan("both", weight_bytes=10 * GB, native=False) == LinearPlan(packed=True, plain=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 63, 64])
@pytest.mark.parametrize("kept", [LinearPlan(), LinearPlan(True, False), LinearPlan(True, True)])
def test_every_form_gives_the_product(kept: LinearPlan, rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, 48), torch.randn(40, 48), torch.randn(40)
    expected = x.double() @ weight.double().t() + bias.double()
    with torch.inference_mode():
        linear = Linear(weight.to(dtype), bias.to(dtype), kept)
        found = linear(x.to(dtype))
    assert found.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 0.25
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("packed", "forms"), [("onednn", "onednn+torch"), ("c", "c"), ("torch", "torch")])
def test_only_beside_onednn_a_plain_weight_is_kept(
    monkeypatch: pytest.MonkeyPatch, packed: str, forms: str
) -> None:
    rows: list[int] = []

    class Packed:
        name = packed

        def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None: ...

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            rows.append(len(x))
            return x

    monkeypatch.setattr("distserve.models.linear.PackedLinear", Packed)
    linear = Linear(torch.eye(8), None, LinearPlan(packed=True, plain=True))
    assert linear.forms == forms
    for count in (1, 2, 63, 64):
        assert torch.equal(linear(torch.ones(count, 8)), torch.ones(count, 8))
    assert rows == {"onednn": [2, 63], "c": [1, 2, 63, 64], "torch": []}[packed]
    assert Linear(torch.eye(8)).forms == "torch"


def test_a_position_has_the_same_angles_in_every_batch() -> None:
    table = RotaryTable(RopeConfig(10000.0), 20, 500, CPU)
    cos, sin = table(torch.arange(500))
    for position in (0, 1, 77, 499):
        one_cos, one_sin = table(torch.tensor([position]))
        assert torch.equal(one_cos[0], cos[position])
        assert torch.equal(one_sin[0], sin[position])


def test_linear_scaling_divides_positions() -> None:
    plain = inverse_frequencies(RopeConfig(1000.0), 16)
    scaled = inverse_frequencies(RopeConfig(1000.0, {"type": "linear", "factor": 4.0}), 16)
    torch.testing.assert_close(scaled * 4, plain)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    ratio = inverse_frequencies(RopeConfig(500000.0), 128) / inverse_frequencies(
        RopeConfig(500000.0, scaling), 128
    )
    assert ratio[0] == 1
    assert ratio[-1] == 8
    assert bool((ratio.diff() >= 0).all())
    assert ((ratio > 1) & (ratio < 8)).sum() > 3  # those in between


def test_unknown_scaling() -> None:
    with pytest.raises(ValueError, match="rope_type='yarn': must be default, linear or llama3"):
        inverse_frequencies(RopeConfig(1e4, {"rope_type": "yarn"}), 16)
