"""Into how many parts the contexts of a decode step are cut. Pure arithmetic."""

from __future__ import annotations

from distserve_kernels.triton_lang.launch import ceil_div

MIN_SPLIT = 256  # tokens: less is read faster than another part is started and added up
MAX_SPLIT = 4096  # tokens: one long context in a full batch must not be read by one program from end to end
PROGRAMS_PER_MULTIPROCESSOR = 2  # that many tiles in flight saturate the memory
MOST_SPLITS = 128


def count_splits(programs: int, multiprocessors: int, max_context: int) -> int:
    """Splits per sequence, at least 1.

    `programs`: programs of one split (sequences x KV heads); `max_context`: tokens that the longest
    sequence can have (the width of the block tables, so that a captured launch stays right when contexts
    grow).
    """
    filling = ceil_div(PROGRAMS_PER_MULTIPROCESSOR * multiprocessors, max(1, programs))
    wanted = max(filling, ceil_div(max_context, MAX_SPLIT))
    return max(1, min(wanted, max_context // MIN_SPLIT, MOST_SPLITS))
