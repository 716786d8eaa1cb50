"""A model's dimensions, read from a Hugging Face `config.json` without torch or transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from distserve.core.config import DTYPE_BYTES
from distserve.core.parsing import ConfigError

Arch = Literal["llama", "opt", "gpt2"]

_ARCH_OF_TYPE: Mapping[str, Arch] = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "opt": "opt",
    "gpt2": "gpt2",
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base and, if any, the scaling dictionary of `config.json`."""

    theta: float = 10000.0
    scaling: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """Dimensions of a decoder-only transformer, by the field's names."""

    arch: Arch
    model_type: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_context: int
    tie_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    norm_eps: float = 1e-5
    rope: RopeConfig | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    gated_mlp: bool = True
    sliding_window: int | None = None
    full_attention_layers: tuple[int, ...] = ()  # with sliding_window: the layers that attend to everything
    activation: str = "silu"
    embed_dim: int | None = None  # OPT-350m: word_embed_proj_dim, if it differs from hidden_size
    norm_first: bool = True  # False: post-norm (OPT-350m)
    dtype: str = "fp32"  # of the checkpoint

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_key_value_heads={self.num_kv_heads}: must divide num_attention_heads={self.num_heads}"
            )

    @classmethod
    def load(cls, folder: str | Path) -> ModelConfig:
        """Reads `folder/config.json` (and `generation_config.json` for further end tokens).

        Raises `ConfigError` for a missing file or an architecture that is not supported.
        """
        path = Path(folder) / "config.json"
        try:
            raw = json.loads(path.read_text())
        except FileNotFoundError:
            raise ConfigError(f"{path}: not found; a Hugging Face model folder is needed") from None
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}: not JSON ({error})") from None
        generation = Path(folder) / "generation_config.json"
        if generation.exists():
            eos = json.loads(generation.read_text()).get("eos_token_id")
            raw["eos_token_id"] = _merge_ids(raw.get("eos_token_id"), eos)
        return cls.from_hf(raw, str(path))

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """From the parsed `config.json`."""
        model_type = raw.get("model_type", "")
        arch = _ARCH_OF_TYPE.get(model_type)
        if arch is None:
            raise ConfigError(
                f"{where}: model_type={model_type!r} is not supported; "
                f"one of {', '.join(sorted(_ARCH_OF_TYPE))}"
            )
        try:
            return _FROM_HF[arch](raw)
        except KeyError as error:
            raise ConfigError(f"{where}: missing key {error}") from None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def window_of(self, layer: int) -> int | None:
        """Tokens that layer `layer` looks back on, itself included; None: all."""
        return None if layer in self.full_attention_layers else self.sliding_window

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of K and V of one token over all layers."""
        return 2 * self.num_layers * self.kv_size * DTYPE_BYTES[dtype]

    def layer_params(self) -> int:
        """Weights of one layer: attention and MLP matrices, norms and biases left out (below 0.1 %)."""
        attention = self.hidden_size * (2 * self.q_size + 2 * self.kv_size)
        return attention + (3 if self.gated_mlp else 2) * self.hidden_size * self.ffn_size

    def embedding_params(self) -> int:
        """Token embedding, learned positions, and the head if untied."""
        width = self.embed_dim or self.hidden_size
        params = self.vocab_size * width * (1 if self.tie_embeddings else 2)
        if self.rope is None:
            params += self.max_context * self.hidden_size
        return params

    def param_count(self) -> int:
        return self.num_layers * self.layer_params() + self.embedding_params()


def resolve_model(name: str) -> Path:
    """Folder of a model: a path, or `cache:NAME` below `$DISTSERVE_CACHE` (default `~/.cache/distserve`).

    Raises `ConfigError` if the folder does not exist.
    """
    folder = cache_folder() / "models" / name[6:] if name.startswith("cache:") else Path(name).expanduser()
    if name.startswith("cache:") and (not name[6:] or Path(name[6:]).name != name[6:]):
        raise ConfigError(f"model={name!r}: after 'cache:' one plain folder name is allowed")
    if not folder.is_dir():
        raise ConfigError(f"model={name!r}: no folder {folder}")
    return folder


def cache_folder() -> Path:
    """Where converted models, compiled kernels and server files are kept."""
    return Path(os.environ.get("DISTSERVE_CACHE") or "~/.cache/distserve").expanduser()


def _merge_ids(*values: int | list[int] | None) -> list[int]:
    ids: list[int] = []
    for value in values:
        for token in [value] if isinstance(value, int) else value or []:
            if token not in ids:
                ids.append(token)
    return ids


def _common(raw: Mapping[str, Any]) -> dict[str, Any]:
    dtypes = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    return {
        "model_type": raw["model_type"],
        "vocab_size": raw["vocab_size"],
        "eos_token_ids": tuple(_merge_ids(raw.get("eos_token_id"))),
        "bos_token_id": raw.get("bos_token_id"),
        "dtype": dtypes.get(str(raw.get("dtype") or raw.get("torch_dtype") or "float32"), "fp32"),
    }


def _llama(raw: Mapping[str, Any]) -> ModelConfig:
    model_type = raw["model_type"]
    heads = raw["num_attention_heads"]
    # transformers 5 writes rope_parameters; older files rope_theta and rope_scaling
    rope = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or ({**rope} if rope.get("rope_type", "default") != "default" else None)
    if scaling:
        kind = scaling.get("rope_type") or scaling.get("type")
        if kind not in ("default", "linear", "llama3"):
            raise ConfigError(f"rope_scaling.rope_type={kind!r} is not supported; default, linear or llama3")
    window = raw.get("sliding_window")
    if not raw.get("use_sliding_window", model_type == "mistral"):
        window = None
    _refuse(raw, model_type, quantization_config=None)
    _refuse(rope, "rope_parameters", partial_rotary_factor=1.0)
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act={raw['hidden_act']!r} is not supported for {model_type}; silu")
    return ModelConfig(
        arch="llama",
        hidden_size=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
        ffn_size=raw["intermediate_size"],
        max_context=raw.get("max_position_embeddings", 2048),
        tie_embeddings=raw.get("tie_word_embeddings", False),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=RopeConfig(float(rope.get("rope_theta") or raw.get("rope_theta") or 10000.0), scaling),
        qkv_bias=raw.get("attention_bias", model_type == "qwen2"),
        o_bias=raw.get("attention_bias", False) and model_type != "qwen2",
        mlp_bias=raw.get("mlp_bias", False),
        qk_norm=model_type == "qwen3",
        sliding_window=window,
        full_attention_layers=_full_attention_layers(raw) if window else (),
        **_common(raw),
    )


def _full_attention_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Layers without the sliding window: by `layer_types`, or Qwen's `max_window_layers` in older files."""
    layers = range(raw["num_hidden_layers"])
    kinds = raw.get("layer_types")
    if kinds:
        return tuple(i for i in layers if kinds[i] == "full_attention")
    if raw["model_type"] == "mistral":
        return ()
    return tuple(i for i in layers if i < raw.get("max_window_layers", 28))


