"""Gathers scattered blocks into one contiguous buffer, and scatters them back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from distserve.transfer.chunks import Piece


class Pages(Protocol):
    """The KV cache of one rank: per local layer a K and a V tensor, blocks on axis 0, KV heads on
    `kv_head_axis`.
    """

    num_blocks: int
    kv_head_axis: int

    def pages(self, layer: int) -> tuple[Tensor, Tensor]: ...


class Packer:
    """Reads and writes pieces of one rank's pages; `first_layer` and `first_head` are the first ones it
    holds.
    """

    def __init__(self, cache: Pages, first_layer: int, first_head: int) -> None:
        self._cache = cache
        self._first_layer = first_layer
        self._first_head = first_head
        page = cache.pages(0)[0]
        self.device = page.device
        self.dtype = page.dtype
        self.unit = page[0].numel() // page.shape[cache.kv_head_axis]  # elements of one head of one block

    def pack(self, message: Sequence[Piece], blocks: Tensor, buffer: Tensor) -> Tensor:
        """Copies a message's blocks into the 1-D `buffer`; returns the part of it that was filled.

        `blocks`: int64 ids of the request's blocks, on the pages' device.
        """
        offset = 0
        for piece in message:
            pages = self._heads(piece)
            size = (piece.count, *pages.shape[1:])
            end = offset + piece.count * pages[0].numel()
            torch.index_select(pages, 0, _ids(piece, blocks), out=buffer[offset:end].view(size))
            offset = end
        return buffer[:offset]

    def unpack(self, message: Sequence[Piece], blocks: Tensor, buffer: Tensor) -> None:
        """The inverse of `pack`: writes the buffer's content into the request's blocks."""
        offset = 0
        for piece in message:
            pages = self._heads(piece)
            end = offset + piece.count * pages[0].numel()
            source = buffer[offset:end].view(piece.count, *pages.shape[1:])
            pages.index_copy_(0, _ids(piece, blocks), source)
            offset = end

    def _heads(self, piece: Piece) -> Tensor:
        pages = self._cache.pages(piece.layer - self._first_layer)[piece.part]
        return pages.narrow(self._cache.kv_head_axis, piece.heads.start - self._first_head, len(piece.heads))


def _ids(piece: Piece, blocks: Tensor) -> Tensor:
    return blocks[piece.first : piece.first + piece.count]
