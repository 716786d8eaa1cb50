"""From logits to tokens, batched: arg max and the draw under temperature, top-k, top-p and min-p.

On the CPU in C, some tens of microseconds per row of 32000 logits; elsewhere torch (`sampling_reference`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from distserve_kernels import compiled, sampling_reference
from distserve_kernels.cpu import bind
from distserve_kernels.sampling_reference import Truncation

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


def argmax(logits: Tensor) -> Tensor:
    """Index of the largest logit of each row of [n, V], the first of equal ones; int64 [n]."""
    c = _compiled(logits)
    if c is None:
        return logits.argmax(-1)
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    c.argmax(logits.data_ptr(), logits.stride(0), rows, vocabulary, tokens.data_ptr())
    return tokens


def draw(logits: Tensor, how: Truncation, uniforms: Tensor) -> Tensor:
    """Token ids int64 [n] from logits [n, V] (fp32) and uniforms fp64 [n] in [0, 1).

    The order of the limits and of the draw is that of `sampling_reference.draw`, the twin.
    """
    c = _compiled(logits)
    if c is None:
        return sampling_reference.draw(logits, how, uniforms)
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64)
    parameters = (how.temperature, how.top_k, how.top_p, how.min_p, uniforms)
    addresses = [x.contiguous().data_ptr() for x in parameters]
    if c.sample(logits.data_ptr(), logits.stride(0), rows, vocabulary, *addresses, tokens.data_ptr()):
        raise MemoryError(f"no memory for the scratch row of {vocabulary} weights")
    return tokens


@dataclass(frozen=True)
class _Compiled:
    argmax: Callable[..., None]
    sample: Callable[..., int]


@lru_cache(maxsize=1)
def _bound() -> _Compiled | None:
    library = compiled.library()
    if library is None:
        return None
    row = (_POINTER, _LONG, _INT, _INT)
    sample = library["sample_float"]
    sample.argtypes, sample.restype = (*row, *[_POINTER] * 6), _INT
    return _Compiled(bind(library, "argmax_float", (*row, _POINTER)), sample)


def _compiled(logits: Tensor) -> _Compiled | None:
    usable = logits.is_cpu and logits.dtype == torch.float32 and logits.dim() == 2 and logits.stride(1) == 1
    return _bound() if usable and logits.shape[1] else None
