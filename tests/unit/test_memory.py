"""Weights, KV and activations per device."""

from __future__ import annotations

import pytest

from distserve.core.parsing import ConfigError
from distserve_planner.memory import (
    GIB,
    MemoryRule,
    activation_bytes,
    fewest_devices,
    kv_bytes_per_token_per_device,
    kv_tokens,
    weight_bytes_per_device,
)
from distserve_planner.models_catalog import catalog_names, model_dimensions

# KV tokens per instance that the authors' profiler found on 80 GiB devices (max_num_tokens.csv)
AUTHORS = {
    ("opt-13b", 1, 1): 66144, ("opt-13b", 1, 4): 356752, ("opt-13b", 2, 1): 163008,
    ("opt-13b", 4, 2): 744224, ("opt-13b", 5, 5): 2390992, ("opt-13b", 8, 8): 6168896,
    ("opt-66b", 1, 2): 11600, ("opt-66b", 2, 1): 11600, ("opt-66b", 2, 2): 78512, ("opt-66b", 3, 1): 45056,
    ("opt-66b", 4, 1): 78496, ("opt-66b", 6, 4): 747568, ("opt-66b", 8, 8): 2085696,
    ("opt-175b", 1, 6): 26208, ("opt-175b", 3, 3): 76192, ("opt-175b", 4, 3): 126160,
    ("opt-175b", 8, 1): 59520, ("opt-175b", 8, 8): 992400,
}  # fmt: skip


@pytest.mark.parametrize(("name", "tp", "pp"), AUTHORS)
def test_authors_figures_within_5_percent(name: str, tp: int, pp: int) -> None:
    found = kv_tokens(model_dimensions(name), tp, pp, "fp16", 80 * GIB, MemoryRule.simdistserve())
    assert found == pytest.approx(AUTHORS[name, tp, pp], rel=0.05)
    assert found % 16 == 0


@pytest.mark.parametrize(("name", "tp", "pp"), [("opt-66b", 1, 1), ("opt-175b", 4, 1), ("opt-175b", 2, 2)])
def test_what_the_authors_could_not_load_does_not_fit(name: str, tp: int, pp: int) -> None:
    assert kv_tokens(model_dimensions(name), tp, pp, "fp16", 80 * GIB, MemoryRule.simdistserve()) == 0


def test_kv_of_one_prompt_as_in_the_paper() -> None:
    # section 3.3: one 512-token OPT-66B prompt is 1.13 GB; 10 of them a second are 90 Gbps
    size = 512 * model_dimensions("opt-66b").kv_bytes_per_token("fp16")
    assert size / GIB == 1.125
    assert 10 * size / GIB * 8 == 90


def test_devices_together_hold_the_model() -> None:
    for name in catalog_names():
        model = model_dimensions(name)
        whole = weight_bytes_per_device(model, 1, 1, "fp16")
        assert whole == pytest.approx(2 * model.param_count(), rel=0.001)
        split = weight_bytes_per_device(model, 1, 2, "fp16")
        assert whole / 2 <= split < whole


def test_tied_embeddings_are_copied_to_the_last_stage() -> None:
    model = model_dimensions("smollm2-135m")
    layer, embedding = model.layer_params(), model.vocab_size * model.hidden_size
    assert weight_bytes_per_device(model, 1, 1, "fp16") == 2 * (30 * layer + embedding)
    assert weight_bytes_per_device(model, 1, 2, "fp16") == 2 * (15 * layer + embedding)


def test_grouped_kv_heads_are_replicated_beyond_their_number() -> None:
    model = model_dimensions("llama-3-70b")
    by_tp = [kv_bytes_per_token_per_device(model, tp, 1, "fp16") for tp in (1, 4, 8, 16)]
    assert by_tp == [327680, 81920, 40960, 40960]
    assert kv_bytes_per_token_per_device(model, 8, 3, "fp16") == 40960 * 27 // 80


def test_activations_take_their_share() -> None:
    model = model_dimensions("opt-13b")
    small, large = (MemoryRule(activation_tokens=n) for n in (512, 8192))
    lost = (8192 - 512) * 2 * (2 * 5120 + 20480)
    assert activation_bytes(model, 1, "fp16", 8192) - activation_bytes(model, 1, "fp16", 512) == lost
    tokens = [kv_tokens(model, 1, 1, "fp16", 80 * GIB, rule) for rule in (small, large)]
    assert tokens[0] - tokens[1] == pytest.approx(lost / 819200, abs=32)


def test_fewest_devices_is_a_lower_bound() -> None:
    rule = MemoryRule()
    for name, tp in (("opt-13b", 1), ("opt-66b", 2), ("opt-175b", 5)):
        assert fewest_devices(model_dimensions(name), "fp16", 80 * GIB, rule) == tp


@pytest.mark.parametrize(
    ("name", "billions"),
    [("opt-13b", 12.85), ("opt-66b", 65.7), ("opt-175b", 174.6), ("llama-2-7b", 6.74), ("llama-2-70b", 68.98),
     ("llama-3-8b", 8.03), ("llama-3-70b", 70.55), ("llama-3.1-405b", 405.9), ("smollm2-135m", 0.1345),
     ("smollm2-1.7b", 1.711), ("qwen2.5-7b", 7.615), ("mistral-7b", 7.248)],
)  # fmt: skip
def test_catalogue_has_the_published_parameter_counts(name: str, billions: float) -> None:
    assert model_dimensions(name).param_count() / 1e9 == pytest.approx(billions, rel=2e-3)


def test_impossible_rules_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"usable=1\.2"):
        MemoryRule(usable=1.2)
    with pytest.raises(ConfigError, match=r"reserve=0\.9"):
        MemoryRule(usable=0.9, reserve=0.9)
