"""How a rank works with the others of its instance: a group that holds slices of the same layers, and pipes
to the stages before and after it. The process groups below them are passed in by the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from distserve.core.shapes import Shape


class RankLost(RuntimeError):
    """Another rank of this instance has ended, failed or does not answer: the instance must start again."""


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
        if self._collectives is not None and self.size > 1 and tensor.numel():
            self._collectives.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: Tensor, widths: Sequence[int]) -> Tensor:
        """Joins slices along the last axis: rank r brings [..., widths[r]]; every rank gets [...,
        sum(widths)].

        Widths may differ: slices travel padded to the widest, since the collective wants equal shapes.
        """
        if self._collectives is None or self.size == 1 or not tensor.shape[0]:
            return tensor if self.size == 1 else tensor.new_empty((*tensor.shape[:-1], sum(widths)))
        widest = max(widths)
        if tensor.shape[-1] < widest:
            tensor = torch.nn.functional.pad(tensor, (0, widest - tensor.shape[-1]))
        slices = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        self._collectives.allgather([slices], [tensor.contiguous()]).wait()
        return torch.cat([part[..., :width] for part, width in zip(slices, widths, strict=True)], dim=-1)


class Pipe(Protocol):
    """One way from a rank to the rank of the next stage with the same slice."""

    def send(self, tensor: Tensor) -> None:
        """Returns as soon as the tensor need not be kept. `RankLost` if the next stage is lost."""
        ...

    def receive(self, into: Tensor) -> None:
        """Fills a contiguous tensor of the shape and dtype that was sent. Raises `RankLost`."""
        ...


@dataclass(frozen=True, slots=True)
class RankLinks:
    """A rank's place in its instance and its ways to the others. Without arguments: an instance of one
    rank.
    """

    shape: Shape = field(default_factory=Shape)
    rank: int = 0
    group: ParallelGroup = field(default_factory=ParallelGroup)
    pipe_in: Pipe | None = None  # None: the first stage
    pipe_out: Pipe | None = None  # None: the last stage

    @property
    def stage(self) -> int:
        return self.shape.coordinates(self.rank)[0]

    @property
    def samples(self) -> bool:
        """The one rank that chooses the tokens: the first of the last stage."""
        return self.rank == sampling_rank(self.shape)


def sampling_rank(shape: Shape) -> int:
    return shape.rank(shape.pp - 1, 0)
