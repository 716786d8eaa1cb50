"""How one (source rank, destination rank) transfer is cut into messages that fit a staging buffer. Pure
arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from distserve.transfer.plan import Slice


@dataclass(frozen=True, slots=True)
class Piece:
    """K (`part` 0) or V (`part` 1) of one layer: some heads, blocks [first, first + count) of the request's
    list.
    """

    layer: int
    part: int
    heads: range
    first: int
    count: int


def total_units(slices: Sequence[Slice], num_blocks: int) -> int:
    """Size of a transfer in (block, head, K or V) units, each `head_dim * block_size` elements."""
    return sum(2 * len(s.layers) * len(s.heads) for s in slices) * num_blocks


def message_units(slices: Sequence[Slice], num_blocks: int, limit: int) -> tuple[int, int]:
    """(number of messages, units of the largest one) when a message may have `limit` units.

    Messages are made equally large, so that no tiny one ends the transfer. Raises `ValueError` if one block
    of a slice does not fit into `limit`.
    """
    widest = max((len(s.heads) for s in slices), default=0)
    if widest > limit:
        raise ValueError(f"staging buffer of {limit} units: one block of {widest} heads does not fit")
    total = total_units(slices, num_blocks)
    if total == 0:
        return 0, 0
    target = -(-total // -(-total // limit))
    size = min(limit, -(-target // widest) * widest)
    return sum(1 for _ in messages(slices, num_blocks, size)), size


def messages(slices: Sequence[Slice], num_blocks: int, size: int) -> Iterator[list[Piece]]:
    """The pieces of each message, at most `size` units together, in the order of both sides."""
    message: list[Piece] = []
    room = size
    for layer, part, heads in _pages(slices):
        first = 0
        while first < num_blocks:
            count = min(num_blocks - first, room // len(heads))
            if count == 0:
                yield message
                message, room = [], size
                continue
            message.append(Piece(layer, part, heads, first, count))
            first += count
            room -= count * len(heads)
    if message:
        yield message


def units(message: Sequence[Piece]) -> int:
    return sum(piece.count * len(piece.heads) for piece in message)


def _pages(slices: Sequence[Slice]) -> Iterator[tuple[int, int, range]]:
    for piece in slices:
        for layer in piece.layers:
            yield layer, 0, piece.heads
            yield layer, 1, piece.heads
