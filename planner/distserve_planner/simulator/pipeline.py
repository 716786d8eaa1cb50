"""Batches of one instance in several pipeline stages at once, as the engine's executor runs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import sqrt
from typing import NamedTuple, Protocol

from distserve.core.batch import Batch, PromptWork
from distserve_planner.instance_latency import InstanceLatency
from distserve_planner.simulator.clock import Clock
from distserve_planner.simulator.rounds import PROBE_TOKENS


class Scheduling(Protocol):
    """Of `ContinuousBatching`, what is needed here."""

    def schedule(self) -> Batch | None: ...

    def rounds(self) -> int: ...

    def skip(self, rounds: int) -> None: ...


class _DecodeTimes(NamedTuple):
    """Of a step of one micro-batch; each time is linear in its context."""

    stage_s: float  # the slowest stage
    stage_slope: float
    trip_s: float  # through all stages, with the hops
    trip_slope: float
    hop_s: float
    hops_s: float

    @classmethod
    def of(cls, latency: InstanceLatency, size: int) -> _DecodeTimes:
        stage, trip = latency.decode_stage_s(size, 0.0), latency.decode_total_s(size, 0.0)
        hop = latency.hop_s(size)
        return cls(
            stage,
            (latency.decode_stage_s(size, PROBE_TOKENS) - stage) / PROBE_TOKENS,
            trip,
            (latency.decode_total_s(size, PROBE_TOKENS) - trip) / PROBE_TOKENS,
            hop,
            (latency.pp - 1) * hop,
        )


class Pipeline:
    """Up to pp steps in flight; the scheduler is asked for the next one whenever the first stage is free.

    While nothing can join or end (`ContinuousBatching.rounds`), all micro-batches go round for as long as
    that lasts in one closed form, and are where they would be had each step been taken by itself: a round
    takes the longest trip of one of them, or the time that all of them hold the slowest stage.
    """

    __slots__ = (
        "_after", "_before", "_clock", "_decode_times", "_flights", "_free", "_landed", "_latency", "_plan",
        "_scheduler", "_skip", "_started", "busy_s",
    )  # fmt: skip

    def __init__(
        self,
        scheduler: Scheduling,
        latency: InstanceLatency,
        clock: Clock,
        before: Callable[[], None],
        started: Callable[[Batch, float], None],
        landed: Callable[[Batch], None],
        after: Callable[[], None] | None = None,
    ) -> None:
        """before, after: called before the scheduler is asked, and when it has given all that can begin.
        started: a batch begins, at the given time. landed: one has left the last stage and is to be booked.
        """
        self.busy_s = 0.0  # of the slowest stage
        self._scheduler = scheduler
        self._latency = latency
        self._clock = clock
        self._before, self._started, self._landed, self._after = before, started, landed, after
        self._flights: deque[tuple[float, Batch]] = deque()  # when it leaves the last stage
        self._free = [0.0] * latency.pp
        self._plan = 0  # counts planned events; only the latest is valid
        self._decode_times: dict[int, _DecodeTimes] = {}
        self._skip: tuple[float, int, float, float, float] | None = None  # see `_skip_rounds`

    def poke(self) -> None:
        """Something has been added that may be scheduled, or join."""
        if self._skip is not None:
            start, rounds, _, linear, half = self._skip
            self._end_skip(min(rounds, _whole_rounds(self._clock.now - start, linear, half)))
            self._catch_up()
        self._fill()

    def _fill(self) -> None:
        self._begin_batches()
        if self._after is not None:
            self._after()

    def _begin_batches(self) -> None:
        now = self._clock.now
        free, flights, scheduler = self._free, self._flights, self._scheduler
        self._before()
        while len(flights) < len(free) and free[0] <= now:
            batch = scheduler.schedule()
            if batch is None:
                break
            self._started(batch, now)
            self._enter(batch, now)
        if not flights:
            return
        if self._skip_rounds(now):
            return
        when = flights[0][0]
        if now < free[0] < when and len(flights) < len(free):
            when = free[0]
        self._at(when, self._next)

    def _enter(self, batch: Batch, now: float) -> None:
        stage, share, hop = self._times(batch)
        free = self._free
        self.busy_s += stage
        free[0] = now + stage
        leaves = now + share
        for index in range(1, len(free)):
            enters = max(leaves + hop, free[index])
            leaves = enters + share
            free[index] = enters + stage
        if self._flights:  # a shorter one does not overtake
            leaves = max(leaves, self._flights[-1][0])
        self._flights.append((leaves, batch))

    def _times(self, batch: Batch) -> tuple[float, float, float]:
        """Seconds on the slowest stage, the mean stage's, and of a hop."""
        latency = self._latency
        pp = latency.pp
        size = batch.num_decodes
        if not batch.prefill:
            decode = self._decode(size)
            context = batch.context_tokens + size
            trip = decode.trip_s + decode.trip_slope * context
            return decode.stage_s + decode.stage_slope * context, (trip - decode.hops_s) / pp, decode.hop_s
        context = batch.context_tokens + size
        tokens, squares, prompts, ends = PromptWork.of(batch.prefill)
        hop = latency.hop_s(tokens + size)
        stage = latency.mixed_stage_s(tokens, squares, size, context, prompts, ends)
        if size:
            return stage, stage, hop
        total = latency.prefill_total_s(tokens, squares, prompts, ends)
        return stage, (total - (pp - 1) * hop) / pp, hop

    def _decode(self, size: int) -> _DecodeTimes:
        found = self._decode_times.get(size)
        if found is None:
            found = self._decode_times[size] = _DecodeTimes.of(self._latency, size)
        return found

    def _next(self, plan: int) -> None:
        if plan != self._plan:
            return
        now = self._clock.now
        flights = self._flights
        while flights and flights[0][0] <= now:
            self._landed(flights.popleft()[1])
        self._fill()

    # rounds in which nothing changes

    def _skip_rounds(self, now: float) -> bool:
        """Plans the end of all rounds in which nothing changes; False if there are none."""
        rounds = self._scheduler.rounds()
        if rounds < 1:
            return False
        trip = busy = trip_growth = busy_growth = 0.0
        for _, batch in self._flights:
            size = batch.num_decodes
            context = batch.context_tokens + 2 * size  # of its next step
            decode = self._decode(size)
            longest = decode.trip_s + decode.trip_slope * context
            if longest > trip:
                trip, trip_growth = longest, decode.trip_slope * size
            busy += decode.stage_s + decode.stage_slope * context
            busy_growth += decode.stage_slope * size
        first, growth = (trip, trip_growth) if trip > busy else (busy, busy_growth)
        half = growth / 2
        self._skip = (now, rounds, busy, first - half, half)
        self._at(now + _rounds_s(rounds, first - half, half), self._skipped)
        return True

    def _skipped(self, plan: int) -> None:
        if plan != self._plan or self._skip is None:
            return
        self._end_skip(self._skip[1])
        self._fill()

    def _end_skip(self, rounds: int) -> None:
        assert self._skip is not None
        _, _, busy, linear, half = self._skip
        self._skip = None
        if rounds < 1:
            return
        took = _rounds_s(rounds, linear, half)
        self._scheduler.skip(rounds)
        self.busy_s += rounds * busy
        self._flights = deque((leaves + took, batch) for leaves, batch in self._flights)
        self._free = [free + took for free in self._free]

    def _catch_up(self) -> None:
        """Those that have left within the round in progress have begun their next step."""
        now = self._clock.now
        flights = self._flights
        while flights and flights[0][0] <= now:
            leaves, batch = flights.popleft()
            begins = max(leaves, self._free[0])
            if begins > now or batch.decode is None:
                self._landed(batch)
                continue
            batch.decode.advance()
            batch.decode.begin()
            self._enter(batch, begins)

    def _at(self, when: float, action: Callable[[int], None]) -> None:
        self._plan += 1
        self._clock.at(when, action, self._plan)


def _rounds_s(rounds: int, linear: float, half: float) -> float:
    """Rounds that become longer by 2 `half` each; the first takes `linear` + `half`."""
    return rounds * (linear + half * rounds)


def _whole_rounds(seconds: float, linear: float, half: float) -> int:
    """Rounds that end within `seconds`."""
    if seconds <= 0:
        return 0
    if half > 0:
        rounds = int((sqrt(linear * linear + 4 * half * seconds) - linear) / (2 * half))
    else:
        rounds = int(seconds / linear)
    while rounds and _rounds_s(rounds, linear, half) > seconds:
        rounds -= 1
    return rounds
