"""The ranks that share one tensor-parallel slice of work, over a process group that the caller passes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Collectives(Protocol):
    """The part of `torch.distributed`'s process groups (Gloo, NCCL) that is needed here.

    The group brings its own deadline: a collective that a peer does not join raises `RuntimeError` after it.
    """

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def allreduce(self, tensors: list[Tensor]) -> Any: ...

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Any: ...


class ParallelGroup:
    """`size` ranks that hold slices of the same layers. Without a process group: one rank, and no
    communication.

    Every rank must make the same calls in the same order. The default group of `torch.distributed` is never
    used, so that several engines and their transfer groups can live in one process.
    """

    __slots__ = ("_collectives", "rank", "size")

    def __init__(self, collectives: Collectives | None = None) -> None:
        self._collectives = collectives
        self.rank = 0 if collectives is None else collectives.rank()
        self.size = 1 if collectives is None else collectives.size()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, **in place**; returns `tensor`. `RuntimeError` if a peer is lost."""
        if self._collectives is not None and self.size > 1:
            self._collectives.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        """Joins slices along the last axis: rank r brings [..., widths[r]]; every rank gets [...,
        sum(widths)].

        Widths may differ: slices travel padded to the widest, since the collective wants equal shapes.
        """
        if self._collectives is None or self.size == 1:
            return tensor
        widest = max(widths)
        if tensor.shape[-1] < widest:
            tensor = torch.nn.functional.pad(tensor, (0, widest - tensor.shape[-1]))
        slices = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._collectives.allgather([slices], [tensor.contiguous()]).wait()
        return torch.cat([part[..., :width] for part, width in zip(slices, widths, strict=True)], dim=-1)
