"""A prefill instance in the simulation."""

from __future__ import annotations

from collections.abc import Callable

from distserve.core.batch import Batch, PromptWork
from distserve.core.blocks import CountingBlocks
from distserve.core.dispatch import PromptLoad
from distserve.core.prefill_scheduler import PrefillScheduler
from distserve_planner.simulator.clock import Clock
from distserve_planner.simulator.records import Records, Tracked
from distserve_planner.simulator.spec import InstanceSpec


class PrefillInstance:
    """Batches pass the pp stages one behind the other; a longer batch ahead makes a bubble behind it."""

    __slots__ = (
        "_clock", "_latency", "_longs", "_pieces_above", "_prefilled", "_records", "_requests", "_stage_free",
        "_wants_work", "busy", "busy_s", "index", "kv_tokens", "scheduler", "work",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        spec: InstanceSpec,
        clock: Clock,
        records: Records,
        prefilled: Callable[[PrefillInstance, Tracked], None],
        wants_work: Callable[[], None] | None,
    ) -> None:
        """prefilled: takes a request with its first token. wants_work: called when there is room for more."""
        self.index = index
        self.kv_tokens = spec.kv_tokens
        self.scheduler = PrefillScheduler(
            spec.limits, CountingBlocks(spec.num_blocks, spec.block_size), spec.ordering
        )
        self.work = 0  # tokens of the prompts waiting and in computation,
        self._requests = self._longs = 0  # their number, and that of those computed in pieces
        limits = spec.limits
        self._pieces_above = None if limits.prefill_chunk_tokens is None else limits.max_batch_tokens
        self.busy = False  # the first stage
        self.busy_s = 0.0  # of the slowest stage
        self._latency = spec.latency
        self._clock = clock
        self._records = records
        self._prefilled = prefilled
        self._wants_work = wants_work
        self._stage_free = [0.0] * spec.latency.pp

    def in_pieces(self, tokens: int) -> bool:
        """Others overtake a prompt of this length here."""
        return self._pieces_above is not None and tokens > self._pieces_above

    def prompt_load(self) -> PromptLoad:
        """For `choose_prefill`."""
        return PromptLoad(
            self.work,
            self._requests,
            self.scheduler.credits(),
            self.scheduler.limits.max_batch_tokens,
            not self.work,
            self._longs,
            self._pieces_above,
        )

    def offer(self, request: Tracked) -> None:
        self.scheduler.add(request)
        self.work += request.prompt_len
        self._requests += 1
        self._longs += self.in_pieces(request.prompt_len)
        if not self.busy:
            self.begin()

    def begin(self) -> None:
        """Starts the next batch if the first stage is free and there is memory."""
        batch = self.scheduler.schedule()
        if batch is None:
            return
        now = self._clock.now
        started = self._records.started
        for item in batch.prefill:
            if not item.start:  # not a later piece of a prompt
                started[item.request.index] = now  # type: ignore[attr-defined]
        work = PromptWork.of(batch.prefill)
        stage = self._latency.prefill_stage_s(*work)
        self.busy = True
        self.busy_s += stage
        if len(self._stage_free) == 1:
            self._clock.at(now + stage, self._end, batch)
        else:
            self._pass_stages(now, stage, work, batch)
        if self._wants_work is not None:
            self._wants_work()

    def _pass_stages(self, now: float, stage: float, work: PromptWork, batch: Batch) -> None:
        free = self._stage_free
        latency = self._latency
        pp = len(free)
        total = latency.prefill_total_s(*work)
        hop = latency.hop_s(work.tokens)
        # the way through an empty pipeline takes `total`; stages before the last take an equal share of it
        share = (total - (pp - 1) * hop) / pp
        leaves = now + stage
        free[0] = leaves
        self._clock.at(leaves, self._first_stage_free, None)
        leaves = now + share
        for index in range(1, pp):
            enters = leaves + hop
            if free[index] > enters:
                enters = free[index]
            leaves = enters + share
            free[index] = enters + stage
        self._clock.at(leaves, self._pipeline_end, batch)

    def _first_stage_free(self, _: None) -> None:
        self.busy = False
        self.begin()

    def _pipeline_end(self, batch: Batch) -> None:
        self._book(batch)
        self._idle()

    def _end(self, batch: Batch) -> None:
        self.busy = False
        self._book(batch)
        self._idle()

    def _idle(self) -> None:
        """Goes on with what waits here, or else asks for work: room has come free."""
        if not self.busy:
            self.begin()
        if self._wants_work is not None:
            self._wants_work()

    def _book(self, batch: Batch) -> None:
        scheduler = self.scheduler
        scheduler.complete(batch)
        now = self._clock.now
        first = self._records.first
        for item in batch.prefill:
            request = item.request
            if not request.generated:
                continue  # a piece of a prompt that goes on
            self.work -= request.prompt_len
            self._requests -= 1
            self._longs -= self.in_pieces(request.prompt_len)
            first[request.index] = now  # type: ignore[attr-defined]
            self._prefilled(self, request)  # type: ignore[arg-type]

    def release(self, request: Tracked) -> None:
        """The KV has been pulled: its blocks are free for new prompts."""
        self.scheduler.release(request)
        if self._wants_work is not None or (not self.busy and self.scheduler.waiting):
            self._idle()
