"""A colocated instance in the simulation: both phases in one engine, the baselines of the paper."""

from __future__ import annotations

from collections.abc import Callable

from distserve.core.batch import Batch, PromptWork
from distserve.core.blocks import CountingBlocks
from distserve.core.config import Policy
from distserve.core.dispatch import PromptLoad
from distserve.core.unified_scheduler import UnifiedScheduler
from distserve_planner.simulator.clock import Clock
from distserve_planner.simulator.records import Records, Tracked
from distserve_planner.simulator.spec import InstanceSpec


class UnifiedInstance:
    """One step at a time, except spans of decode rounds in which nothing changes."""

    __slots__ = (
        "_batch", "_clock", "_done", "_latency", "_plan", "_records", "_rounds", "_span", "_wants_work",
        "busy", "busy_s", "index", "kv_tokens", "load", "scheduler", "work",
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
        """wants_work: called when there may be room for more."""
        self.index = index
        self.kv_tokens = spec.kv_tokens
        blocks = CountingBlocks(spec.num_blocks, spec.block_size)
        self.scheduler = UnifiedScheduler(spec.limits, blocks, policy)
        self.load = 0  # requests that have not ended
        self.work = 0  # tokens of those prompts that have no first token
        self.busy = False
        self.busy_s = 0.0
        self._batch: Batch | None = None
        self._span = (0.0, 0, 0, 0)
        self._plan = 0
        self._latency = spec.latency
        self._rounds = spec.rounds
        self._clock = clock
        self._records = records
        self._done = done
        self._wants_work = wants_work

    def in_pieces(self, tokens: int) -> bool:
        """Never: here, a piece is computed beside decoding, and nobody is overtaken."""
        return False

    def prompt_load(self) -> PromptLoad:
        """For `choose_prefill`."""
        return prompt_load(self.scheduler, self.work, self.load)

    def offer(self, request: Tracked) -> None:
        scheduler = self.scheduler
        blocked = bool(scheduler.waiting)  # those ahead wait for an end, and so will this one
        scheduler.add(request)
        self.load += 1
        self.work += request.prompt_len
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
        self._start_batch()
        if self._wants_work is not None:
            self._wants_work()

    def _start_batch(self) -> None:
        batch = self.scheduler.schedule()
        self._batch = batch
        if batch is None:
            self.busy = False
            return
        now = self._clock.now
        self.busy = True
        self._plan += 1
        if batch.prefill:
            started(batch, self._records, now)
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

    def _mixed_s(self, batch: Batch) -> float:
        """A step of whole prompts (prefill_first), or of decodes and a piece of prompts (chunked_prefill)."""
        work, size = PromptWork.of(batch.prefill), batch.num_decodes
        return self._latency.mixed_stage_s(
            work.tokens, work.squares, size, batch.context_tokens + size, work.prompts, work.ends
        )

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return
        now = self._clock.now
        start, _, _, steps = self._span
        self.busy_s += now - start
        batch = self._batch
        assert batch is not None
        self.work -= first_tokens(batch, self._records, now)
        finish = self._records.finish
        for request in self.scheduler.complete(batch, (), steps):
            finish[request.index] = now  # type: ignore[attr-defined]
            self.load -= 1
            self._done(request)  # type: ignore[arg-type]
        if self.scheduler.waiting:
            self.scheduler.preempted()
        self._begin()


def prompt_load(scheduler: UnifiedScheduler, work: int, load: int) -> PromptLoad:
    """Of a colocated instance. work: tokens of prompts without a first token. load: requests."""
    waiting = max(work, scheduler.waiting_tokens)  # the latter counts preempted requests, too
    lm = scheduler.limits.max_batch_tokens
    return PromptLoad(waiting, load, scheduler.credits(), lm, not work)


def started(batch: Batch, records: Records, now: float) -> None:
    """Notes when the prefill of a batch's requests begins."""
    for item in batch.prefill:
        request = item.request
        if not item.start and not request.preemptions:
            records.started[request.index] = now  # type: ignore[attr-defined]


def first_tokens(batch: Batch, records: Records, now: float) -> int:
    """Notes the first tokens that a batch has given, before it is booked; tokens of their prompts."""
    tokens = 0
    for item in batch.prefill:
        request = item.request
        if item.samples and not request.generated:
            index: int = request.index  # type: ignore[attr-defined]
            records.first[index] = records.admitted[index] = records.ready[index] = now
            tokens += request.prompt_len
    return tokens
