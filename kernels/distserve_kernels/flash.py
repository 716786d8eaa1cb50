"""Attention on NVIDIA GPUs by the flash-attn package (version 2; Dao, arXiv 2307.08691), where it is
installed.

Its paged kernels want blocks of a multiple of 256 tokens; with smaller ones this implementation declines
and says so.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from distserve_kernels.backend import PrefillMeta, RotaryStore
from distserve_kernels.layout import TOKENS

PAGE_MULTIPLE = 256


def unsupported(device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Why flash-attn can't serve these shapes here; None if it can."""
    if device.type != "cuda":
        return f"runs on cuda, not {device.type}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{dtype} is not float16 or bfloat16"
    if head_dim % 8 or head_dim > 256:
        return f"head_dim {head_dim} is no multiple of 8 up to 256"
    if block_size % PAGE_MULTIPLE:
        return f"block_size {block_size} is no multiple of {PAGE_MULTIPLE}"
    return "flash-attn is not installed" if _package() is None else None


def make(device: torch.device) -> FlashBackend:
    """Call only where `unsupported` gives None."""
    package = _package()
    if package is None:
        raise RuntimeError("flash-attn is not installed")
    return FlashBackend(package)


@lru_cache(maxsize=1)
def _package() -> ModuleType | None:
    """The package, or None where it is absent or does not load (built for another torch)."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        return importlib.import_module("flash_attn")
    except ImportError:
        return None


class FlashBackend:
    """`AttentionBackend` over `flash_attn_varlen_func` and `flash_attn_with_kvcache` with block tables."""

    name = "flash_attn"
    recordable = True
    whole_layers = False
    kv_head_axis = TOKENS.kv_head_axis

    def __init__(self, package: ModuleType) -> None:
        self._varlen = package.flash_attn_varlen_func
        self._with_cache = package.flash_attn_with_kvcache
        self.allocate = TOKENS.allocate
        self.store: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] = TOKENS.write
        self.rotary_store: RotaryStore | None = None
        if importlib.util.find_spec("triton") is not None:  # same pages: its kernels store in one pass
            from distserve_kernels.triton_lang import pages, rows

            self.store, self.rotary_store = pages.store, rows.rotary_store

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
        paged = any(meta.starts)  # whole prompts attend to k and v as they are
        contexts = [start + length for start, length in zip(meta.starts, meta.query_lens, strict=True)]
        cu_context = torch.nn.functional.pad(meta.context_lens.cumsum(0, dtype=torch.int32), (1, 0))
        out: Tensor = self._varlen(
            q,
            key_pages if paged else k,
            value_pages if paged else v,
            cu_seqlens_q=meta.cu_query,
            cu_seqlens_k=cu_context if paged else meta.cu_query,
            max_seqlen_q=max(meta.query_lens, default=0),
            max_seqlen_k=max(contexts, default=0),
            softmax_scale=scale,
            causal=True,
            window_size=_window(sliding_window),
            block_table=meta.block_tables if paged else None,
        )
        return out

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
        out: Tensor = self._with_cache(
            q.unsqueeze(1),
            key_pages,
            value_pages,
            cache_seqlens=context_lens,
            block_table=block_tables,
            softmax_scale=scale,
            causal=True,
            window_size=_window(sliding_window),
        )
        return out.squeeze(1)


def _window(sliding_window: int | None) -> tuple[int, int]:
    """flash-attn counts the positions before the query, without itself."""
    return (-1, -1) if sliding_window is None else (sliding_window - 1, 0)