def _refuse(raw: Mapping[str, Any], where: str, **allowed: Any) -> None:
    """Raises `ConfigError` for a key that is set to something else than the one value that is computed
    here.
    """
    for key, value in allowed.items():
        if raw.get(key, value) != value:
            raise ConfigError(f"{where}: {key}={raw[key]!r} is not supported; {value!r}")


def _opt(raw: Mapping[str, Any]) -> ModelConfig:
    heads = raw["num_attention_heads"]
    embed = raw.get("word_embed_proj_dim") or raw["hidden_size"]
    _refuse(raw, "opt", layer_norm_elementwise_affine=True, _remove_final_layer_norm=False)
    return ModelConfig(
        arch="opt",
        hidden_size=raw["hidden_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=raw["hidden_size"] // heads,
        ffn_size=raw["ffn_dim"],
        max_context=raw["max_position_embeddings"],
        tie_embeddings=raw.get("tie_word_embeddings", True),
        qkv_bias=raw.get("enable_bias", True),
        o_bias=raw.get("enable_bias", True),
        mlp_bias=raw.get("enable_bias", True),
        gated_mlp=False,
        activation=raw.get("activation_function", "relu"),
        embed_dim=embed if embed != raw["hidden_size"] else None,
        norm_first=raw.get("do_layer_norm_before", True),
        **_common(raw),
    )


def _gpt2(raw: Mapping[str, Any]) -> ModelConfig:
    heads = raw["n_head"]
    _refuse(
        raw,
        "gpt2",
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    return ModelConfig(
        arch="gpt2",
        hidden_size=raw["n_embd"],
        num_layers=raw["n_layer"],
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=raw["n_embd"] // heads,
        ffn_size=raw.get("n_inner") or 4 * raw["n_embd"],
        max_context=raw["n_positions"],
        tie_embeddings=raw.get("tie_word_embeddings", True),
        norm_eps=raw.get("layer_norm_epsilon", 1e-5),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        activation=raw.get("activation_function", "gelu_new"),
        **_common(raw),
    )


_FROM_HF = {"llama": _llama, "opt": _opt, "gpt2": _gpt2}
