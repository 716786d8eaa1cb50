"""The descriptors that connect the ranks of an instance on one host: shared memory and socketpairs."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from distserve.core.shapes import Shape
from distserve.worker.device import parse_device
from distserve.worker.memory_group import MemoryGroup, MemoryPipe, group_bytes
from distserve.worker.parallel import ParallelGroup, RankLinks
from distserve.worker.signals import Signals

SPINS = 30  # where the ranks of a group have cores of their own, they arrive within microseconds


@dataclass(slots=True)
class RankWires:
    """Descriptors of one rank; -1 where there is none. `peers`: by tensor-parallel rank, -1 at its own."""

    group: int = -1
    peers: list[int] = field(default_factory=list)
    pipe_in: tuple[int, int] = (-1, -1)  # memory, socket
    pipe_out: tuple[int, int] = (-1, -1)

    @property
    def fds(self) -> list[int]:
        return [fd for fd in (self.group, *self.peers, *self.pipe_in, *self.pipe_out) if fd >= 0]

    def to_wire(self) -> list[Any]:
        return [self.group, self.peers, self.pipe_in, self.pipe_out]

    @classmethod
    def from_wire(cls, wire: Sequence[Any]) -> RankWires:
        return cls(wire[0], list(wire[1]), tuple(wire[2]), tuple(wire[3]))


def lay_wires(shape: Shape, pipe_size: int) -> list[RankWires]:
    """Connects all ranks; `pipe_size`: bytes of a pipe's memory. The caller owns the descriptors."""
    wires = [RankWires() for _ in range(shape.ranks)]
    for stage in range(shape.pp):
        ranks = [shape.rank(stage, tp_rank) for tp_rank in range(shape.tp)]
        if shape.tp > 1:
            _lay_group([wires[rank] for rank in ranks])
        if stage + 1 < shape.pp:
            for rank in ranks:
                memory = _memory("rank-pipe", pipe_size)
                ours, theirs = _pair()
                wires[rank].pipe_out = (memory, ours)
                wires[rank + shape.tp].pipe_in = (os.dup(memory), theirs)
    return wires


def connect_wires(
    wires: RankWires, shape: Shape, rank: int, devices: Sequence[str], timeout_s: float
) -> RankLinks:
    """A rank's links over its wires, which it takes over. `devices`: of all ranks."""
    stage, tp_rank = shape.coordinates(rank)
    group = ParallelGroup()
    if shape.tp > 1:
        mates = [shape.rank(stage, other) for other in range(shape.tp)]
        spins = SPINS if apart([devices[mate] for mate in mates]) else 0
        peers = [
            Signals(fd, f"rank {mate}", timeout_s, spins) if fd >= 0 else None
            for mate, fd in zip(mates, wires.peers, strict=True)
        ]
        group = ParallelGroup(MemoryGroup(tp_rank, wires.group, peers))
    return RankLinks(
        shape,
        rank,
        group,
        _pipe(wires.pipe_in, f"rank {rank - shape.tp}", timeout_s),
        _pipe(wires.pipe_out, f"rank {rank + shape.tp}", timeout_s),
    )


def close_wires(wires: Iterable[RankWires]) -> None:
    for wire in wires:
        for fd in wire.fds:
            os.close(fd)


def apart(devices: Sequence[str]) -> bool:
    """Does no core belong to two of these devices?"""
    cores = [set(parse_device(name).cores) for name in devices]
    return all(not a & b for a, b in itertools.combinations(cores, 2))


def _lay_group(wires: Sequence[RankWires]) -> None:
    memory = _memory("rank-group", group_bytes(len(wires)))
    for index, wire in enumerate(wires):
        wire.group = memory if index == 0 else os.dup(memory)
        wire.peers = [-1] * len(wires)
    for a, b in itertools.combinations(range(len(wires)), 2):
        wires[a].peers[b], wires[b].peers[a] = _pair()


def _pipe(fds: tuple[int, int], peer: str, timeout_s: float) -> MemoryPipe | None:
    memory, fd = fds
    return MemoryPipe(memory, Signals(fd, peer, timeout_s)) if memory >= 0 else None


def _memory(name: str, size: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    return fd


def _pair() -> tuple[int, int]:
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()
