"""The pages of one rank's layers, and how many of them fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from distserve.core.config import EngineConfig
from distserve.core.parsing import ConfigError
from distserve_kernels.backend import AttentionBackend

CPU_SHARE = 0.5  # of the free memory, where neither num_blocks nor kv_bytes is given


@dataclass(frozen=True)
class CacheShape:
    """What one rank stores: its layers, its KV heads."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.block_size * self.dtype.itemsize


class KVCache:
    """K and V pages of every local layer; block axis 0, KV heads at `kv_head_axis`."""

    def __init__(
        self, backend: AttentionBackend, shape: CacheShape, num_blocks: int, device: torch.device
    ) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.kv_head_axis = backend.kv_head_axis
        size = (num_blocks, shape.block_size, shape.kv_heads, shape.head_dim)
        self._pages = [backend.allocate(*size, shape.dtype, device) for _ in range(shape.layers)]
        addresses = [[page.data_ptr() for page in pair] for pair in self._pages]
        self.addresses = torch.tensor(addresses, dtype=torch.int64)  # [layers, 2]: of K and V pages

    @property
    def num_layers(self) -> int:
        return self.shape.layers

    @property
    def bytes(self) -> int:
        return self.num_blocks * self.shape.block_bytes

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V pages of a local layer (counted from 0 on this rank)."""
        return self._pages[layer]


def pool_blocks(
    config: EngineConfig, block_bytes: int, max_context: int, device: torch.device, free: int
) -> int:
    """Number of blocks of the pool, on a device with `free` bytes left for it.

    `num_blocks`, or what fits into `kv_bytes`; with neither, all of it on a GPU, where the caller has
    measured what else is needed, and a share on a CPU, which others use as well; but no more than
    `max_batch_size` sequences of `max_context` tokens can use. Raises `ConfigError` for a pool that does
    not fit or has no block.
    """
    if config.num_blocks is not None:
        blocks, field = config.num_blocks, f"num_blocks={config.num_blocks}"
    elif config.kv_bytes is not None:
        blocks, field = config.kv_bytes // block_bytes, f"kv_bytes={config.kv_bytes}"
    else:
        share = CPU_SHARE if device.type == "cpu" else 1.0
        useful = config.max_batch_size * -(-max_context // config.block_size)
        blocks, field = min(useful, int(free * share) // block_bytes), "num_blocks and kv_bytes unset"
    if blocks < 1:
        raise ConfigError(f"{field}: not one block of {block_bytes} bytes ({free} bytes are free)")
    if blocks * block_bytes > free:
        raise ConfigError(
            f"{field}: needs {blocks * block_bytes} bytes, {free} are free; "
            f"allowed: num_blocks up to {free // block_bytes}"
        )
    return blocks


def free_bytes(device: torch.device) -> int:
    """Memory that can be had now: of the GPU, or of the host within its control group's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = [_meminfo_available()]
    limit, used = (_number_in(Path("/sys/fs/cgroup") / name) for name in ("memory.max", "memory.current"))
    if limit is not None and used is not None:
        free.append(max(0, limit - used))
    return min(free)


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo: no MemAvailable; set num_blocks")


def _number_in(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
