"""The attention backend of the Triton-language kernels."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from distserve_kernels.backend import PrefillMeta, RotaryStore
from distserve_kernels.layout import TOKENS
from distserve_kernels.triton_lang import pages
from distserve_kernels.triton_lang.decode import head_blocks, paged_decode
from distserve_kernels.triton_lang.prefill import paged_prefill
from distserve_kernels.triton_lang.rows import rotary_store
from distserve_kernels.triton_lang.splits import count_splits
from distserve_kernels.triton_lang.tiles import Case, Chip, MeasuredTiles, Tile, TileTable, cache_folder

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST_SM = 80  # asynchronous copies, bf16 and tf32 products


def unsupported(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Why these kernels can't serve these shapes on this device; None if they can."""
    if device.type != "cuda":
        return f"runs on cuda, not {device.type}"
    if dtype not in DTYPES:
        return f"{dtype} is not float32, bfloat16 or float16"
    if head_dim % 16:
        return f"head_dim {head_dim} is no multiple of 16"
    most = TileTable.shipped().largest_head_dim
    if head_dim > most:
        return f"head_dim {head_dim} is above {most}"
    sm = Chip.of(device).sm
    if sm < LEAST_SM:
        return f"compute capability {sm / 10} is below {LEAST_SM / 10}"
    return None


def make(device: torch.device) -> TritonBackend:
    """Call only where `unsupported` gives None."""
    return TritonBackend(Chip.of(device), cache_folder())


class TritonBackend:
    """`AttentionBackend` over pages in the layout `TOKENS`.

    Tiles come from the table, or from a measurement if there is one on disk (`tuning` makes
    them; nothing is measured while serving).
    """

    name = "triton"
    recordable = True
    whole_layers = False
    kv_head_axis = TOKENS.kv_head_axis

    def __init__(self, chip: Chip, measurements: Path) -> None:
        self.chip = chip
        self.table = TileTable.shipped()
        self.measured = MeasuredTiles(measurements, chip)
        self.allocate = TOKENS.allocate
        self.store = pages.store
        self.rotary_store: RotaryStore | None = rotary_store

    def tile(self, case: Case) -> Tile:
        """The tile that a launch of this case uses."""
        return self.measured.get(case) or self.table.candidates(case, self.chip.sm)[0]

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        meta: PrefillMeta,
        scale: float,
        sliding_window: int | None = None,
    ) -> Tensor:
        tile = self.tile(attention_case("prefill", q, key_pages))
        return paged_prefill(q, key_pages, value_pages, meta, scale, sliding_window, tile)

    def decode(
        self,
        q: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        scale: float,
        sliding_window: int | None = None,
    ) -> Tensor:
        case = attention_case("decode", q, key_pages)
        tile = self.tile(case)
        page, kv_heads = key_pages.shape[1:3]
        longest = block_tables.shape[1] * page
        if sliding_window is not None:
            longest = min(longest, sliding_window + tile.n)
        programs = q.shape[0] * kv_heads * head_blocks(case.group)
        splits = count_splits(programs, self.chip.multiprocessors, longest)
        return paged_decode(
            q, key_pages, value_pages, block_tables, context_lens, scale, sliding_window, tile, splits
        )


def attention_case(kernel: str, q: Tensor, key_pages: Tensor) -> Case:
    """What the tile of a launch depends on."""
    page, kv_heads = key_pages.shape[1:3]
    return Case(kernel, q.dtype, q.shape[2], page, q.shape[1] // kv_heads)
