"""Sizes that decode steps are padded to: sequences, and the length of the longest. Pure arithmetic."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

# (up to here, multiples of this): a row more costs little, a recorded graph memory and time at the start
STEPS = ((32, 8), (128, 16), (1 << 30, 32))
CONTEXTS = (4096, 32768)  # tokens: attention is launched for the longest context that a graph may see


def batch_buckets(most: int) -> tuple[int, ...]:
    """Sizes for batches of 1 to `most` sequences: sorted, unique, and `most` is the largest.

    1, 2, 4, then the multiples of 8, above 32 those of 16, above 128 those of 32.
    """
    sizes, at = [1, 2, 4], 0
    for end, step in STEPS:
        sizes += range(at + step, min(end, most) + 1, step)
        at = end
    return (*(size for size in sizes if size < most), most)


def table_widths(width: int, block_size: int, contexts: Sequence[int] = CONTEXTS) -> tuple[int, ...]:
    """Blocks of the tables that graphs are recorded for: sorted, unique, and `width` is the largest."""
    return (*(w for w in (tokens // block_size for tokens in contexts) if 0 < w < width), width)


def bucket_of(size: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `size`. Raises `ValueError` if none does."""
    place = bisect_left(buckets, size)
    if size < 1 or place == len(buckets):
        raise ValueError(f"size={size}: must be in [1, {buckets[-1]}]")
    return buckets[place]
