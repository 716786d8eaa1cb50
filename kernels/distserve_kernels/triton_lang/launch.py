"""What all launches share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = math.log2(math.e)
NO_WINDOW = 2**31 - 1  # longer than any context
# Multiply-add contraction, which newer versions of Triton have off unless told.
FUSED: Mapping[str, bool] = {"enable_fp_fusion": True}

_LANGUAGE_DTYPE: dict[torch.dtype, Any] = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def operand_dtype(dtype: torch.dtype, kernel: Any) -> Any:
    """The dtype in which a kernel multiplies matrices of this dtype.

    The interpreter has no bf16 arithmetic; it gets the same, rounded, numbers as fp32.
    """
    interpreted = not isinstance(kernel, triton.JITFunction)
    return tl.float32 if interpreted and dtype == torch.bfloat16 else _LANGUAGE_DTYPE[dtype]


def packed_rows(x: Tensor) -> Tensor:
    """x itself if its last axis is contiguous, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def padded(head_dim: int) -> int:
    """The power of two that a tile has for a head of this size; at least 16, the least a product takes."""
    return max(16, next_power_of_2(head_dim))
