"""The small per-layer operations, one function each; the implementation follows from the tensor's device and dtype."""

from __future__ import annotations

from torch import Tensor

from distserve_kernels import ops_reference


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis; x [..., n], weight [n]; returns a new tensor like x."""
    return ops_reference.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual += x **in place**, then normalise; returns (rms_norm(residual), residual)."""
    return ops_reference.add_rms_norm(x, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2 * n] with the gate first; returns [..., n]."""
    return ops_reference.silu_mul(gate_up)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate q [T, Hq, D] and k [T, Hk, D] **in place**; they may be slices of one qkv tensor.

    cos, sin: fp32 [T, half], the angles of the tokens (half = rotated dims / 2, normally D / 2; one entry per
    frequency, not doubled). Pairs are (i, i + half), Hugging Face's LLaMA order.
    """
    ops_reference.rotary(q, k, cos, sin)
