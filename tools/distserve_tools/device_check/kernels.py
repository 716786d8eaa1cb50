"""Each kernel against its floor: the bytes or FLOPs that it cannot do without, at the device's ceilings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distserve.core.model_config import ModelConfig
from distserve.worker.device import parse_device
from distserve.worker.runner import TORCH_DTYPE
from distserve_kernels import ops, page_copy
from distserve_kernels.backend import AttentionBackend, PrefillMeta, choose_backend
from distserve_kernels.sampling import argmax
from distserve_tools.device_check import ceilings
from distserve_tools.device_check.settings import Settings
from distserve_tools.device_check.shapes import MODELS, model_config
from distserve_tools.device_check.stopwatch import Stopwatch

BLOCK = 16
ROWS = {"device": 8192, "small": 64}
CONTEXT = {"device": 4096, "small": 64}
BATCH = {"device": 64, "small": 2}
PROMPT = {"device": 8192, "small": 64}


@dataclass(frozen=True)
class Kernel:
    """`bytes`: read and written; `flops`: of its products. What takes longer at the ceilings is the floor."""

    name: str
    work: Callable[[], object]
    bytes: float
    flops: float = 0.0


def run(settings: Settings) -> dict[str, Any]:
    """A row per kernel: seconds, floor, and the share of the ceiling that it reaches."""
    device, dtype = parse_device(settings.device).torch_device, TORCH_DTYPE[settings.dtype]
    config = model_config(MODELS[settings.scale][-1])
    backend = choose_backend(device, dtype, config.head_dim, BLOCK)
    tiles = tuned(backend, config, dtype, device)
    backend = choose_backend(device, dtype, config.head_dim, BLOCK)  # with the tiles that were chosen
    bandwidth, rate = ceilings.read(settings)
    stopwatch = Stopwatch(device)
    rows = []
    for kernel in _kernels(settings, config, backend, dtype, device):
        seconds = stopwatch.seconds(kernel.work)
        floor = max(kernel.bytes / bandwidth, kernel.flops / rate)
        bound = "memory" if kernel.bytes / bandwidth >= kernel.flops / rate else "matrix"
        rows.append(
            {
                "kernel": kernel.name,
                "seconds": seconds,
                "floor_s": floor,
                "bound": bound,
                "share": floor / seconds,
            }
        )
    return {"attention": backend.name, "tiles": tiles, "rows": rows}


def tuned(
    backend: AttentionBackend, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> dict[str, str]:
    """Measures the attention tiles for these heads and keeps the best ones on disk; empty for an attention
    that has none.
    """
    if backend.name != "triton" or device.type != "cuda":
        return {}
    from distserve_kernels.triton_lang import tuning
    from distserve_kernels.triton_lang.backend import TritonBackend

    assert isinstance(backend, TritonBackend)
    shape = tuning.Shape(config.num_heads, config.num_kv_heads, config.head_dim, BLOCK, dtype)
    return {key: str(tile) for key, tile in tuning.tune(backend, shape, device).items()}


def _kernels(
    settings: Settings,
    config: ModelConfig,
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Kernel]:
    rows, size, hidden = ROWS[settings.scale], dtype.itemsize, config.hidden_size

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    x, residual, weight, bias = random(rows, hidden), random(rows, hidden), random(hidden), random(hidden)
    row = rows * hidden * size
    yield Kernel("RMSNorm", lambda: ops.rms_norm(x, weight, 1e-5), 2 * row)
    yield Kernel("residual + RMSNorm", lambda: ops.add_rms_norm(x, residual, weight, 1e-5), 4 * row)
    yield Kernel("LayerNorm", lambda: ops.layer_norm(x, weight, bias, 1e-5), 2 * row)
    yield Kernel("residual + LayerNorm", lambda: ops.add_layer_norm(x, residual, weight, bias, 1e-5), 4 * row)
    gate_up = random(rows, 2 * config.ffn_size)
    yield Kernel("SiLU x gate", lambda: ops.silu_mul(gate_up), 3 * rows * config.ffn_size * size)

    heads, kv, dim = config.num_heads, config.num_kv_heads, config.head_dim
    q, k, v = random(rows, heads, dim), random(rows, kv, dim), random(rows, kv, dim)
    cos, sin = (torch.rand(rows, dim // 2, device=device) for _ in range(2))
    blocks = rows // BLOCK
    keys, values = backend.allocate(blocks, BLOCK, kv, dim, dtype, device)
    slots = torch.randperm(rows, device=device)
    moved = rows * dim * size * (2 * heads + 2 * kv) + rows * dim * 4
    if backend.rotary_store is None:
        yield Kernel("rotary", lambda: ops.rotary(q, k, cos, sin), moved)
    else:
        fused = backend.rotary_store
        yield Kernel(
            "rotary + KV store",
            lambda: fused(q, k, v, cos, sin, keys, values, slots),
            moved + 3 * rows * kv * dim * size,
        )
    yield Kernel("KV store", lambda: backend.store(k, v, keys, values, slots), 4 * rows * kv * dim * size)
    if keys.shape == values.shape:
        pages = page_copy.PageSet.of([keys, values], backend.kv_head_axis)
        ids = torch.randperm(blocks, device=device)[: blocks // 2]
        buffer = torch.empty(keys[: len(ids)].numel() * 2, dtype=dtype, device=device)
        both, whole = range(2), range(kv)
        moved = 2 * buffer.numel() * size
        yield Kernel("KV pack", lambda: page_copy.pack(pages, both, ids, whole, buffer), moved)
        yield Kernel("KV unpack", lambda: page_copy.unpack(pages, both, ids, whole, buffer), moved)
    yield from _attention(settings, config, backend, dtype, device)
    logits = torch.randn(BATCH[settings.scale], config.vocab_size, device=device)
    yield Kernel("arg max", lambda: argmax(logits), logits.numel() * 4)


def _attention(
    settings: Settings,
    config: ModelConfig,
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Kernel]:
    heads, kv, dim, size = config.num_heads, config.num_kv_heads, config.head_dim, dtype.itemsize
    scale = dim**-0.5
    for batch, context in (
        (BATCH[settings.scale], CONTEXT[settings.scale]),
        (1, 8 * CONTEXT[settings.scale]),  # only split contexts fill the device
    ):
        width = context // BLOCK
        keys, values = backend.allocate(batch * width, BLOCK, kv, dim, dtype, device)
        keys.normal_()
        values.normal_()
        tables = torch.randperm(batch * width, device=device).to(torch.int32).view(batch, width)
        lens = torch.full((batch,), context, dtype=torch.int32, device=device)
        q = torch.randn((batch, heads, dim), device=device).to(dtype)
        moved = (2 * batch * context * kv + 2 * batch * heads) * dim * size
        yield Kernel(
            f"decode attention, {batch} x {context}",
            lambda: backend.decode(q, keys, values, tables, lens, scale),  # noqa: B023 - run before the next
            moved,
            4.0 * batch * context * heads * dim,
        )
    tokens = PROMPT[settings.scale]
    keys, values = backend.allocate(tokens // BLOCK, BLOCK, kv, dim, dtype, device)
    q, k, v = (torch.randn((tokens, n, dim), device=device).to(dtype) for n in (heads, kv, kv))
    backend.store(k, v, keys, values, torch.arange(tokens, device=device))
    meta = PrefillMeta.build([tokens], [0], [list(range(tokens // BLOCK))], device)
    yield Kernel(
        f"prefill attention, {tokens}",
        lambda: backend.prefill(q, k, v, keys, values, meta, scale),
        (2 * heads + 2 * kv) * tokens * dim * size,
        2.0 * tokens**2 * heads * dim,
    )
