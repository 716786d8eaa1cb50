"""A colocated instance in the simulation: both phases in one engine, the baselines of the paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from distserve.core.batch import Batch, Item
from distserve.core.blocks import CountingBlocks
from distserve.core.config import Policy
from distserve.core.unified_scheduler import UnifiedScheduler
from distserve_planner.simulator.clock import Clock
from distserve_planner.simulator.records import Records, Tracked
from distserve_planner.simulator.spec import InstanceSpec

PIPELINED_BATCHES = 4  # prompt batches per stage that follow each other before decoding goes on


class UnifiedInstance:
    """One step at a time, except spans of decode rounds in which nothing changes.

    With pp stages decode rounds go in micro-batches (`DecodeRounds`), waiting prompts in batches that follow
    each other through the stages, and chunked steps have a budget of pp chunks, one per micro-batch.
    """

    __slots__ = (
        "_batch", "_chunk", "_chunked", "_clock", "_done", "_late", "_latency", "_plan", "_prompts",
        "_records", "_rounds", "_span", "busy", "busy_s", "index", "load", "scheduler",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        spec: InstanceSpec,
        policy: Policy,
        clock: Clock,
        records: Records,
        done: Callable[[Tracked], None],
    ) -> None:
        self.index = index
        self._chunked = policy == "chunked_prefill"
        self._chunk = spec.limits.chunk_tokens
        self._late = (0.0, 1.0)  # seconds between micro-batches of the step, tokens of each
        limits = replace(spec.limits, chunk_tokens=spec.limits.chunk_tokens * spec.latency.pp)
        self.scheduler = UnifiedScheduler(limits, CountingBlocks(spec.num_blocks, spec.block_size), policy)
        self.load = 0  # requests that have not ended
        self.busy = False
        self.busy_s = 0.0
        self._batch: Batch | None = None
        self._prompts: list[tuple[list[Item], float]] = []  # batches in the pipeline and when they leave it
        self._span = (0.0, 0, 0, 0)
        self._plan = 0
        self._latency = spec.latency
        self._rounds = spec.rounds
        self._clock = clock
        self._records = records
        self._done = done

    def offer(self, request: Tracked) -> None:
        scheduler = self.scheduler
        blocked = bool(scheduler.waiting)  # those ahead wait for an end, and so will this one
        scheduler.add(request)
        self.load += 1
        if not self.busy:
            self._begin()
        elif not blocked and len(scheduler.running) < scheduler.limits.max_batch_size:
            self._cut()

    def _cut(self) -> None:
        start, batch, context, steps = self._span
        if steps <= 1:
            return
        rounds = self._rounds
        kept = rounds.steps_within(batch, context, self._clock.now - start) + 1
        if kept < steps:
            self._span = (start, batch, context, kept)
            self._plan += 1
            self._clock.at(start + rounds.span_s(batch, context, kept), self._end, self._plan)

    def _begin(self) -> None:
        if self._latency.pp > 1 and not self._chunked and self._begin_pipeline():
            return
        batch = self.scheduler.schedule()
        self._batch = batch
        if batch is None:
            self.busy = False
            return
        now = self._clock.now
        self.busy = True
        self._plan += 1
        if batch.prefill:
            for item in batch.prefill:
                if item.start == 0:
                    self._started(item, now)
            self._span = (now, 0, 0, 1)
            took = self._mixed_s(batch)
        else:
            running = self.scheduler.running
            size = len(running)
            context = running.context + size
            steps = running.horizon()
            self._span = (now, size, context, steps)
            took = self._rounds.span_s(size, context, steps)
        self._clock.at(now + took, self._end, self._plan)

    def _started(self, item: Item, now: float) -> None:
        request = item.request
        started = self._records.started
        if not request.preemptions:
            started[request.index] = now  # type: ignore[attr-defined]

    def _mixed_s(self, batch: Batch) -> float:
        """A step of whole prompts (prefill_first), or of decodes and a piece of prompts (chunked_prefill).

        With pp stages the pieces go in micro-batches of one chunk each, one stage apart. The next step starts
        when the first of them is through, the last one ends that much later (`_late`).
        """
        tokens = squares = 0
        for item in batch.prefill:
            end = item.start + item.num_tokens
            tokens += item.num_tokens
            squares += end * end - item.start * item.start
        count = len(batch.prefill)
        size = batch.num_decodes
        latency = self._latency
        pp = latency.pp
        if pp == 1:
            if not size:
                return latency.prefill_stage_s(tokens, squares, count)
            return latency.mixed_stage_s(tokens, squares, size, batch.context_tokens + size, count)
        pieces = -(-tokens // self._chunk)
        beside = -(-size // pp)
        context = (batch.context_tokens + size) / pp
        stage = latency.mixed_stage_s(tokens / pieces, squares / pieces, beside, context, count / pieces)
        self._late = (stage, tokens / pieces)
        return pp * stage + (pp - 1) * latency.hop_s(tokens / pieces + beside)

    def _begin_pipeline(self) -> bool:
        """Sends the waiting prompts through the stages, batch by batch. False if there are none."""
        scheduler = self.scheduler
        latency = self._latency
        pp = latency.pp
        now = self._clock.now
        held = 0
        free = [now] * pp
        self._prompts = []
        while scheduler.waiting and len(self._prompts) < PIPELINED_BATCHES * pp:
            items = scheduler.prefill_batch(scheduler.limits.max_batch_tokens, held)
            if not items:
                break
            held += len(items)
            lengths = [item.num_tokens for item in items]
            tokens, squares = sum(lengths), sum(n * n for n in lengths)
            stage = latency.prefill_stage_s(tokens, squares, len(items))
            hop = latency.hop_s(tokens)
            for item in items:
                self._started(item, free[0])
            leaves = free[0] + stage
            free[0] = leaves
            for index in range(1, pp):
                leaves = max(leaves + hop, free[index]) + stage
                free[index] = leaves
            self._prompts.append((items, leaves))
        if not self._prompts:
            return False
        self.busy = True
        self._span = (now, 0, 0, 1)
        self._plan += 1
        self._batch = Batch(prefill=[item for items, _ in self._prompts for item in items])
        self._clock.at(self._prompts[-1][1], self._end, self._plan)
        return True

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return
        now = self._clock.now
        start, _, _, steps = self._span
        self.busy_s += now - start
        batch = self._batch
        assert batch is not None
        records = self._records
        if batch.prefill:
            self._first_tokens(batch, now)
        for request in self.scheduler.complete(batch, (), steps):
            index: int = request.index  # type: ignore[attr-defined]
            first = records.first[index]
            records.finish[index] = first if request.stop_after == 1 or first > now else now
            self.load -= 1
            self._done(request)  # type: ignore[arg-type]
        if self.scheduler.waiting:
            self.scheduler.preempted()
        self._begin()

    def _first_tokens(self, batch: Batch, now: float) -> None:
        records = self._records
        if self._prompts:
            groups, self._prompts = self._prompts, []
        else:
            groups = [(batch.prefill, now)]
        late, piece = self._late
        passed = 0
        for items, when in groups:
            for item in items:
                passed += item.num_tokens
                if item.samples and not item.request.generated:
                    index: int = item.request.index  # type: ignore[attr-defined]
                    first = when + late * int((passed - 1) / piece) if late else when
                    records.first[index] = records.admitted[index] = records.ready[index] = first
