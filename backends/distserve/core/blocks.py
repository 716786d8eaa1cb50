"""Paged KV memory of one instance: who owns which block.

A block has up to two owners, the request and a transfer. It is free again when both let go.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from distserve.core.request import Request


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that `tokens` tokens occupy."""
    return -(-tokens // block_size)


class BlockPool(Protocol):
    """What a scheduler asks of the KV memory."""

    num_blocks: int
    block_size: int

    @property
    def free(self) -> int: ...

    def allocate(self, request: Request, count: int) -> None:
        """Gives `request` `count` more blocks. The caller has checked `free`."""
        ...

    def grow(self, requests: Collection[Request], count: int) -> None:
        """Gives each of `requests` `count` more blocks."""
        ...

    def release(self, request: Request) -> None:
        """The request lets go of all its blocks."""
        ...


class BlockManager:
    """Blocks with ids and reference counts, for the engine. Used by the engine's loop thread only."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._owners = [0] * num_blocks

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self, request: Request, count: int) -> None:
        if count > len(self._free):
            raise RuntimeError(f"{count} blocks asked for, {len(self._free)} of {self.num_blocks} are free")
        for _ in range(count):
            block = self._free.pop()
            self._owners[block] = 1
            request.blocks.append(block)
        request.num_blocks += count

    def grow(self, requests: Collection[Request], count: int) -> None:
        for request in requests:
            self.allocate(request, count)

    def release(self, request: Request) -> None:
        self.drop(request.blocks)
        request.blocks = []
        request.num_blocks = 0

    def hold(self, blocks: Iterable[int]) -> None:
        """A transfer becomes second owner of blocks that a request owns."""
        for block in blocks:
            if self._owners[block] == 0:
                raise RuntimeError(f"block {block} is free and cannot be held")
            self._owners[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """One owner lets go of `blocks`."""
        for block in blocks:
            if self._owners[block] == 0:
                raise RuntimeError(f"block {block} is released twice")
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free.append(block)

    def check_integrity(self) -> None:
        """Raises `RuntimeError` unless the free list and the owner counts agree."""
        unowned = [block for block, owners in enumerate(self._owners) if owners == 0]
        if sorted(self._free) != unowned:
            raise RuntimeError(f"{len(self._free)} blocks are listed as free, {len(unowned)} have no owner")


class CountingBlocks:
    """The same memory by numbers alone, for the simulator: growing costs O(1), whatever the batch."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free = num_blocks

    def allocate(self, request: Request, count: int) -> None:
        self.free -= count
        request.num_blocks += count

    def grow(self, requests: Collection[Request], count: int) -> None:
        self.free -= count * len(requests)

    def release(self, request: Request) -> None:
        self.free += request.num_blocks
        request.num_blocks = 0
