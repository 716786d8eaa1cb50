"""The small per-layer operations of CUDA tensors; the twins are in `ops_reference`, by the same names.

`serves(x)` says whether they take a tensor; `ops` asks before it dispatches here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from distserve_kernels.triton_lang.kernels import norms
from distserve_kernels.triton_lang.kernels.activation import silu_mul as silu_mul_kernel
from distserve_kernels.triton_lang.kernels.rotary import rotary_store as rotary_kernel
from distserve_kernels.triton_lang.launch import FUSED, ceil_div, next_power_of_2, packed_rows, padded

MOST_COLUMNS = 32768  # of a row that is held in registers
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILE = 1024  # elements of a program that takes several short rows, or part of a long one


def serves(x: Tensor) -> bool:
    """Can these kernels take x, by dtype, row length and strides?"""
    return x.dtype in _DTYPES and 0 < x.shape[-1] <= MOST_COLUMNS


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last axis; x [..., n], weight [n]; returns a new contiguous tensor."""
    return _normalise(norms.rms_norm, x, None, (weight,), eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """residual += x **in place**; returns (rms_norm(residual), residual). `residual` must be contiguous."""
    return _normalise(norms.rms_norm, x, residual, (weight,), eps), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / std * weight + bias over the last axis; x [..., n]; returns a new contiguous tensor."""
    return _normalise(norms.layer_norm, x, None, (weight, bias), eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """residual += x **in place**; returns (layer_norm(residual), residual). `residual` must be contiguous."""
    return _normalise(norms.layer_norm, x, residual, (weight, bias), eps), residual


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2 * n] with the gate first; returns [..., n]."""
    n = gate_up.shape[-1] // 2
    x = packed_rows(gate_up)
    x = x if x.dim() == 2 else x.reshape(-1, 2 * n)
    out = torch.empty((*gate_up.shape[:-1], n), dtype=x.dtype, device=x.device)
    if out.numel():
        block = min(next_power_of_2(n), _TILE)
        grid = (x.shape[0], ceil_div(n, block))
        silu_mul_kernel[grid](x, out, x.stride(0), n, BLOCK_N=block, num_warps=4, **FUSED)
    return out


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """See `ops.rotary`. The last axis of q and k must be contiguous."""
    _rotate(q, k, cos, sin, None)


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
    """`rotary`, then the store of k and v into pages of layout `TOKENS`, in one pass over memory.

    v [T, Hk, D]; slots int64 [T] = block * block_size + offset; negative: rotated, not stored.
    """
    _rotate(q, k, cos, sin, (packed_rows(v), key_pages, value_pages, slots))


def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, store: tuple[Tensor, Tensor, Tensor, Tensor] | None
) -> None:
    for name, heads in (("q", q), ("k", k)):
        if heads.stride(-1) != 1:
            raise ValueError(f"{name}: stride {heads.stride(-1)} of the last axis must be 1")
    tokens, q_heads, dim = q.shape
    kv_heads, half = k.shape[1], cos.shape[-1]
    if not tokens:
        return
    v, key_pages, value_pages, slots = store or (k, k, k, k)
    block = heads_per_program(max(q_heads, kv_heads), dim)
    parts = ceil_div(q_heads, block) + ceil_div(kv_heads, block) * (1 if store is None else 2)
    rotary_kernel[(tokens, parts)](
        q,
        k,
        v,
        cos.float().contiguous(),
        sin.float().contiguous(),
        slots,
        key_pages,
        value_pages,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        STORE=store is not None,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=dim,
        HALF=half,
        BLOCK_H=block,
        BLOCK_C=next_power_of_2(half),
        BLOCK_D=padded(dim),
        num_warps=copy_warps(block * next_power_of_2(half) * q.element_size()),
        **FUSED,
    )


def heads_per_program(heads: int, head_dim: int) -> int:
    """Heads of one token that a program takes: about `_TILE` elements, no more than there are."""
    return min(max(1, _TILE // padded(head_dim)), next_power_of_2(heads))


def copy_warps(tile_bytes: int) -> int:
    """Warps for a tile of this size: as many as each thread has 16 bytes to load, up to 4."""
    return min(max(1, tile_bytes // (16 * 32)), 4)


def norm_block(n: int) -> tuple[int, int, int]:
    """(rows per program, columns padded, warps) of the norms of rows of n elements."""
    columns = next_power_of_2(n)
    rows = max(1, _TILE // columns)
    return rows, columns, min(max(1, rows * columns // 512), 16)


def _normalise(
    kernel: object, x: Tensor, residual: Tensor | None, parameters: tuple[Tensor, ...], eps: float
) -> Tensor:
    """Launches a norm; x [..., n] may have any two row strides, residual is contiguous."""
    if residual is not None and not residual.is_contiguous():
        raise ValueError(f"residual: strides {residual.stride()} must be contiguous")
    n = x.shape[-1]
    x = packed_rows(x)
    if x.dim() > 3 or (x.dim() == 3 and x.stride(0) == 0):
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = out.numel() // n
    if not rows:
        return out
    if x.is_contiguous():
        inner, outer_stride, inner_stride = 1, n, 0
    elif x.dim() == 3:
        inner, outer_stride, inner_stride = x.shape[1], x.stride(0), x.stride(1)
    else:
        inner, outer_stride, inner_stride = 1, x.stride(0), 0
    block_r, block_n, warps = norm_block(n)
    kernel[(ceil_div(rows, block_r),)](  # type: ignore[index]
        x,
        out if residual is None else residual,
        *parameters,
        out,
        outer_stride,
        inner_stride,
        inner,
        rows,
        n,
        eps,
        ADD=residual is not None,
        BLOCK_R=block_r,
        BLOCK_N=block_n,
        num_warps=warps,
        **FUSED,
    )
    return out
