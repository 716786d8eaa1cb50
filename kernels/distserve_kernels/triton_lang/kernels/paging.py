"""Where a token's K and V lie: shared by the attention kernels."""

import triton
import triton.language as tl


@triton.jit
def token_slots(table, tile_start, positions, live, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Slots (block * PAGE + offset) of the tokens at `positions`, the BLOCK_N ones from `tile_start`.

    `table` points to the sequence's block ids; only `live` positions have one. `tile_start` is a multiple
    of BLOCK_N: a tile that lies in one page needs one id. Slots are 32-bit (2^31 tokens fit no device);
    what is addressed by them is not.
    """
    if PAGE % BLOCK_N == 0:
        return tl.load(table + tile_start // PAGE) * PAGE + positions % PAGE
    return tl.load(table + positions // PAGE, mask=live, other=0) * PAGE + positions % PAGE


@triton.jit
def load_rows(
    base, offsets, columns, live, ALL_LIVE: tl.constexpr, COLUMNS: tl.constexpr, PADDED: tl.constexpr
):
    """A tile [rows, PADDED] of the rows at `base + offsets`; 0 where a row is not `live`, and as padding."""
    pointers = base + offsets[:, None] + columns[None, :]
    if COLUMNS != PADDED:
        inside = (columns < COLUMNS)[None, :]
        if ALL_LIVE:
            return tl.load(pointers, mask=inside, other=0.0)
        return tl.load(pointers, mask=live[:, None] & inside, other=0.0)
    if ALL_LIVE:
        return tl.load(pointers)
    return tl.load(pointers, mask=live[:, None], other=0.0)
