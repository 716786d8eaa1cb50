"""Rotary position embedding: angles (RoFormer, arXiv 2104.09864), with the scalings of `config.json`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from distserve.core.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position, fp32 [head_dim / 2]; scaling "linear" (positions divided) or "llama3" (Llama
    3.1).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    scaling = rope.scaling or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / float(scaling["factor"])
    if kind == "llama3":
        return _llama3(
            frequencies,
            factor=float(scaling["factor"]),
            low=float(scaling["low_freq_factor"]),
            high=float(scaling["high_freq_factor"]),
            original_context=int(scaling["original_max_position_embeddings"]),
        )
    raise ValueError(f"rope_type={kind!r}: must be default, linear or llama3")


def _llama3(frequencies: Tensor, factor: float, low: float, high: float, original_context: int) -> Tensor:
    """Long waves are stretched by `factor`, short ones kept, those in between blended."""
    waves = 2 * math.pi / frequencies
    scaled = torch.where(waves > original_context / low, frequencies / factor, frequencies)
    smooth = (original_context / waves - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    between = (waves >= original_context / high) & (waves <= original_context / low)
    return torch.where(between, blended, scaled)


class RotaryTable:
    """cos and sin of every position, fp32, computed once.

    A lookup gives a position the same bits in every batch; computing them per step would not (vectorised
    and scalar cosines differ in the last bit).
    """

    def __init__(self, rope: RopeConfig, head_dim: int, max_context: int, device: torch.device) -> None:
        positions = torch.arange(max_context, dtype=torch.float32)
        angles = positions[:, None] * inverse_frequencies(rope, head_dim)
        self._cos = angles.cos().to(device)
        self._sin = angles.sin().to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each [T, head_dim / 2], of positions [T]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)
