"""The attention interface and the one place where its implementation is chosen.

An implementation lives in a module of its own that offers two functions,
`unsupported(device, dtype, head_dim, block_size) -> str | None` (the reason why it can't serve, None if it
can) and `make(device) -> AttentionBackend`. `PROVIDERS` names these modules in order of preference; they
are imported only when their turn comes, so that nothing about CUDA, a compiler or an optional package is
assumed at import.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from distserve_kernels.transit import upload

logger = logging.getLogger(__name__)

PROVIDERS: Mapping[str, str] = {
    "flash_attn": "distserve_kernels.flash",
    "triton": "distserve_kernels.triton_lang.backend",
    "c": "distserve_kernels.cpu",
    "sdpa": "distserve_kernels.sdpa",
    "reference": "distserve_kernels.reference",
}
_AUTOMATIC: Mapping[str, tuple[str, ...]] = {"cuda": ("flash_attn", "triton", "sdpa"), "cpu": ("c", "sdpa")}


@dataclass(frozen=True, slots=True)
class PrefillMeta:
    """A ragged batch of prompts or prompt chunks; sequence i has rows [cu_query[i], cu_query[i + 1]) of q,
    k, v.

    Query j of sequence i sits at position starts[i] + j and attends to positions 0 .. starts[i] + j. Host
    lists for implementations that loop, device tensors (int32) for kernels that take the batch at once.
    """

    query_lens: tuple[int, ...]
    starts: tuple[int, ...]
    block_tables: Tensor  # [n, max_blocks]; padded with 0
    cu_query: Tensor  # [n + 1]
    context_lens: Tensor  # [n]: starts + query_lens

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        starts: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        device: torch.device,
    ) -> PrefillMeta:
        """From host lists; `block_tables` may be ragged."""
        cu = [0]
        for n in query_lens:
            cu.append(cu[-1] + n)
        context = [s + n for s, n in zip(starts, query_lens, strict=True)]
        return cls(
            tuple(query_lens),
            tuple(starts),
            pad_tables(block_tables, device),
            upload(torch.tensor(cu, dtype=torch.int32), device),
            upload(torch.tensor(context, dtype=torch.int32), device),
        )


def pad_tables(block_tables: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Ragged lists of block ids as one int32 tensor [n, longest], padded with 0."""
    width = max((len(t) for t in block_tables), default=0)
    rows = [[*table, *([0] * (width - len(table)))] for table in block_tables]
    return upload(torch.tensor(rows, dtype=torch.int32).reshape(len(rows), width), device)


class RotaryStore(Protocol):
    """Rotates q and k in place, and stores k and v."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        key_pages: Tensor,
        value_pages: Tensor,
        slots: Tensor,
    ) -> None: ...


class AttentionBackend(Protocol):
    """Paged attention of one layer. All tensors on one device; q, k, v may have a row stride, pages are
    contiguous.

    `sliding_window` w: a query at position p attends to positions p - w + 1 .. p only (None: to all before
    it).
    """

    @property
    def name(self) -> str: ...

    @property
    def kv_head_axis(self) -> int:
        """Axis of the KV heads in the page tensors; the block axis is 0."""
        ...

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> tuple[Tensor, Tensor]:
        """Zeroed K and V pages of one layer, in this implementation's layout."""
        ...

    @property
    def recordable(self) -> bool:
        """Do `store` and `decode` read nothing back to the host, as a CUDA graph needs it?"""
        ...

    @property
    def whole_layers(self) -> bool:
        """Can `decoder.Decoder` work on these pages?"""
        ...

    @property
    def rotary_store(self) -> RotaryStore | None:
        """`ops.rotary` of q and k, and `store`, in one pass over memory; None where there is none."""
        ...

    def store(self, k: Tensor, v: Tensor, key_pages: Tensor, value_pages: Tensor, slots: Tensor) -> None:
        """Write k, v [T, kv_heads, D] to slots int64 [T] = block * block_size + offset; negative slots are
        skipped.
        """
        ...

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
        """Causal attention of q [T, q_heads, D] to its own k, v [T, kv_heads, D] and to earlier pages.

        The new k, v must have been stored already. Returns [T, q_heads, D], contiguous.
        """
        ...

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
        """One query per sequence: q [B, q_heads, D], block_tables int32 [B, max_blocks], context_lens int32
        [B].

        A context length counts the current token, whose k, v must have been stored. A length of 0 (padding)
        gives zeros. Returns [B, q_heads, D], contiguous.
        """
        ...


def choose_backend(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    force: str | None = None,
) -> AttentionBackend:
    """The first implementation that can serve these shapes on this device, or the forced one.

    Raises `ValueError` if `force` is no known name or can't serve; the message says why.
    """
    device = torch.device(device)
    if force is not None and force not in PROVIDERS:
        raise ValueError(f"attention_backend={force!r}: must be one of {', '.join(PROVIDERS)}")
    skipped: list[str] = []
    for name in (force,) if force else _AUTOMATIC.get(device.type, ("sdpa",)):
        module = _provider(name)
        reason = (
            "not installed" if module is None else module.unsupported(device, dtype, head_dim, block_size)
        )
        if module is not None and reason is None:
            backend: AttentionBackend = module.make(device)
            note = f" ({'; '.join(skipped)})" if skipped else ""
            logger.info("attention on %s, %s: %s%s", device, dtype, backend.name, note)
            return backend
        skipped.append(f"{name}: {reason}")
    raise ValueError(f"attention_backend={force!r} can't serve: {'; '.join(skipped)}")


def _provider(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(PROVIDERS[name])
    except ModuleNotFoundError:
        return None
