"""A decode instance in the simulation: closed-form spans between events."""

from __future__ import annotations

from collections.abc import Callable

from distserve.core.batch import Batch, PromptWork
from distserve.core.blocks import CountingBlocks
from distserve.core.decode_scheduler import DecodeScheduler
from distserve_planner.simulator.clock import Clock
from distserve_planner.simulator.records import Records, Tracked
from distserve_planner.simulator.spec import InstanceSpec


class DecodeInstance:
    """A span is a number of rounds during which the batch stays as it is: until the next finish at most.

    What joins in between waits for the end of the round in progress, and the span is cut there.
    """

    __slots__ = (
        "_batch", "_blocks", "_clock", "_done", "_latency", "_plan", "_pull", "_records", "_rounds", "_span",
        "busy", "busy_s", "index", "kv_tokens", "load", "max_batch_size", "ready", "scheduler",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        spec: InstanceSpec,
        clock: Clock,
        records: Records,
        pull: Callable[[DecodeInstance, Tracked, float], None],
        done: Callable[[Tracked], None],
    ) -> None:
        """pull: moves an admitted request's KV here, from the given time on, and then calls `arrived`."""
        self.index = index
        self.kv_tokens, self.max_batch_size = spec.kv_tokens, spec.limits.max_batch_size
        self.scheduler = DecodeScheduler(spec.limits, CountingBlocks(spec.num_blocks, spec.block_size))
        self.load = 0  # requests given to this instance that have not ended
        self.busy = False
        self.busy_s = 0.0
        self.ready: list[Tracked] = []  # KV is here; they join at the end of the round in progress
        self._blocks = self.scheduler.blocks
        self._batch: Batch | None = None
        self._span = (0.0, 0, 0, 0)  # start, batch, context, rounds
        self._plan = 0  # counts planned ends of spans; only the latest is valid
        self._latency = spec.latency
        self._rounds = spec.rounds
        self._clock = clock
        self._records = records
        self._pull = pull
        self._done = done

    def offer(self, request: Tracked) -> None:
        """A prefilled request, its KV still at prefill."""
        self.load += 1
        scheduler = self.scheduler
        scheduler.add(request)
        if not self.busy:
            self._begin()
        elif len(scheduler.incoming) == 1 and not scheduler.waiting:
            self._admit_in_span()

    def arrived(self, request: Tracked) -> None:
        """The KV of an admitted request is here."""
        self.ready.append(request)
        if self.busy:
            self._cut()
        else:
            self._begin()

    def _admit(self, when: float) -> None:
        admitted = self._records.admitted
        for request in self.scheduler.admit():
            admitted[request.index] = when  # type: ignore[attr-defined]
            self._pull(self, request, when)  # type: ignore[arg-type]

    def _admit_in_span(self) -> None:
        """Admission is due at the end of the round in progress.

        It is booked at once, without ending the span, if there is room even when the whole span has taken
        its blocks; else the span is cut at that round, where the exact count is known.
        """
        if self._batch is None or self._batch.decode is None:
            return  # preempted requests are being computed again; they go first
        scheduler = self.scheduler
        if len(scheduler.running) + len(scheduler.pulling) >= scheduler.limits.max_batch_size:
            return
        start, batch, context, steps = self._span
        blocks = self._blocks
        growth = batch * -(-(steps - 1) // blocks.block_size)
        blocks.free -= growth  # type: ignore[misc]
        now = self._clock.now
        rounds = self._rounds
        boundary = start + rounds.span_s(batch, context, rounds.steps_within(batch, context, now - start) + 1)
        self._admit(boundary)
        blocks.free += growth  # type: ignore[misc]
        if scheduler.incoming:
            self._cut()

    def _cut(self) -> None:
        """Ends the span with the round in progress."""
        start, batch, context, steps = self._span
        if steps <= 1:
            return
        now = self._clock.now
        rounds = self._rounds
        kept = rounds.steps_within(batch, context, now - start) + 1
        if kept < steps:
            self._span = (start, batch, context, kept)
            self._plan += 1
            self._clock.at(start + rounds.span_s(batch, context, kept), self._end, self._plan)

    def _begin(self) -> None:
        """At the end of a round, or idle: admits, joins what is ready, and starts the next span."""
        scheduler = self.scheduler
        now = self._clock.now
        self.busy = True
        self._span = (now, 0, 0, 0)
        if scheduler.incoming:
            self._admit(now)
        if self.ready:
            for request in self.ready:
                scheduler.start(request)
            self.ready.clear()
        batch = scheduler.schedule()
        self._batch = batch
        if batch is None:
            self.busy = False
            return
        self._plan += 1
        if batch.decode is None:
            took = self._latency.prefill_total_s(*PromptWork.of(batch.prefill))
            self._span = (now, 0, 0, 1)
            self.busy_s += took
            self._clock.at(now + took, self._end, self._plan)
            return
        running = scheduler.running
        size = len(running)
        context = running.context + size
        steps = running.horizon()
        self._span = (now, size, context, steps)
        self._clock.at(now + self._rounds.span_s(size, context, steps), self._end, self._plan)

    def _end(self, plan: int) -> None:
        if plan != self._plan:
            return  # the span was cut after this end had been planned
        start, size, _, steps = self._span
        now = self._clock.now
        batch = self._batch
        assert batch is not None
        if size:
            self.busy_s += now - start
        scheduler = self.scheduler
        finish = self._records.finish
        for request in scheduler.complete(batch, (), steps):
            finish[request.index] = now  # type: ignore[attr-defined]
            self.load -= 1
            self._done(request)  # type: ignore[arg-type]
        if scheduler.waiting:
            scheduler.preempted()
        self._begin()
