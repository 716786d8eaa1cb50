"""Runs one step of a model on one rank: flat tensors in, attention over the pages, tokens out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distserve.core.config import EngineConfig
from distserve.core.model_config import ModelConfig, resolve_model
from distserve.core.shapes import head_range, layer_range
from distserve.models.registry import load_model
from distserve.worker.device import parse_device
from distserve.worker.kv_cache import CacheShape, KVCache, free_bytes, pool_blocks
from distserve.worker.parallel import RankLinks
from distserve.worker.sampler import Sampler
from distserve.worker.step import StepInput, StepItem, StepOutput
from distserve_kernels.backend import AttentionBackend, PrefillMeta, choose_backend

logger = logging.getLogger(__name__)

Integers = npt.NDArray[np.int64]

TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class DecodeMeta:
    """One token per sequence: int32 block tables [n, width] and context lengths [n], the new token
    included.
    """

    block_tables: Tensor
    context_lens: Tensor


class PagedAttention:
    """The model's view of the cache for one step (`AttentionContext`): decode rows first, then prompts."""

    def __init__(
        self,
        backend: AttentionBackend,
        cache: KVCache,
        slots: Tensor,
        decode: DecodeMeta | None,
        prefill: PrefillMeta | None,
    ) -> None:
        self._backend = backend
        self._cache = cache
        self._slots = slots
        self._decode = decode
        self._prefill = prefill

    def run(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        keys, values = self._cache.pages(layer)
        self._backend.store(k, v, keys, values, self._slots)
        decode, prefill = self._decode, self._prefill
        if prefill is None:
            assert decode is not None
            tables, lens = decode.block_tables, decode.context_lens
            return self._backend.decode(q, keys, values, tables, lens, scale, sliding_window)
        if decode is None:
            return self._backend.prefill(q, k, v, keys, values, prefill, scale, sliding_window)
        n = decode.context_lens.shape[0]
        tables, lens = decode.block_tables, decode.context_lens
        first = self._backend.decode(q[:n], keys, values, tables, lens, scale, sliding_window)
        rest = self._backend.prefill(q[n:], k[n:], v[n:], keys, values, prefill, scale, sliding_window)
        return torch.cat((first, rest))


class StepTensors:
    """Turns the items of a step into tensors; buffers of decode rows are reused from step to step."""

    def __init__(self, max_batch: int, max_blocks: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._tables = np.zeros((max_batch, max_blocks), dtype=np.int32)

    def build(
        self, items: Sequence[StepItem]
    ) -> tuple[Tensor, Tensor, Tensor, DecodeMeta | None, PrefillMeta | None]:
        """Token ids, positions and slots (int64 [T]) of the items, which must have decode items first."""
        decodes = sum(1 for item in items if len(item.tokens) == 1)
        ids: list[int] = []
        positions: list[int] = []
        for item in items:
            ids += item.tokens
            positions += range(item.start, item.start + len(item.tokens))
        place = np.array(positions, dtype=np.int64)
        slots = np.empty_like(place)
        decode = self._decode_rows(items[:decodes], place[:decodes], slots[:decodes]) if decodes else None
        prefill = None
        if decodes < len(items):
            prompts = items[decodes:]
            self._prompt_slots(prompts, place[decodes:], slots[decodes:])
            prefill = PrefillMeta.build(
                [len(item.tokens) for item in prompts],
                [item.start for item in prompts],
                [item.block_table for item in prompts],
                self._device,
            )
        inputs = torch.tensor(ids, dtype=torch.int64)
        tensors = (inputs, torch.from_numpy(place), torch.from_numpy(slots))
        on_device = tuple(t.to(self._device, non_blocking=True) for t in tensors)
        return (*on_device, decode, prefill)  # type: ignore[return-value]

    def _decode_rows(self, items: Sequence[StepItem], positions: Integers, slots: Integers) -> DecodeMeta:
        """Fills `slots` and returns tables and lengths of single-token items."""
        n, size = len(items), self._block_size
        if n > self._tables.shape[0]:
            self._tables = np.zeros((2 * n, self._tables.shape[1]), dtype=np.int32)
        width = max(len(item.block_table) for item in items)
        if width > self._tables.shape[1]:
            self._tables = np.zeros((self._tables.shape[0], 2 * width), dtype=np.int32)
        tables = self._tables[:n]
        for row, item in zip(tables, items, strict=True):
            row[: len(item.block_table)] = item.block_table
        blocks = tables[np.arange(n), positions // size]
        np.add(blocks.astype(np.int64) * size, positions % size, out=slots)
        lens = torch.from_numpy((positions + 1).astype(np.int32))
        rows = torch.from_numpy(tables)[:, :width] if self._device.type == "cpu" else torch.from_numpy(tables)
        return DecodeMeta(rows.to(self._device, non_blocking=True), lens.to(self._device, non_blocking=True))

    def _prompt_slots(self, items: Sequence[StepItem], positions: Integers, slots: Integers) -> None:
        row = 0
        for item in items:
            rows = slice(row, row + len(item.tokens))
            table = np.array(item.block_table, dtype=np.int64)
            at = positions[rows]
            slots[rows] = table[at // self._block_size] * self._block_size + at % self._block_size
            row = rows.stop


class ModelRunner:
    """Model, KV cache and sampler of one rank. Not thread-safe.

    Loads the weights; raises `ConfigError` for degrees of parallelism that the model does not allow. The pool
    comes with `allocate`, once all ranks know how many blocks each of them can have.
    """

    kv_cache: KVCache

    def __init__(self, config: EngineConfig, model: ModelConfig, links: RankLinks | None = None) -> None:
        self._links = links = links or RankLinks()
        self._config = config
        self._hidden_size = model.hidden_size
        self.device = parse_device(config.devices[links.rank]).torch_device
        self._dtype = dtype = TORCH_DTYPE[config.dtype]
        layers = layer_range(model.num_layers, config.pp, links.stage)
        self._model = load_model(resolve_model(config.model), links.group, layers, dtype, self.device)
        self._backend = choose_backend(
            self.device, dtype, model.head_dim, config.block_size, config.attention_backend
        )
        heads = len(head_range(model.num_kv_heads, links.group.size, links.group.rank))
        self._shape = CacheShape(len(layers), heads, model.head_dim, config.block_size, dtype)
        self._context = config.max_context or model.max_context
        per_sequence = -(-self._context // config.block_size)
        self._tensors = StepTensors(config.max_batch_size, per_sequence, config.block_size, self.device)
        self._sampler = Sampler(model.vocab_size, self.device)

    def affordable_blocks(self, sharers: int = 1) -> int:
        """Blocks that this rank can have, `sharers` ranks of the instance taking equal parts of the memory
        that is free now. Raises `ConfigError`.
        """
        free = free_bytes(self.device) // sharers
        return pool_blocks(self._config, self._shape.block_bytes, self._context, self.device, free)

    def allocate(self, blocks: int) -> None:
        """Makes the pool."""
        self.kv_cache = KVCache(self._backend, self._shape, blocks, self.device)
        logger.info(
            "%s: %d blocks of %d tokens, %.1f MB of KV cache",
            self._config.instance,
            blocks,
            self._config.block_size,
            self.kv_cache.bytes / 1e6,
        )

    @property
    def attention_name(self) -> str:
        return self._backend.name

    @torch.inference_mode()
    def execute(self, step: StepInput) -> StepOutput | None:
        """Computes the step and samples where asked; None on a rank that does not sample.

        Raises `KeyError` for a sequence that has not joined, `RankLost` if a rank that this one waits for is
        lost.
        """
        links = self._links
        if links.samples:
            for key in step.leaving:
                self._sampler.leave(key)
            for joining in step.joining:
                self._sampler.join(joining)
        items = step.items
        if not items:
            return StepOutput([], []) if links.samples else None
        order = None
        if any(len(item.tokens) > 1 for item in items):
            order = sorted(range(len(items)), key=lambda i: len(items[i].tokens) > 1)
            items = [items[i] for i in order]
        chosen = [i for i, item in enumerate(items) if item.sample]
        rows = None
        if links.pipe_out is None and (len(chosen) < len(items) or order is not None):
            last = np.cumsum([len(item.tokens) for item in items]) - 1
            if order is not None:
                chosen.sort(key=order.__getitem__)
            rows = torch.from_numpy(last[chosen]).to(self.device)
        inputs, positions, slots, decode, prefill = self._tensors.build(items)
        if links.pipe_in is not None:
            inputs = torch.empty((len(positions), self._hidden_size), dtype=self._dtype, device=self.device)
            links.pipe_in.receive(inputs)
        attention = PagedAttention(self._backend, self.kv_cache, slots, decode, prefill)
        hidden = self._model.forward(inputs, positions, attention, rows)
        if links.pipe_out is not None:
            links.pipe_out.send(hidden)
            return None
        return self._choose(hidden, [items[i] for i in chosen])

    def _choose(self, hidden: Tensor, items: Sequence[StepItem]) -> StepOutput | None:
        """Samples the next token of each item from its row of `hidden`. All ranks of the stage come here."""
        if not items:
            return StepOutput([], []) if self._links.samples else None
        logits = self._model.logits(hidden)
        if not self._links.samples:
            return None
        places = [item.start + len(item.tokens) for item in items]
        return StepOutput(*self._sampler.sample(logits, [item.key for item in items], places))
