"""Measures the tiles of the attention kernels on this GPU and keeps the fastest ones on disk.

Run once per GPU model and model shape, on an idle device (seconds per case). A backend made afterwards, in
any process of this user, launches with the winners. Serving never measures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.testing
from torch import Tensor

from distserve_kernels.backend import PrefillMeta
from distserve_kernels.triton_lang.backend import TritonBackend
from distserve_kernels.triton_lang.decode import head_blocks, paged_decode
from distserve_kernels.triton_lang.launch import ceil_div
from distserve_kernels.triton_lang.prefill import paged_prefill
from distserve_kernels.triton_lang.splits import count_splits
from distserve_kernels.triton_lang.tiles import Case, Tile

logger = logging.getLogger(__name__)

Stopwatch = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class Shape:
    """Heads of one rank, and the load that is measured: a decode batch and a prompt."""

    q_heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    batch: int = 32
    context: int = 2048
    prompt: int = 2048


def fastest(tiles: Sequence[Tile], seconds: Callable[[Tile], float]) -> Tile:
    """The tile that takes least; one that does not fit the device is passed over.

    Raises `RuntimeError` if none fits.
    """
    taken: dict[Tile, float] = {}
    for tile in tiles:
        try:
            taken[tile] = seconds(tile)
        except triton.runtime.errors.OutOfResources as error:
            logger.warning("%s: %s", tile, error)
    if not taken:
        raise RuntimeError(f"none of {len(tiles)} tiles fits this device")
    return min(taken, key=taken.__getitem__)


def tune(
    backend: TritonBackend,
    shape: Shape,
    device: torch.device,
    stopwatch: Stopwatch = triton.testing.do_bench,
) -> dict[str, Tile]:
    """Measures decode and prefill of a shape and stores the winners; returns them by the case's key."""
    chosen: dict[str, Tile] = {}
    for kernel, run in (("decode", _decode), ("prefill", _prefill)):
        case = Case(kernel, shape.dtype, shape.head_dim, shape.block_size, shape.q_heads // shape.kv_heads)
        launch = run(backend, shape, device)

        def seconds(tile: Tile, launch: Callable[[Tile], Tensor] = launch) -> float:
            return stopwatch(lambda: launch(tile))

        tile = fastest(backend.table.candidates(case, backend.chip.sm), seconds)
        backend.measured.put(case, tile)
        chosen[case.key] = tile
        logger.info("%s on %s: %s", case.key, backend.chip.name, tile)
    return chosen


def _decode(backend: TritonBackend, shape: Shape, device: torch.device) -> Callable[[Tile], Tensor]:
    q = _random(shape.batch, shape.q_heads, shape, device)
    keys, values, tables = _pages(backend, shape, shape.batch, shape.context, device)
    lens = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=device)
    programs = shape.batch * shape.kv_heads * head_blocks(shape.q_heads // shape.kv_heads)
    splits = count_splits(programs, backend.chip.multiprocessors, shape.context)
    scale = shape.head_dim**-0.5
    return lambda tile: paged_decode(q, keys, values, tables, lens, scale, None, tile, splits)


def _prefill(backend: TritonBackend, shape: Shape, device: torch.device) -> Callable[[Tile], Tensor]:
    q = _random(shape.prompt, shape.q_heads, shape, device)
    keys, values, tables = _pages(backend, shape, 1, shape.prompt, device)
    meta = PrefillMeta.build([shape.prompt], [0], tables.tolist(), device)
    return lambda tile: paged_prefill(q, keys, values, meta, shape.head_dim**-0.5, None, tile)


def _random(rows: int, heads: int, shape: Shape, device: torch.device) -> Tensor:
    return torch.randn((rows, heads, shape.head_dim), device=device).to(shape.dtype)


def _pages(
    backend: TritonBackend, shape: Shape, sequences: int, tokens: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """K and V pages, and tables whose blocks are scattered, as in a pool that has been used."""
    width = ceil_div(tokens, shape.block_size)
    blocks = sequences * width
    keys, values = backend.allocate(
        blocks, shape.block_size, shape.kv_heads, shape.head_dim, shape.dtype, device
    )
    keys.normal_()
    values.normal_()
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))
    return keys, values, order.to(torch.int32).view(sequences, width).to(device)
