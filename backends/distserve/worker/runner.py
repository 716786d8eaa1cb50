"""Runs one step of a model on one rank: flat tensors in, attention over the pages, tokens out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from distserve.core.config import EngineConfig
from distserve.core.model_config import ModelConfig, resolve_model
from distserve.core.parsing import ConfigError
from distserve.core.shapes import head_range, layer_range
from distserve.models.registry import build_model, load_model
from distserve.models.weights import WeightSource
from distserve.worker import footprint
from distserve.worker.decode_graphs import DecodeGraphs
from distserve.worker.device import parse_device
from distserve.worker.kv_cache import CacheShape, KVCache, free_bytes, pool_blocks
from distserve.worker.parallel import RankLinks
from distserve.worker.running import RunningStep
from distserve.worker.sampler import Choice, Sampler
from distserve.worker.step import StepInput, StepItem, StepOutput
from distserve_kernels import memory, ops
from distserve_kernels.backend import AttentionBackend, PrefillMeta, choose_backend
from distserve_kernels.decoder import DecodeRows
from distserve_kernels.transit import upload

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
GRAPHS_TRIED = 8  # batch sizes, to see what their graphs take: the driver gives memory in large pieces
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
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        backend = self._backend
        keys, values = self._cache.pages(layer)
        if rotation is not None and backend.rotary_store is not None:
            backend.rotary_store(q, k, v, *rotation, keys, values, self._slots)
        else:
            if rotation is not None:
                ops.rotary(q, k, *rotation)
            backend.store(k, v, keys, values, self._slots)
        decode, prefill = self._decode, self._prefill
        if prefill is None:
            assert decode is not None
            tables, lens = decode.block_tables, decode.context_lens
            return backend.decode(q, keys, values, tables, lens, scale, sliding_window)
        if decode is None:
            return backend.prefill(q, k, v, keys, values, prefill, scale, sliding_window)
        n = decode.context_lens.shape[0]
        tables, lens = decode.block_tables, decode.context_lens
        first = backend.decode(q[:n], keys, values, tables, lens, scale, sliding_window)
        rest = backend.prefill(q[n:], k[n:], v[n:], keys, values, prefill, scale, sliding_window)
        return torch.cat((first, rest))

    def decode_rows(self) -> DecodeRows | None:
        decode = self._decode
        if decode is None or self._prefill is not None or not self._backend.whole_layers:
            return None
        cache, tables, lens = self._cache, decode.block_tables, decode.context_lens
        return DecodeRows(self._slots, tables, lens, cache.addresses, cache.shape.block_size)


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
        inputs = np.array(ids, dtype=np.int64)
        on_device = (upload(array, self._device) for array in (inputs, place, slots))
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
        lens = upload((positions + 1).astype(np.int32), self._device)
        rows = torch.from_numpy(tables)[:, :width]
        if self._device.type != "cpu":
            rows = rows.contiguous()  # as wide as needed: attention is launched for the longest context
        return DecodeMeta(upload(rows, self._device), lens)

    def _prompt_slots(self, items: Sequence[StepItem], positions: Integers, slots: Integers) -> None:
        row = 0
        for item in items:
            rows = slice(row, row + len(item.tokens))
            table = np.array(item.block_table, dtype=np.int64)
            at = positions[rows]
            slots[rows] = table[at // self._block_size] * self._block_size + at % self._block_size
            row = rows.stop


def wants_graphs(config: EngineConfig, device: torch.device) -> bool:
    """Are decode steps recorded? Stages of a pipeline wait for one another, which no graph can."""
    if config.pp > 1 or config.role == "prefill":
        return False
    return device.type == "cuda" if config.decode_graphs is None else config.decode_graphs


class ModelRunner:
    """Model, KV cache and sampler of one rank. Not thread-safe.

    Loads the weights; raises `ConfigError` for degrees of parallelism that the model does not allow. The pool
    comes with `allocate`, once all ranks know how many blocks each of them can have.
    """

    kv_cache: KVCache

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        links: RankLinks | None = None,
        weights: WeightSource | None = None,
    ) -> None:
        """`weights`: in place of those in the folder `config.model`."""
        self._links = links = links or RankLinks()
        self._config = config
        self._hidden_size = model.hidden_size
        self.device = parse_device(config.devices[links.rank]).torch_device
        self._dtype = dtype = TORCH_DTYPE[config.dtype]
        layers = layer_range(model.num_layers, config.pp, links.stage)
        if weights is None:
            self._model = load_model(resolve_model(config.model), links.group, layers, dtype, self.device)
        else:
            self._model = build_model(model, links.group, layers, dtype, self.device, weights)
        self._backend = choose_backend(
            self.device, dtype, model.head_dim, config.block_size, config.attention_backend
        )
        heads = len(head_range(model.num_kv_heads, links.group.size, links.group.rank))
        self._shape = CacheShape(len(layers), heads, model.head_dim, config.block_size, dtype)
        self._context = config.max_context or model.max_context
        per_sequence = -(-self._context // config.block_size)
        self._tensors = StepTensors(config.max_batch_size, per_sequence, config.block_size, self.device)
        self._sampler = Sampler(model.vocab_size, self.device)
        self._graphs: DecodeGraphs | None = None
        self._running: RunningStep | None = None  # the last one
        self.graphs_enabled = True  # a measurement compares both

    @property
    def runs_ahead(self) -> bool:
        """May a decode step begin before the tokens of the one before are known here?"""
        return self._graphs is not None and self._links.shape.ranks == 1

    def affordable_blocks(self, sharers: int = 1) -> int:
        """Blocks that this rank can have, `sharers` ranks of the instance taking equal parts of the memory
        that is free now. Raises `ConfigError`.
        """
        sized = self._config.num_blocks is not None or self._config.kv_bytes is not None
        taken = 0 if sized or self.device.type == "cpu" else self._measure()
        free = free_bytes(self.device) // sharers - taken
        return pool_blocks(self._config, self._shape.block_bytes, self._context, self.device, free)

    def _measure(self) -> int:
        """Bytes of the GPU that steps, graphs and transfers will need beside the pool. Raises `ConfigError`
        if the steps alone do not fit.
        """
        try:
            graphs = 0
            steps = self.run_largest(lambda work: footprint.peak_bytes(work, self.device))
            if wants_graphs(self._config, self.device) and self._recordable():
                graphs = steps[-1] + self._graph_bytes()  # they keep what a step takes
        except torch.OutOfMemoryError as error:
            prompt = footprint.largest_prompt(self._config, self._context)
            raise ConfigError(
                f"max_context={self._context}, max_batch_size={self._config.max_batch_size}: a prompt of "
                f"{prompt} tokens or a decode step of so many sequences does not fit beside the weights "
                f"({str(error).splitlines()[0][:200]}); lower one of them or max_batch_tokens"
            ) from None
        transfers = 0 if self._config.role == "unified" else footprint.TRANSFER_BYTES
        margin = int(footprint.MARGIN_SHARE * torch.cuda.get_device_properties(self.device).total_memory)
        logger.info(
            "%s: %.1f MB for prompts, %.1f MB for decode steps, %.1f MB for graphs, %.1f MB for transfers, "
            "%.1f MB margin",
            self._config.instance,
            *(size / 1e6 for size in (*steps, graphs, transfers, margin)),
        )
        return max(steps) + graphs + transfers + margin

    def _graph_bytes(self) -> int:
        """Bytes of the GPU that the driver takes for all decode graphs, judged by a few, which are recorded
        over a pool of one block, run and dropped.
        """
        self.kv_cache = KVCache(self._backend, self._shape, 1, self.device)
        graphs = self._make_graphs()
        buckets = graphs.buckets
        few = buckets[-GRAPHS_TRIED:]
        graphs.rehearse(few)  # modules are loaded, libraries have their workspaces
        again = self._make_graphs()
        taken = footprint.driver_bytes(partial(again.rehearse, few), self.device)
        del graphs, again, self.kv_cache
        torch.cuda.empty_cache()
        return taken * len(buckets) // len(few)

    def _make_graphs(self, blocks: int | None = None) -> DecodeGraphs:
        """Nothing recorded yet. `blocks`: of the pool, if no sequence can be longer."""
        config = self._config
        longest = -(-self._context // config.block_size)
        return DecodeGraphs(
            self._decode,
            config.max_batch_size,
            longest if blocks is None else min(blocks, longest),
            config.block_size,
            self._hidden_size,
            self._dtype,
            self.device,
        )

    def run_largest(self, measure: Callable[[Callable[[], object]], int]) -> tuple[int, int]:
        """Runs the largest prompt step and the largest decode step, over a pool of one block, inside
        `measure`; returns what that gives. All ranks of an instance do this at the same time.
        """
        config, size = self._config, self._config.block_size
        self.kv_cache = KVCache(self._backend, self._shape, 1, self.device)
        prompts = footprint.prompt_step(footprint.largest_prompt(config, self._context), self._context, size)
        decodes = footprint.decode_step(config.max_batch_size, self._context, size)
        found = []
        for step in (prompts, decodes):
            found.append(measure(lambda step=step: self.execute(step)))  # type: ignore[misc]
            self.execute(footprint.leaving(step))
        del self.kv_cache
        return found[0], found[1]

    def allocate(self, blocks: int) -> None:
        """Makes the pool and, where decode steps are recorded, their graphs."""
        self.kv_cache = KVCache(self._backend, self._shape, blocks, self.device)
        if self.device.type == "cpu":
            memory.keep_freed()  # not before: what loading takes for a moment goes back to the system
        if self.device.type == "cuda" and self._links.shape.ranks == 1:
            self.warm_up()
        if wants_graphs(self._config, self.device) and self._recordable():
            self._graphs = self._make_graphs(blocks)
            self._graphs.record()
        logger.info(
            "%s: %d blocks of %d tokens, %.1f MB of KV cache",
            self._config.instance,
            blocks,
            self._config.block_size,
            self.kv_cache.bytes / 1e6,
        )

    def warm_up(self) -> None:
        """Small steps, so that kernels are compiled before the first request. The pool must be empty."""
        size = self._config.block_size
        for step in (footprint.prompt_step(2, self._context, size), footprint.decode_step(1, 2, size)):
            self.execute(step)
            self.execute(footprint.leaving(step))

    def _recordable(self) -> bool:
        """Raises `ConfigError` if graphs are asked for by name and the attention cannot be recorded."""
        if self.device.type == "cpu" or self._backend.recordable:
            return True
        if self._config.decode_graphs:
            raise ConfigError(f"decode_graphs=True: attention {self._backend.name!r} cannot be recorded")
        logger.info("%s: no decode graphs with attention %r", self._config.instance, self._backend.name)
        return False

    def drop(self) -> None:
        """Nothing is computed any more: graphs and pages go."""
        self._graphs = None
        del self.kv_cache

    @property
    def attention_name(self) -> str:
        return self._backend.name

    def execute(self, step: StepInput) -> StepOutput | None:
        """`begin`, and the tokens; None on a rank that does not sample."""
        running = self.begin(step)
        return None if running is None else running.result()

    @torch.inference_mode()
    def begin(self, step: StepInput) -> RunningStep | None:
        """Computes the step and samples where asked; None on a rank that does not sample.

        On a GPU it returns before the device has done so; nothing of a decode step waits for it. Raises
        `KeyError` for a sequence that has not joined, `RankLost` if a rank that this one waits for is lost,
        `torch.OutOfMemoryError`.
        """
        links = self._links
        if links.samples:
            for key in step.leaving:
                self._sampler.leave(key)
            for joining in step.joining:
                self._sampler.join(joining)
        if not step.items:
            return self._nothing()
        try:
            if self._graphs is not None and self.graphs_enabled and self._graphs.serves(step.items):
                return self._choose(self._graphs.run(step.items), step.items, self._graphs)
            return self._compute(step.items)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()  # what is free in pieces of the wrong size may serve the next batch
            raise

    def _compute(self, items: list[StepItem]) -> RunningStep | None:
        """A step of any items, in tensors of just its size."""
        links = self._links
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
            rows = upload(last[chosen], self.device)
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

    def _decode(self, ids: Tensor, positions: Tensor, slots: Tensor, tables: Tensor, lens: Tensor) -> Tensor:
        """See `DecodeBody`."""
        attention = PagedAttention(self._backend, self.kv_cache, slots, DecodeMeta(tables, lens), None)
        return self._model.forward(ids, positions, attention)

    def _nothing(self, device: torch.device = CPU) -> RunningStep | None:
        """A step that samples no token. It has ended once `device` comes here."""
        nothing = Choice((), torch.empty(0, dtype=torch.int64, device=device))
        return RunningStep(self._sampler, nothing) if self._links.samples else None

    def _choose(
        self, hidden: Tensor, items: Sequence[StepItem], graphs: DecodeGraphs | None = None
    ) -> RunningStep | None:
        """Samples the next token of each item from its row of `hidden`. All ranks of the stage come here."""
        if not items:
            return self._nothing(self.device)
        logits = self._model.logits(hidden)
        if not self._links.samples:
            return None
        if self._running is not None and self._sampler.counts_tokens([item.key for item in items]):
            self._running.result()  # the choice depends on the token before, which must be known first
        places = [item.start + len(item.tokens) for item in items]
        choice = self._sampler.choose(logits, [item.key for item in items], places)
        if graphs is not None:
            graphs.take_sampled(choice.tokens)
        self._running = RunningStep(self._sampler, choice)
        return self._running
