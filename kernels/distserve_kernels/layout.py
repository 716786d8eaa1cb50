"""How K and V of one layer lie in the pages of the cache.

Two layouts, block axis 0 in both:
- `TRANSPOSED` (CPU): K [num_blocks, kv_heads, head_dim, block_size], V [num_blocks, kv_heads, block_size,
  head_dim].
  A vector register then holds one K channel of 16 consecutive tokens, so that scores need no horizontal sums.
- `TOKENS` (CUDA; flash-attn's and the Triton kernels'): K and V [num_blocks, block_size, kv_heads, head_dim].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distserve_kernels import memory


@dataclass(frozen=True)
class PageLayout:
    """Axis order of the pages; `kv_head_axis` is the same in K and V."""

    name: str
    kv_head_axis: int
    transposed: bool

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """Zeroed K and V pages."""
        if self.transposed:
            key_shape = (num_blocks, kv_heads, head_dim, block_size)
            value_shape = (num_blocks, kv_heads, block_size, head_dim)
        else:
            key_shape = value_shape = (num_blocks, block_size, kv_heads, head_dim)
        if device.type == "cpu":
            return memory.zeros(key_shape, dtype), memory.zeros(value_shape, dtype)
        return (
            torch.zeros(key_shape, dtype=dtype, device=device),
            torch.zeros(value_shape, dtype=dtype, device=device),
        )

    def block_size(self, value_pages: Tensor) -> int:
        """Tokens per block, read off a V page tensor."""
        return int(value_pages.shape[2 if self.transposed else 1])

    def write(self, k: Tensor, v: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
        """Scatter k, v [T, kv_heads, D] to slots [T] (block * block_size + offset; negative: not stored)."""
        if slots.is_cpu:
            kept = slots >= 0
            k, v, slots = k[kept], v[kept], slots[kept]
        else:
            k, v, slots = fold_padding(k, v, slots)
        size = self.block_size(value_pages)
        block, offset = slots // size, slots % size
        if self.transposed:
            key_pages[block, :, :, offset] = k
            value_pages[block, :, offset] = v
        else:
            key_pages[block, offset] = k
            value_pages[block, offset] = v

    def read(self, key_pages: Tensor, value_pages: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of whole blocks [..., n] as [..., n * block_size, kv_heads, D]."""
        if self.transposed:
            k = key_pages[blocks].movedim(-1, -3)  # [..., n, block_size, kv_heads, D]
            v = value_pages[blocks].transpose(-3, -2)
        else:
            k, v = key_pages[blocks], value_pages[blocks]
        dims = blocks.dim()
        return k.flatten(dims - 1, dims), v.flatten(dims - 1, dims)


TRANSPOSED = PageLayout("transposed", kv_head_axis=1, transposed=True)
TOKENS = PageLayout("tokens", kv_head_axis=2, transposed=False)


def fold_padding(k: Tensor, v: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lets rows with a negative slot repeat the row of the highest one: equal writes to one place.

    Unlike filtering it reads no count back to the host, which stalls a GPU and is not allowed in a graph. At
    least one slot must be real.
    """
    best, real = slots.argmax(), slots >= 0
    rows = real.view(-1, 1, 1)
    return torch.where(rows, k, k[best]), torch.where(rows, v, v[best]), torch.where(real, slots, slots[best])


def default_layout(device: torch.device) -> PageLayout:
    """The layout of a device's own kernels; the torch implementations follow it."""
    return TRANSPOSED if device.type == "cpu" else TOKENS
