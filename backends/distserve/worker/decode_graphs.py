"""Decode steps over static buffers, one recorded graph per batch size and longest context.

A step uploads two small arrays (tokens and positions; what is new of the block tables), replays a graph, and
leaves the hidden states of its sequences. The tokens sampled from them stay on the device for the next step,
which can begin before the host has read them.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from distserve.worker.buckets import CONTEXTS, batch_buckets, bucket_of, table_widths
from distserve.worker.decode_rows import DecodeRows
from distserve.worker.graphs import Recorder, Work
from distserve.worker.step import StepItem
from distserve_kernels.transit import upload, upload_into

logger = logging.getLogger(__name__)

DecodeBody = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(ids, positions, slots int64 [b], block tables int32 [b, w], context lengths int32 [b]) -> hidden
states [b, hidden_size]. In rows without a sequence position 0, slot -1, length 0.
"""


class DecodeGraphs:
    """`most`: sequences of the largest step; `width`: blocks of the longest one; `hidden`: their states'
    size.
    """

    def __init__(
        self,
        body: DecodeBody,
        most: int,
        width: int,
        block_size: int,
        hidden: int,
        dtype: torch.dtype,
        device: torch.device,
        contexts: Sequence[int] = CONTEXTS,
    ) -> None:
        self.buckets = batch_buckets(most)
        self._widths = table_widths(width, block_size, contexts)
        self._body = body
        self._block_size = block_size
        self._device = device
        self._rows = DecodeRows(width)
        self._inputs = torch.zeros(3 * most, dtype=torch.int64, device=device)
        self._tables = torch.zeros((most, width), dtype=torch.int32, device=device)
        self._sampled = torch.zeros(most, dtype=torch.int64, device=device)
        self._hidden = torch.zeros((most, hidden), dtype=dtype, device=device)
        self._recorder = Recorder(device)
        self._replays: dict[tuple[int, int], Work] = {}  # by bucket and width of the tables
        self._at: Tensor | None = None  # rows of the step in progress, None: the first ones, in order

    @torch.inference_mode()
    def record(self, buckets: Sequence[int] | None = None) -> None:
        """Records the graphs of all batch sizes, or of some."""
        began = time.monotonic()
        sizes = itertools.product(self.buckets if buckets is None else buckets, self._widths)
        for bucket, width in sorted(sizes, reverse=True):  # later ones fit into the first one's memory
            self._leave_empty(bucket)
            self._replays[bucket, width] = self._recorder.record(partial(self._step, bucket, width))
        logger.info("%d decode graphs in %.1f s", len(self._replays), time.monotonic() - began)

    @torch.inference_mode()
    def rehearse(self, buckets: Sequence[int]) -> None:
        """Records these and runs each once, which is when the driver takes the rest of its memory."""
        self.record(buckets)
        for bucket, width in itertools.product(buckets, self._widths):
            self._leave_empty(bucket)
            self._replays[bucket, width]()

    def serves(self, items: Sequence[StepItem]) -> bool:
        """Is this a decode step of a recorded size? One token of a prompt that goes on samples nothing."""
        decodes = all(len(item.tokens) == 1 and item.sample for item in items)
        return decodes and len(items) <= self.buckets[-1]

    def run(self, items: Sequence[StepItem]) -> Tensor:
        """Hidden states [n, hidden_size] of the items' tokens, in their order. No wait for the device."""
        bucket = bucket_of(len(items), self.buckets)
        try:
            step = self._rows.seat(items, bucket)
            upload_into(self._inputs[: 3 * bucket], step.inputs.reshape(-1))
            if step.places.shape[1]:
                places, blocks = upload(step.places, self._device)
                self._tables.view(-1).index_copy_(0, places, blocks.int())
            longest = int(step.inputs[1].max()) // self._block_size + 1
            self._replays[bucket, bucket_of(longest, self._widths)]()
            ordered = all(row == place for place, row in enumerate(step.rows.tolist()))
            self._at = None if ordered else upload(step.rows, self._device)
            n = len(items)
            return self._hidden[:n] if self._at is None else self._hidden[self._at]
        except BaseException:
            self._rows.forget()
            raise

    def take_sampled(self, tokens: Tensor) -> None:
        """The tokens of the items of the last `run`, on the device, for the step after it."""
        if self._at is None:
            self._sampled[: len(tokens)] = tokens
        else:
            self._sampled[self._at] = tokens

    def _leave_empty(self, bucket: int) -> None:
        """The next run is of no sequence."""
        given = self._inputs[: 3 * bucket].view(3, bucket)
        given[0] = 0
        given[1:] = -1

    def _step(self, bucket: int, width: int) -> None:
        given, positions, source = self._inputs[: 3 * bucket].view(3, bucket)
        tables, size = self._tables[:bucket, :width], self._block_size
        ids = torch.where(source >= 0, self._sampled[source.clamp(min=0)], given)
        place = positions.clamp(min=0)
        block = tables.gather(1, (place // size).unsqueeze(1)).squeeze(1)
        slots = (block * size + place % size).masked_fill_(positions < 0, -1)
        lens = (positions + 1).int()
        self._hidden[:bucket] = self._body(ids, place, slots, tables, lens)
