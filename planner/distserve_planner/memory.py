"""Device memory of an instance: weights, activations, and how many KV tokens remain."""

from __future__ import annotations

from dataclasses import dataclass

from distserve.core.config import DTYPE_BYTES
from distserve.core.model_config import ModelConfig
from distserve.core.parsing import ConfigError
from distserve.core.shapes import head_range, layer_range

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryRule:
    """How much of a device the KV pool may take.

    usable: share of the device that the engine may use at all; reserve: share kept for activations and
    workspace. `replicate_embeddings` counts token embedding and head in full on every device, as the
    authors' profiler does; otherwise they are divided by tp and sit on the first and the last stage.
    `activation_tokens` are the tokens of the largest step, whose activations are then counted themselves.
    """

    usable: float = 0.92
    reserve: float = 0.0
    replicate_embeddings: bool = False
    activation_tokens: int = 2048
    block_size: int = 16

    def __post_init__(self) -> None:
        if not 0 < self.usable <= 1:
            raise ConfigError(f"usable={self.usable}: must be in (0, 1]")
        if not 0 <= self.reserve < self.usable:
            raise ConfigError(f"reserve={self.reserve}: must be in [0, usable={self.usable})")

    @classmethod
    def simdistserve(cls) -> MemoryRule:
        """The authors' rule behind max_num_tokens.csv: 0.95 - 0.01 of the device, no activations."""
        return cls(usable=0.95, reserve=0.01, replicate_embeddings=True, activation_tokens=0)


def weight_bytes_per_device(
    model: ModelConfig, tp: int, pp: int, dtype: str, *, replicate_embeddings: bool = False
) -> int:
    """Weights on the fullest of the tp x pp devices.

    Layers are split by `layer_range`; KV projections are replicated where tp exceeds the KV heads.
    """
    width = DTYPE_BYTES[dtype]
    layers = model.num_layers
    embedding, positions = _embedding_params(model)
    if replicate_embeddings:
        per_layer = model.layer_params() / tp
        stage = len(layer_range(layers, pp, 0)) * per_layer
        return round(width * (stage + 2 * embedding + positions))
    heaviest = 0.0
    for stage_index in range(pp):
        stage = len(layer_range(layers, pp, stage_index)) * _layer_params_per_device(model, tp)
        if stage_index == 0:
            stage += embedding / tp + positions
        if stage_index == pp - 1 and not (model.tie_embeddings and pp == 1):
            stage += embedding / tp  # the head: its own matrix, or a copy of the tied one on the last stage
        heaviest = max(heaviest, stage)
    return round(width * heaviest)


def kv_bytes_per_token_per_device(model: ModelConfig, tp: int, pp: int, dtype: str) -> int:
    """K and V of one token on the device that holds most of them: its layers and its KV heads."""
    layers = len(layer_range(model.num_layers, pp, 0))
    heads = len(head_range(model.num_kv_heads, tp, 0))
    return 2 * layers * heads * model.head_dim * DTYPE_BYTES[dtype]


def activation_bytes(model: ModelConfig, tp: int, dtype: str, tokens: int) -> int:
    """Largest live set of one layer for a step of `tokens` tokens: residual, normed input, and the wider of
    the MLP's inner activations and q, k, v with the attention output; KV heads and MLP divided by tp."""
    gate = 2 if model.gated_mlp else 1
    mlp = gate * model.ffn_size / tp
    attention = (2 * model.q_size + 2 * model.kv_size) / tp
    return round(DTYPE_BYTES[dtype] * tokens * (2 * model.hidden_size + max(mlp, attention)))


def kv_tokens(
    model: ModelConfig,
    tp: int,
    pp: int,
    dtype: str,
    device_memory_bytes: int,
    rule: MemoryRule | None = None,
) -> int:
    """Tokens of KV that an instance can hold, whole blocks; 0 if weights and activations do not fit."""
    rule = rule or MemoryRule()
    room = (rule.usable - rule.reserve) * device_memory_bytes
    room -= weight_bytes_per_device(model, tp, pp, dtype, replicate_embeddings=rule.replicate_embeddings)
    room -= activation_bytes(model, tp, dtype, rule.activation_tokens)
    if room <= 0:
        return 0
    tokens = int(room // kv_bytes_per_token_per_device(model, tp, pp, dtype))
    return tokens // rule.block_size * rule.block_size


def fewest_devices(model: ModelConfig, dtype: str, device_memory_bytes: int, rule: MemoryRule) -> int:
    """Lower bound on tp x pp: devices over which weights alone would fit. For "cluster too small" errors."""
    room = (rule.usable - rule.reserve) * device_memory_bytes
    return max(1, -(-model.param_count() * DTYPE_BYTES[dtype] // int(room)))


def _embedding_params(model: ModelConfig) -> tuple[int, int]:
    """(token embedding, learned positions)."""
    embedding = model.vocab_size * (model.embed_dim or model.hidden_size)
    return embedding, 0 if model.rope is not None else model.max_context * model.hidden_size


def _layer_params_per_device(model: ModelConfig, tp: int) -> float:
    kv_heads = len(head_range(model.num_kv_heads, tp, 0))
    kv = 2 * model.hidden_size * kv_heads * model.head_dim
    rest = model.layer_params() - 2 * model.hidden_size * model.kv_size
    return rest / tp + kv
