"""Decode and colocated instances with pipeline stages: the engine's micro-batches, each on its way."""

from __future__ import annotations

from collections.abc import Callable

from distserve.core.batch import Batch
from distserve.core.blocks import CountingBlocks
from distserve.core.config import Policy
from distserve.core.decode_scheduler import DecodeScheduler
from distserve.core.dispatch import PromptLoad
from distserve.core.unified_scheduler import UnifiedScheduler
from distserve_planner.simulator.clock import Clock
from distserve_planner.simulator.pipeline import Pipeline
from distserve_planner.simulator.records import Records, Tracked
from distserve_planner.simulator.spec import InstanceSpec
from distserve_planner.simulator.unified import first_tokens, prompt_load, started


class PipelinedUnified:
    """`UnifiedInstance` with pp stages: prompts and decoding follow each other without a pause."""

    __slots__ = (
        "_clock", "_done", "_pipeline", "_records", "index", "kv_tokens", "load", "scheduler", "work",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        spec: InstanceSpec,
        policy: Policy,
        clock: Clock,
        records: Records,
        done: Callable[[Tracked], None],
        wants_work: Callable[[], None] | None,
    ) -> None:
        self.index = index
        self.kv_tokens = spec.kv_tokens
        blocks = CountingBlocks(spec.num_blocks, spec.block_size)
        self.scheduler = UnifiedScheduler(spec.limits, blocks, policy, spec.latency.pp)
        self.load = 0  # requests that have not ended
        self.work = 0  # tokens of those prompts that have no first token
        self._clock = clock
        self._records = records
        self._done = done
        self._pipeline = Pipeline(
            self.scheduler,
            spec.latency,
            clock,
            lambda: None,
            lambda batch, now: started(batch, records, now),
            self._landed,
            wants_work,
        )

    @property
    def busy_s(self) -> float:
        return self._pipeline.busy_s

    def in_pieces(self, tokens: int) -> bool:
        """Never, as in `UnifiedInstance`."""
        return False

    def prompt_load(self) -> PromptLoad:
        """For `choose_prefill`."""
        return prompt_load(self.scheduler, self.work, self.load)

    def offer(self, request: Tracked) -> None:
        self.scheduler.add(request)
        self.load += 1
        self.work += request.prompt_len
        self._pipeline.poke()

    def _landed(self, batch: Batch) -> None:
        now = self._clock.now
        self.work -= first_tokens(batch, self._records, now)
        for request in self.scheduler.complete(batch):
            self._records.finish[request.index] = now  # type: ignore[attr-defined]
            self.load -= 1
            self._done(request)  # type: ignore[arg-type]
        self.scheduler.preempted()


class PipelinedDecode:
    """`DecodeInstance` with pp stages."""

    __slots__ = (
        "_admitting", "_clock", "_done", "_pipeline", "_pull", "_ready", "_records", "index", "kv_tokens",
        "load", "max_batch_size", "scheduler",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        spec: InstanceSpec,
        clock: Clock,
        records: Records,
        pull: Callable[[PipelinedDecode, Tracked, float], None],
        done: Callable[[Tracked], None],
    ) -> None:
        self.index = index
        self.kv_tokens, self.max_batch_size = spec.kv_tokens, spec.limits.max_batch_size
        blocks = CountingBlocks(spec.num_blocks, spec.block_size)
        self.scheduler = DecodeScheduler(spec.limits, blocks, spec.latency.pp)
        self.load = 0  # requests given to this instance that have not ended
        self._ready: list[Tracked] = []  # KV is here
        self._admitting = False
        self._clock = clock
        self._records = records
        self._pull = pull
        self._done = done
        self._pipeline = Pipeline(
            self.scheduler, spec.latency, clock, self._admit, lambda batch, now: None, self._landed
        )

    @property
    def busy_s(self) -> float:
        return self._pipeline.busy_s

    def offer(self, request: Tracked) -> None:
        """A prefilled request, its KV still at prefill."""
        self.load += 1
        self.scheduler.add(request)
        self._pipeline.poke()

    def arrived(self, request: Tracked) -> None:
        """The KV of an admitted request is here."""
        self._ready.append(request)
        if not self._admitting:
            self._pipeline.poke()

    def _admit(self) -> None:
        now = self._clock.now
        scheduler = self.scheduler
        self._admitting = True  # a pull that takes no time ends at once
        for request in scheduler.admit():
            self._records.admitted[request.index] = now  # type: ignore[attr-defined]
            self._pull(self, request, now)  # type: ignore[arg-type]
        self._admitting = False
        for request in self._ready:
            scheduler.start(request)
        self._ready.clear()

    def _landed(self, batch: Batch) -> None:
        now = self._clock.now
        for request in self.scheduler.complete(batch):
            self._records.finish[request.index] = now  # type: ignore[attr-defined]
            self.load -= 1
            self._done(request)  # type: ignore[arg-type]
        self.scheduler.preempted()
