"""Collectives and pipes through memory that the ranks of one host share.

Beside Gloo, which takes 1.8 ms for a sum of 8 KB over two processes, this takes 10 to 30 microseconds (two
cores, p50; `distserve bench executor` measures both): the data is written once, and one byte over a
socketpair says that it is there. A socketpair also tells at once that its other end has died.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from distserve.worker.signals import Signals

SLOT_BYTES = 1 << 20  # larger tensors go in pieces of this size


class Done:
    """What `torch.distributed` calls a work; here it has ended before it is handed out."""

    def wait(self) -> bool:
        return True


class MemoryGroup:
    """`Collectives` of ranks that have mapped the same memory: two slots per rank, used in turns.

    A rank writes its slot, tells the others, waits until all have told it, and reads theirs. It can come
    round to the same slot only after every other rank has entered the operation in between, so what is being
    read is never overwritten, with one meeting per operation. Sums are taken in the order of the ranks: all
    ranks get the same bits.
    """

    def __init__(self, rank: int, memory_fd: int, peers: Sequence[Signals | None]) -> None:
        """`peers[r]` leads to rank r (None at this rank). Takes over `memory_fd`, of `group_bytes(size)`."""
        self._rank = rank
        self._size = len(peers)
        self._peers = [peer for peer in peers if peer is not None]
        self._turn = 0
        self._slots = [
            [_slot(memory, turn * self._size + other) for other in range(self._size)]
            for memory in [_map(memory_fd)]
            for turn in range(2)
        ]

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def allreduce(self, tensors: list[Tensor]) -> Done:
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError("allreduce: the tensor must be contiguous")
            for piece in _pieces(tensor.view(-1)):
                slots = self._exchange(piece)
                torch.add(slots[0], slots[1], out=piece)
                for slot in slots[2:]:
                    piece.add_(slot)
        return Done()

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Done:
        for parts, tensor in zip(outputs, inputs, strict=True):
            pieces = [_pieces(part.view(-1)) for part in parts]
            for index, piece in enumerate(_pieces(tensor.view(-1))):
                for part, slot in zip(pieces, self._exchange(piece), strict=True):
                    part[index].copy_(slot)
        return Done()

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        """What every rank has brought, in the order of the ranks; valid until the exchange after the next."""
        slots = [slot.view(mine.dtype)[: mine.numel()] for slot in self._slots[self._turn]]
        self._turn ^= 1
        slots[self._rank].copy_(mine)
        for peer in self._peers:
            peer.send()
        for peer in self._peers:
            peer.wait()
        return slots


class MemoryPipe:
    """A `Pipe` in shared memory: a ring of slots. The sender waits only while all of them are full."""

    def __init__(self, memory_fd: int, peer: Signals) -> None:
        """Takes over `memory_fd`; it has a whole number of slots."""
        memory = _map(memory_fd)
        self._slots = [_slot(memory, index) for index in range(len(memory) // SLOT_BYTES)]
        self._peer = peer
        self._passed = 0  # slots filled, or emptied, since the start
        self._unread = 0  # slots filled that the other side has not said it has emptied

    def send(self, tensor: Tensor) -> None:
        for piece in _pieces(tensor.contiguous().view(-1)):
            if self._unread == len(self._slots):
                self._peer.wait()
                self._unread -= 1
            self._next(piece).copy_(piece)
            self._unread += 1
            self._peer.send()

    def receive(self, into: Tensor) -> None:
        for piece in _pieces(into.view(-1)):
            self._peer.wait()
            piece.copy_(self._next(piece))
            self._peer.send()

    def _next(self, piece: Tensor) -> Tensor:
        slot = self._slots[self._passed % len(self._slots)]
        self._passed += 1
        return slot.view(piece.dtype)[: piece.numel()]


def group_bytes(size: int) -> int:
    """Memory of a group of `size` ranks."""
    return 2 * size * SLOT_BYTES


def pipe_bytes(largest: int, messages: int) -> int:
    """Memory of a pipe in which `messages`, one of them of `largest` bytes, do not stop the sender."""
    return (max(1, -(-largest // SLOT_BYTES)) + messages - 1) * SLOT_BYTES


def _map(fd: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def _slot(memory: mmap.mmap, index: int) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8, count=SLOT_BYTES, offset=index * SLOT_BYTES)


def _pieces(flat: Tensor) -> list[Tensor]:
    """Parts of a 1-D tensor that fit a slot."""
    step, size = SLOT_BYTES // flat.itemsize, flat.numel()
    return [flat] if size <= step else [flat[start : start + step] for start in range(0, size, step)]
