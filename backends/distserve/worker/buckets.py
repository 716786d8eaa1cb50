"""Batch sizes that decode steps are padded to. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

FINE = 8  # from here to 256 every multiple of it; a row more costs little, a captured graph some memory
COARSE_FROM, COARSE = 256, 16


def batch_buckets(most: int) -> tuple[int, ...]:
    """Sizes for batches of 1 to `most` sequences: sorted, unique, and `most` is the largest.

    1, 2, 4, then the multiples of 8, above 256 those of 16.
    """
    sizes = [1, 2, 4, *range(FINE, COARSE_FROM, FINE), *range(COARSE_FROM, most, COARSE)]
    return (*(size for size in sizes if size < most), most)


def bucket_of(batch: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `batch` sequences. Raises `ValueError` if none does."""
    place = bisect_left(buckets, batch)
    if batch < 1 or place == len(buckets):
        raise ValueError(f"batch={batch}: must be in [1, {buckets[-1]}]")
    return buckets[place]
