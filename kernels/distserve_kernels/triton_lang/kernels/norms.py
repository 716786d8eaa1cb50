"""RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450), alone or after adding to the residual stream.

x is [outer, inner, n] with free outer and inner strides: rows of a matrix, or heads inside the rows of a
qkv tensor. A program takes BLOCK_R rows, each whole in registers, so that memory is read once.
"""

import triton
import triton.language as tl


@triton.jit
def load_summed(
    x, x_outer_stride, x_inner_stride, residual, inner, rows, n,
    ADD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(tile in fp32, its start and offsets if contiguous, mask); with ADD it is the new, stored, residual."""
    line = tl.arange(0, BLOCK_R)
    column = tl.arange(0, BLOCK_N)
    row0 = tl.program_id(0) * BLOCK_R
    row = row0 + line
    mask = (row < rows)[:, None] & (column < n)[None, :]
    from_row = (row // inner).to(tl.int64) * x_outer_stride + (row % inner).to(tl.int64) * x_inner_stride
    tile = tl.load(x + from_row[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    # A 64-bit scalar and 32-bit offsets: fewer registers.
    start = row0.to(tl.int64) * n
    at = line[:, None] * n + column[None, :]
    if ADD:
        tile += tl.load(residual + start + at, mask=mask, other=0.0).to(tl.float32)
        rounded = tile.to(residual.dtype.element_ty)
        tl.store(residual + start + at, rounded, mask=mask)
        tile = rounded.to(tl.float32)
    return tile, start, at, mask


@triton.jit(do_not_specialize=["rows"])  # varies while serving
def rms_norm(
    x,
    residual,  # [rows, n] contiguous, updated in place if ADD
    weight,  # [n]
    out,  # [rows, n] contiguous
    x_outer_stride,
    x_inner_stride,
    inner,
    rows,  # outer * inner
    n,
    eps,
    ADD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """x / rms(x), rounded to x's dtype, times weight. Grid (ceil(rows / BLOCK_R),)."""
    tile, start, at, mask = load_summed(
        x, x_outer_stride, x_inner_stride, residual, inner, rows, n, ADD, BLOCK_R, BLOCK_N
    )
    scale = tl.rsqrt(tl.sum(tile * tile, 1) / n + eps)
    scaled = (tile * scale[:, None]).to(x.dtype.element_ty).to(tl.float32)
    column = tl.arange(0, BLOCK_N)
    factor = tl.load(weight + column, mask=column < n, other=0.0).to(tl.float32)
    tl.store(out + start + at, (scaled * factor[None, :]).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def layer_norm(
    x,
    residual,  # [rows, n] contiguous, updated in place if ADD
    weight,  # [n]
    bias,  # [n]
    out,  # [rows, n] contiguous
    x_outer_stride,
    x_inner_stride,
    inner,
    rows,  # outer * inner
    n,
    eps,
    ADD: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(x - mean) / std * weight + bias. Grid (ceil(rows / BLOCK_R),)."""
    tile, start, at, mask = load_summed(
        x, x_outer_stride, x_inner_stride, residual, inner, rows, n, ADD, BLOCK_R, BLOCK_N
    )
    centred = tl.where(mask, tile - (tl.sum(tile, 1) / n)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / n + eps)
    column = tl.arange(0, BLOCK_N)
    factor = tl.load(weight + column, mask=column < n, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=column < n, other=0.0).to(tl.float32)
    scaled = centred * scale[:, None] * factor[None, :] + shift[None, :]
    tl.store(out + start + at, scaled.to(out.dtype.element_ty), mask=mask)
