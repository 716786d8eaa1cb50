"""The small per-layer operations, one function each; the implementation follows from the tensor's device
and dtype.

On the CPU in fp32 and bf16: C, one pass over memory and one call of a microsecond or two instead of several
torch operators. On CUDA: kernels in the Triton language (`triton_lang.rows`). Otherwise, and where no
compiler is, torch (`ops_reference`).
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, cast

import torch
from torch import Tensor

from distserve_kernels import compiled, ops_reference
from distserve_kernels.cpu import SUFFIX, bind, packed_heads

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis; x [..., n], weight [n]; returns a new tensor like x."""
    if x.is_cuda:
        return _cuda(x).rms_norm(x, weight, eps)
    c = _compiled(x)
    if c is None:
        return ops_reference.rms_norm(x, weight, eps)
    x = x if _rows(x) else x.contiguous()
    n = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype)
    stride = x.stride(-2) if x.dim() > 1 else n
    c.rms_norm(x.data_ptr(), stride, None, weight.data_ptr(), out.data_ptr(), out.numel() // n, n, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual += x **in place**, then normalise; returns (rms_norm(residual), residual). Same shape and
    dtype.
    """
    if x.is_cuda:
        return _cuda(x, residual.is_contiguous()).add_rms_norm(x, residual, weight, eps)
    c = _compiled(x)
    if c is None or not residual.is_contiguous():
        return ops_reference.add_rms_norm(x, residual, weight, eps)
    x = x if _rows(x) else x.contiguous()
    n = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype)
    stride = x.stride(-2) if x.dim() > 1 else n
    rows = out.numel() // n
    c.rms_norm(x.data_ptr(), stride, residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, n, eps)
    return out, residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / std * weight + bias over the last axis; x [..., n], weight and bias [n]; a new tensor."""
    return (_cuda(x) if x.is_cuda else ops_reference).layer_norm(x, weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """residual += x **in place**, then normalise; returns (layer_norm(residual), residual)."""
    chosen = _cuda(x, residual.is_contiguous()) if x.is_cuda else ops_reference
    return chosen.add_layer_norm(x, residual, weight, bias, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2 * n] with the gate first; returns [..., n]."""
    if gate_up.is_cuda:
        return _cuda(gate_up).silu_mul(gate_up)
    c = _compiled(gate_up)
    if c is None:
        return ops_reference.silu_mul(gate_up)
    gate_up = gate_up if _rows(gate_up) else gate_up.contiguous()
    n = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], n), dtype=gate_up.dtype)
    stride = gate_up.stride(-2) if gate_up.dim() > 1 else 2 * n
    c.silu_mul(gate_up.data_ptr(), stride, out.data_ptr(), out.numel() // n, n)
    return out


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate q [T, Hq, D] and k [T, Hk, D] **in place**; they may be slices of one qkv tensor.

    cos, sin: fp32 [T, half], the angles of the tokens (half = rotated dims / 2, normally D / 2; one entry per
    frequency, not doubled). Pairs are (i, i + half), Hugging Face's LLaMA order.
    """
    if q.is_cuda:
        _cuda(q, q.stride(-1) == 1 and k.stride(-1) == 1).rotary(q, k, cos, sin)
        return
    c = _compiled(q)
    in_place = packed_heads(q) is q and packed_heads(k) is k
    if c is None or not in_place or cos.dtype != torch.float32:
        ops_reference.rotary(q, k, cos, sin)
        return
    rows, q_heads, dim = q.shape
    cos, sin = cos.contiguous(), sin.contiguous()
    half = cos.shape[1]
    pointers = (q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), cos.data_ptr(), sin.data_ptr())
    c.rotary(*pointers, rows, q_heads, k.shape[1], dim, half)


class RowOperations(Protocol):
    """What `ops_reference` and `triton_lang.rows` both offer."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor: ...

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...

    def silu_mul(self, gate_up: Tensor) -> Tensor: ...

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None: ...


class _RowKernels(RowOperations, Protocol):
    def serves(self, x: Tensor) -> bool: ...


def _cuda(x: Tensor, fits: bool = True) -> RowOperations:
    """The kernels for a CUDA tensor, or torch where they can't serve it (`fits`: says the caller)."""
    kernels = _row_kernels()
    return kernels if kernels is not None and fits and kernels.serves(x) else ops_reference


@lru_cache(maxsize=1)
def _row_kernels() -> _RowKernels | None:
    try:
        return cast(_RowKernels, importlib.import_module("distserve_kernels.triton_lang.rows"))
    except ModuleNotFoundError:  # no Triton language: torch serves
        return None


@dataclass(frozen=True)
class _CompiledOps:
    rms_norm: Callable[..., None]
    silu_mul: Callable[..., None]
    rotary: Callable[..., None]


@lru_cache(maxsize=4)
def _bound(dtype: torch.dtype) -> _CompiledOps | None:
    library, suffix = compiled.library(), SUFFIX.get(dtype)
    if library is None or suffix is None:
        return None
    row = (_POINTER, _LONG)
    norm = (*row, _POINTER, _POINTER, _POINTER, _LONG, _INT, _FLOAT)
    rotate = (*row, *row, _POINTER, _POINTER, _LONG, *[_INT] * 4)
    return _CompiledOps(
        bind(library, f"rms_norm_{suffix}", norm),
        bind(library, f"silu_mul_{suffix}", (*row, _POINTER, _LONG, _INT)),
        bind(library, f"rotary_{suffix}", rotate),
    )


def _compiled(x: Tensor) -> _CompiledOps | None:
    return _bound(x.dtype) if x.is_cpu else None


def _rows(x: Tensor) -> bool:
    """Is x contiguous, or 2-D with packed rows?"""
    return x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1)
