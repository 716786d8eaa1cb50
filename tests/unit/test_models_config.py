"""Sliding windows per layer, as config.json files of several ages give them."""

from __future__ import annotations

from typing import Any

import pytest

from distserve.core.model_config import ModelConfig
from distserve.core.parsing import ConfigError

QWEN: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "use_sliding_window": True,
    "sliding_window": 16,
}


def windows(**changes: Any) -> list[int | None]:
    config = ModelConfig.from_hf({**QWEN, **changes})
    return [config.window_of(layer) for layer in range(4)]


def test_windows_by_layer_types() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    assert windows(layer_types=kinds) == [None, 16, None, 16]


def test_windows_by_max_window_layers() -> None:
    assert windows(max_window_layers=3) == [None, None, None, 16]
    assert windows() == [None] * 4  # the default is 28 layers without


def test_windows_that_are_off() -> None:
    assert windows(use_sliding_window=False, max_window_layers=0) == [None] * 4


def test_mistral_has_its_window_everywhere() -> None:
    mistral = {**QWEN, "model_type": "mistral"}
    del mistral["use_sliding_window"]
    config = ModelConfig.from_hf(mistral)
    assert [config.window_of(layer) for layer in range(4)] == [16] * 4


def test_a_partial_rotary_embedding_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"partial_rotary_factor=0\.5 is not supported"):
        ModelConfig.from_hf({**QWEN, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}})
