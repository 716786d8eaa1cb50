"""The small per-layer operations in plain torch: right for every shape, dtype and device, and the twin of
each fused one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distserve_kernels.layout import TOKENS


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis; x [..., n], weight [n]. Statistics in fp32."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual += x in place; returns (rms_norm(residual), residual)."""
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / std * weight + bias over the last axis; x [..., n]. Statistics in fp32."""
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """residual += x in place; returns (layer_norm(residual), residual)."""
    residual.add_(x)
    return layer_norm(residual, weight, bias, eps), residual


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2 * n] with the gate first; returns [..., n]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the first 2 * half values of every head of q [T, Hq, D] and k [T, Hk, D] in place.

    cos, sin: [T, half], the angles of the tokens. Pairs are (i, i + half), the order of GPT-NeoX and of
    Hugging Face's LLaMA (RoFormer, arXiv 2104.09864, equation 34 with the pairs reordered).
    """
    for heads in (q, k):
        half = cos.shape[-1]
        c, s = cos.unsqueeze(1).to(heads.dtype), sin.unsqueeze(1).to(heads.dtype)
        first, second = heads[..., :half], heads[..., half : 2 * half]
        rotated = first * c - second * s
        second.copy_(second * c + first * s)
        first.copy_(rotated)


def rotary_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slots: Tensor,
) -> None:
    """`rotary`, then the store of k and v [T, Hk, D] in pages of layout `TOKENS` (negative slots: not)."""
    rotary(q, k, cos, sin)
    TOKENS.write(k, v, key_pages, value_pages, slots)
