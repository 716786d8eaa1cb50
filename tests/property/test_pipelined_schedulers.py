"""Schedulers with several batches in flight: nobody is in two of them, nothing is lost, no block leaks."""

from __future__ import annotations

import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from distserve.core.batch import Batch
from distserve.core.blocks import BlockManager, CountingBlocks, blocks_for
from distserve.core.config import Policy
from distserve.core.decode_scheduler import DecodeScheduler
from distserve.core.request import Request
from distserve.core.scheduler import ContinuousBatching, Limits
from distserve.core.unified_scheduler import UnifiedScheduler

LENGTHS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=20)


def members(batch: Batch) -> list[Request]:
    return [item.request for item in (*batch.decode_items(), *batch.prefill)]


class Pipeline:
    """Up to `stages` batches in flight; the oldest is completed first, as an executor does."""

    def __init__(self, scheduler: ContinuousBatching, stages: int, rng: random.Random) -> None:
        self.scheduler = scheduler
        self.stages = stages
        self.rng = rng
        self.flights: deque[tuple[Batch, list[Request]]] = deque()
        self.ended: list[str] = []

    def flying(self) -> set[str]:
        return {request.id for _, requests in self.flights for request in requests}

    def turn(self) -> bool:
        """Whether anything happened."""
        batch = None
        if len(self.flights) < self.stages:
            batch = self.scheduler.schedule()  # type: ignore[attr-defined]
        if batch is not None:
            requests = members(batch)
            assert requests
            assert not self.flying() & {request.id for request in requests}
            self.flights.append((batch, requests))
        if self.flights and (batch is None or self.rng.random() < 0.5):
            done, requests = self.flights.popleft()
            finished = [request.id for request in requests if self.rng.random() < 0.05]
            sampled = {item.request.id for item in done.prefill if item.samples}
            sampled |= {request.id for request in requests if done.decode is not None}
            ended = self.scheduler.complete(done, [id for id in finished if id in sampled])
            self.ended += [request.id for request in ended]
            return True
        return batch is not None


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.sampled_from(["prefill_first", "chunked_prefill"]), st.integers(1, 4), st.integers(0))
def test_unified_conserves_requests_and_blocks(
    lengths: list[tuple[int, int]], policy: Policy, stages: int, seed: int
) -> None:
    rng = random.Random(seed)
    blocks = BlockManager(10, 16)  # 160 tokens: preemption happens
    scheduler = UnifiedScheduler(Limits(8, 64, 32), blocks, policy, stages)
    pipeline = Pipeline(scheduler, stages, rng)
    pending = [Request(str(i), p, o) for i, (p, o) in enumerate(lengths)]
    cancelled: list[str] = []
    for _ in range(8000):
        if pending and rng.random() < 0.5:
            scheduler.add(pending.pop(0))
        active = pipeline.turn()
        victim = str(rng.randrange(len(lengths)))
        if victim not in pipeline.flying() and rng.random() < 0.02 and scheduler.cancel(victim):
            cancelled.append(victim)
        blocks.check_integrity()
        assert scheduler.decoding <= 8
        if not active and not pending:
            break
    assert sorted([*pipeline.ended, *cancelled], key=int) == [str(i) for i in range(len(lengths))]
    assert blocks.free == blocks.num_blocks


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(0))
def test_decode_conserves_requests_and_blocks(lengths: list[tuple[int, int]], stages: int, seed: int) -> None:
    rng = random.Random(seed)
    blocks = BlockManager(10, 16)
    scheduler = DecodeScheduler(Limits(6, 64), blocks, stages)
    pipeline = Pipeline(scheduler, stages, rng)
    pending = [Request(str(i), p, o + 1, generated=1, computed=p) for i, (p, o) in enumerate(lengths)]
    for _ in range(8000):
        if pending and rng.random() < 0.5:
            scheduler.add(pending.pop(0))
        scheduler.admit()
        for request in list(scheduler.pulling.values()):
            if rng.random() < 0.6:
                scheduler.start(request)  # also while its future micro-batch is in flight
        active = pipeline.turn()
        blocks.check_integrity()
        if not active and not pending and not scheduler.pulling:
            break
    assert sorted(pipeline.ended, key=int) == [str(i) for i in range(len(lengths))]
    assert blocks.free == blocks.num_blocks


