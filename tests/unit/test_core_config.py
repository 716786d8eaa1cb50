"""Configuration: what is refused, and what the message says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distserve.core.config import EngineConfig
from distserve.core.model_config import ModelConfig, resolve_model
from distserve.core.parsing import ConfigError, to_mapping

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "eos_token_id": 2,
}
ENGINE: dict[str, Any] = {"instance": "decode_0", "role": "decode", "model": "m"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_batch_sise": 3}, "unknown key 'max_batch_sise'; did you mean 'max_batch_size'"),
        ({"role": "decod"}, "engine.role: 'decod' is not allowed; one of 'prefill', 'decode', 'unified'"),
        ({"tp": "2"}, "engine.tp: expected int, found '2'"),
        ({"tp": True}, "engine.tp: expected int, found True"),
        ({"tp": 2}, "devices=['cpu:0']: tp=2 x pp=1 needs 2"),
        ({"block_size": 0}, "block_size=0: must be at least 1"),
        ({"lease_s": 0}, "lease_s=0.0: must be above 0"),
        ({"devices": "cpu:0"}, "engine.devices: expected a list"),
    ],
)
def test_engine_config_refuses_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig.load({**ENGINE, **values})
    assert message in str(error.value)


def test_engine_config_survives_a_round_trip() -> None:
    config = EngineConfig.load({**ENGINE, "devices": ["cpu:0", "cpu:1"], "tp": 2, "kv_bytes": 1 << 20})
    assert EngineConfig.load(json.loads(json.dumps(to_mapping(config)))) == config


def test_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="missing key 'role'"):
        EngineConfig.load({"instance": "a", "model": "m"})


def test_model_config_reads_dimensions_and_all_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    config = ModelConfig.load(tmp_path)
    assert (config.arch, config.head_dim, config.num_kv_heads) == ("llama", 8, 4)
    assert config.eos_token_ids == (2, 7)
    assert config.kv_bytes_per_token("fp32") == 2 * 5 * 4 * 8 * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "bert"}, "model_type='bert' is not supported; one of gpt2"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: must divide num_attention_heads=8"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.rope_type='yarn' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ],
)
def test_model_config_refuses_what_the_engine_cannot_run(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_hf({**LLAMA, **change})
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["cache:../x", "cache:", "/nowhere/at/all"])
def test_model_names_do_not_leave_their_folder(name: str) -> None:
    with pytest.raises(ConfigError, match="model="):
        resolve_model(name)
