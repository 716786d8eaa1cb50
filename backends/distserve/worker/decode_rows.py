"""Which row of the static decode buffers a sequence has, and what of it is new since its last step.

Host arithmetic only. A sequence keeps its row from step to step, whatever joins or leaves, so that of its
block table only what is new has to travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from distserve.worker.step import LAST_SAMPLED, StepItem

Integers = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Seat:
    """`next`: where its next step starts if nothing else becomes of it; `blocks`: known on the device."""

    row: int
    next: int
    blocks: int


@dataclass(frozen=True, slots=True)
class RowsStep:
    """One step of `bucket` rows.

    `inputs` int64 [3, bucket]: token ids; positions, -1 in rows without a sequence; and the row in which the
    token was sampled by the step before, -1 where it is given. `rows` [n]: of the items, in their order.
    `places` int64 [2, m]: flat places in the block tables, and the block ids that go there.
    """

    inputs: Integers
    rows: Integers
    places: Integers


class DecodeRows:
    """`width`: blocks in a row of the table."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._seats: dict[str, _Seat] = {}

    def seat(self, items: Sequence[StepItem], bucket: int) -> RowsStep:
        """Rows below `bucket` for single-token items of distinct sequences, and what the device must be told.

        Raises `ValueError` for a token that was to be sampled by the step before, and was not.
        """
        seats, moved_from = self._assign(items, bucket)
        inputs = np.zeros((3, bucket), dtype=np.int64)
        inputs[1:] = -1
        places: list[int] = []
        blocks: list[int] = []
        for item, seat in zip(items, seats, strict=True):
            row, (token,) = seat.row, item.tokens
            if token == LAST_SAMPLED:
                inputs[2, row] = moved_from[item.key]
            else:
                inputs[0, row] = token
            inputs[1, row] = item.start
            table = item.block_table
            known = seat.blocks if seat.next == item.start else 0
            if known < len(table):
                first = row * self._width
                places += range(first + known, first + len(table))
                blocks += table[known:]
            seat.next, seat.blocks = item.start + 1, len(table)
        rows = np.fromiter((seat.row for seat in seats), dtype=np.int64, count=len(seats))
        return RowsStep(inputs, rows, np.array([places, blocks], dtype=np.int64))

    def _assign(self, items: Sequence[StepItem], bucket: int) -> tuple[list[_Seat], dict[str, int]]:
        """The seats, and for each sequence that was in the step before its row there.

        Raises `ValueError` (see `seat`).
        """
        keys = {item.key for item in items}
        before = {key: seat.row for key, seat in self._seats.items()}
        kept = {key: seat for key, seat in self._seats.items() if key in keys and seat.row < bucket}
        free: list[int] = []
        if len(kept) < len(items):
            free = sorted(set(range(bucket)) - {seat.row for seat in kept.values()}, reverse=True)
        seats = []
        for item in items:
            if item.tokens[0] == LAST_SAMPLED and item.key not in before:
                raise ValueError(f"sequence {item.key}: the step before did not sample its token")
            seat = kept.get(item.key)
            if seat is None:
                seat = kept[item.key] = _Seat(free.pop(), -1, 0)
            seats.append(seat)
        self._seats = kept
        return seats, before

    def forget(self) -> None:
        """Nothing is known on the device: after a step that failed half way."""
        self._seats = {}
