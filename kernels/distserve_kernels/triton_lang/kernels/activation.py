"""The gated activation of LLaMA's MLP (SwiGLU, arXiv 2002.05202)."""

import triton
import triton.language as tl


@triton.jit
def silu_mul(
    gate_up,  # [T, 2 * n], the gate first
    out,  # [T, n] contiguous
    row_stride,
    n,
    BLOCK_N: tl.constexpr,
):
    """silu(gate), rounded, times up. Grid (T, ceil(n / BLOCK_N))."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < n
    gate = tl.load(gate_up + row * row_stride + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * row_stride + n + column, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * n + column, (activated * up).to(gate.dtype), mask=inside)
