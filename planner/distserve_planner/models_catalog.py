"""Dimensions of well-known models by name, so that a plan can be made without their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from distserve.core.model_config import ModelConfig, resolve_model
from distserve.core.parsing import ConfigError, nearest


def _opt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    # OPT (arXiv 2205.01068, table 1); vocabulary padded to 50272, 2048 positions
    return {
        "model_type": "opt", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "ffn_dim": 4 * hidden, "vocab_size": 50272,
        "max_position_embeddings": 2048, "eos_token_id": 2, "bos_token_id": 2, "dtype": "float16",
    }  # fmt: skip


def _llama(
    hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, context: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": ffn,
        "vocab_size": vocab, "max_position_embeddings": context, "dtype": "bfloat16", **more,
    }  # fmt: skip


_RAW: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "opt-125m": _opt(768, 12, 12),
        "opt-1.3b": _opt(2048, 24, 32),
        "opt-2.7b": _opt(2560, 32, 32),
        "opt-6.7b": _opt(4096, 32, 32),
        "opt-13b": _opt(5120, 40, 40),
        "opt-30b": _opt(7168, 48, 56),
        "opt-66b": _opt(9216, 64, 72),
        "opt-175b": _opt(12288, 96, 96),
        "llama-2-7b": _llama(4096, 32, 32, 32, 11008, 32000, 4096),
        "llama-2-13b": _llama(5120, 40, 40, 40, 13824, 32000, 4096),
        "llama-2-70b": _llama(8192, 80, 64, 8, 28672, 32000, 4096),
        "llama-3-8b": _llama(4096, 32, 32, 8, 14336, 128256, 8192, rope_theta=500000.0),
        "llama-3-70b": _llama(8192, 80, 64, 8, 28672, 128256, 8192, rope_theta=500000.0),
        "llama-3.1-405b": _llama(16384, 126, 128, 8, 53248, 128256, 131072, rope_theta=500000.0),
        "smollm2-135m": _llama(576, 30, 9, 3, 1536, 49152, 8192, tie_word_embeddings=True),
        "smollm2-360m": _llama(960, 32, 15, 5, 2560, 49152, 8192, tie_word_embeddings=True),
        "smollm2-1.7b": _llama(2048, 24, 32, 32, 8192, 49152, 8192, tie_word_embeddings=True),
        "qwen2.5-7b": _llama(3584, 28, 28, 4, 18944, 152064, 32768) | {"model_type": "qwen2"},
        "mistral-7b": _llama(4096, 32, 32, 8, 14336, 32768, 32768) | {"model_type": "mistral"},
    }
)  # fmt: skip


def catalog_names() -> tuple[str, ...]:
    """Names that `model_dimensions` knows without files."""
    return tuple(_RAW)


def model_dimensions(name: str) -> ModelConfig:
    """Dimensions of a model: a catalogue name (`opt-66b`, also `facebook/opt-66b`), a folder, `cache:NAME`.

    Raises `ConfigError` with the nearest known name.
    """
    key = name.rsplit("/", 1)[-1].lower()
    if key in _RAW and not Path(name).is_dir():
        return ModelConfig.from_hf(_RAW[key], name)
    if name.startswith("cache:") or Path(name).is_dir():
        return ModelConfig.load(resolve_model(name))
    raise ConfigError(
        f"model={name!r}: neither a folder, cache:NAME nor a catalogue name{nearest(key, _RAW)}"
    )