def running(scheduler: DecodeScheduler, count: int) -> None:
    for i in range(count):
        request = Request(str(i), 16, 60, generated=1, computed=16)
        scheduler.blocks.allocate(request, blocks_for(16, 16))
        scheduler.pulling[request.id] = request
        scheduler.start(request)


def test_decoding_requests_are_spread_evenly_and_take_turns() -> None:
    scheduler = DecodeScheduler(Limits(64, 64), CountingBlocks(1000, 16), stages=3)
    running(scheduler, 8)
    batches = [scheduler.schedule() for _ in range(3)]
    groups = [{request.id for request in members(batch)} for batch in batches if batch is not None]
    assert sorted(map(len, groups)) == [2, 3, 3]
    assert len(set.union(*groups)) == 8
    assert scheduler.schedule() is None  # all are in flight
    for turn, batch in enumerate(batches):
        assert batch is not None
        scheduler.complete(batch)
        again = scheduler.schedule()
        assert again is not None
        assert {request.id for request in members(again)} == groups[turn]


def test_a_micro_batch_that_shrinks_gets_requests_from_the_others() -> None:
    scheduler = DecodeScheduler(Limits(64, 64), CountingBlocks(1000, 16), stages=2)
    running(scheduler, 8)
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    scheduler.complete(first, [request.id for request in members(first)])
    scheduler.complete(second)
    sizes = []
    for _ in range(3):
        batch = scheduler.schedule()
        assert batch is not None
        sizes.append(batch.num_decodes)
        scheduler.complete(batch)
    assert sizes == [2, 2, 2]


def test_with_one_stage_a_request_decodes_from_the_next_step_on() -> None:
    scheduler = DecodeScheduler(Limits(64, 64), CountingBlocks(1000, 16))
    running(scheduler, 2)
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.num_decodes == 2
    late = Request("late", 16, 60, generated=1, computed=16)
    scheduler.blocks.allocate(late, 1)
    scheduler.pulling["late"] = late
    scheduler.start(late)
    scheduler.complete(batch)
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.num_decodes == 3


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(10, 60), st.integers(0, 40))
def test_rounds_that_are_skipped_equal_single_steps(
    lengths: list[tuple[int, int]], stages: int, num_blocks: int, most: int
) -> None:
    """`skip(k)` leaves the scheduler as k steps of every micro-batch do, one after the other."""
    outcomes = []
    for skipping in (True, False):
        blocks = CountingBlocks(num_blocks, 16)
        scheduler = UnifiedScheduler(Limits(8, 64, 32), blocks, "prefill_first", stages)
        requests = [Request(str(i), p, o) for i, (p, o) in enumerate(lengths)]
        for request in requests:
            if blocks_for(request.prompt_len + request.max_tokens, 16) <= num_blocks:
                scheduler.add(request)
        flights: deque[Batch] = deque()
        ended: list[str] = []
        skipped = 0
        for _ in range(3000):
            while len(flights) < stages and (batch := scheduler.schedule()) is not None:
                flights.append(batch)
            if not flights:
                break
            rounds = min(scheduler.rounds(), most)
            if rounds:
                skipped += rounds
                if skipping:
                    scheduler.skip(rounds)
                else:
                    for _ in range(rounds):
                        for batch in flights:
                            assert not scheduler.complete(batch)
                            assert batch.decode is not None
                            batch.decode.begin()
            ended += [request.id for request in scheduler.complete(flights.popleft())]
        assert blocks.free == num_blocks
        outcomes.append((ended, skipped, [r.generated for r in requests]))
    assert outcomes[0] == outcomes[1]
