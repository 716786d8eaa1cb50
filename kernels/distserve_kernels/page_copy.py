"""Packs blocks of KV pages into one contiguous buffer for a transfer, and unpacks them.

A buffer holds, for each of several page tensors (K and V of some layers), the given blocks with a range of
heads: [tensors, blocks, <one block of the tensor, its heads cut to the range>]. On CUDA one launch for all
of it; elsewhere torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from distserve_kernels.layout import TOKENS


@dataclass(frozen=True)
class PageSet:
    """Page tensors of one shape and dtype, in the order in which they are packed."""

    tensors: tuple[Tensor, ...]
    kv_head_axis: int
    distances: Tensor  # int64 [tensors]: elements from the first tensor to each, for one launch over all

    @classmethod
    def of(cls, tensors: Sequence[Tensor], kv_head_axis: int) -> PageSet:
        """Make it once and keep it: it copies a small table to the device.

        Raises `ValueError` if a tensor is not contiguous or differs from the first in shape, dtype or device.
        """
        first = tensors[0]
        for number, tensor in enumerate(tensors):
            if not tensor.is_contiguous():
                raise ValueError(f"page tensor {number}: strides {tensor.stride()} must be contiguous")
            for field in ("shape", "dtype", "device"):
                found, expected = getattr(tensor, field), getattr(first, field)
                if found != expected:
                    raise ValueError(
                        f"page tensor {number}: {field} {found} must be {expected}, as of the first"
                    )
        bytes_away = [t.data_ptr() - first.data_ptr() for t in tensors]
        size = first.element_size()
        if first.is_cuda and any(distance % (16 * size) for distance in bytes_away):
            raise ValueError(f"page tensors must lie multiples of {16 * size} bytes apart")
        distances = torch.tensor([d // size for d in bytes_away], dtype=torch.int64)
        return cls(tuple(tensors), kv_head_axis, distances.to(first.device))

    def block_shape(self, heads: range) -> tuple[int, ...]:
        """Shape of one block of one tensor with these heads only."""
        shape = list(self.tensors[0].shape[1:])
        shape[self.kv_head_axis - 1] = len(heads)
        return tuple(shape)


def pack(pages: PageSet, members: range, blocks: Tensor, heads: range, buffer: Tensor) -> Tensor:
    """Copies blocks (int64 [n], on the pages' device) of `members` of the set into the 1-D `buffer`.

    Returns the filled part as [len(members), n, *block_shape(heads)]. Raises `ValueError` if it does not fit.
    """
    filled = _view(pages, members, blocks, heads, buffer)
    if not _copy(pages, members, blocks, heads, filled, to_buffer=True):
        for part, number in zip(filled, members, strict=True):
            source = pages.tensors[number].narrow(pages.kv_head_axis, heads.start, len(heads))
            torch.index_select(source, 0, blocks, out=part)
    return filled


def unpack(pages: PageSet, members: range, blocks: Tensor, heads: range, buffer: Tensor) -> None:
    """The inverse of `pack`: writes the start of `buffer` into the blocks, which must be distinct."""
    filled = _view(pages, members, blocks, heads, buffer)
    if not _copy(pages, members, blocks, heads, filled, to_buffer=False):
        for part, number in zip(filled, members, strict=True):
            target = pages.tensors[number].narrow(pages.kv_head_axis, heads.start, len(heads))
            target.index_copy_(0, blocks, part)


def _view(pages: PageSet, members: range, blocks: Tensor, heads: range, buffer: Tensor) -> Tensor:
    first = pages.tensors[0]
    check_consecutive("heads", heads, first.shape[pages.kv_head_axis])
    check_consecutive("members", members, len(pages.tensors))
    shape = (len(members), blocks.shape[0], *pages.block_shape(heads))
    size = torch.Size(shape).numel()
    check_buffer(buffer, size, first.dtype)
    return buffer[:size].view(shape)


def check_consecutive(name: str, chosen: range, count: int) -> None:
    """Raises `ValueError` unless these are consecutive ones of `count`."""
    if chosen.start < 0 or chosen.stop > count or chosen.step != 1:
        raise ValueError(f"{name}={chosen}: must be consecutive ones of {count}")


def check_buffer(buffer: Tensor, size: int, dtype: torch.dtype) -> None:
    """Raises `ValueError` for a buffer of another dtype or of fewer than `size` elements."""
    if buffer.dtype != dtype or size > buffer.numel():
        raise ValueError(f"buffer of {buffer.numel()} {buffer.dtype}: {size} {dtype} are needed")


def _copy(
    pages: PageSet, members: range, blocks: Tensor, heads: range, filled: Tensor, *, to_buffer: bool
) -> bool:
    """One launch for all of it; False where no kernel serves these pages."""
    kernels = _kernels() if pages.tensors[0].is_cuda and pages.kv_head_axis == TOKENS.kv_head_axis else None
    if kernels is None:
        return False
    distances = pages.distances[members.start : members.stop]
    kernels.copy(pages.tensors[0], distances, blocks, heads, filled, pack=to_buffer)
    return True


@lru_cache(maxsize=1)
def _kernels() -> ModuleType | None:
    try:
        return importlib.import_module("distserve_kernels.triton_lang.pages")
    except ModuleNotFoundError:  # no Triton language: torch serves
        return None
