"""Properties of prompts in pieces, of the orders, and of prefill instances that decode, too."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distserve.core.batch import Batch
from distserve.core.blocks import BlockManager
from distserve.core.order import Order, Ordering
from distserve.core.parsing import ConfigError
from distserve.core.prefill_scheduler import PrefillScheduler
from distserve.core.request import Request
from distserve.core.scheduler import Limits
from distserve.core.standby_scheduler import StandbyScheduler

LM = 32
LENGTHS = st.lists(st.integers(1, 150), min_size=1, max_size=20)
STANDBY = st.tuples(st.integers(1, 60), st.integers(1, 40), st.booleans())  # prompt, output, to the end here
ORDERS = st.sampled_from(["fcfs", "shortest", "deadline"])


def limits(chunk: int | None) -> Limits:
    return Limits(max_batch_size=8, max_batch_tokens=LM, prefill_chunk_tokens=chunk)


def held(requests: list[Request]) -> int:
    blocks = [block for request in requests for block in request.blocks]
    assert len(blocks) == len(set(blocks))
    return len(blocks)


def check_batch(batch: Batch, chunk: int) -> None:
    whole = [item for item in batch.prefill if item.request.known <= LM]
    assert batch.prefill_tokens <= LM or len(batch.prefill) == 1
    assert len(whole) == len(batch.prefill) or len(batch.prefill) == 1
    for item in batch.prefill:
        assert item.start == item.request.computed
        assert item.num_tokens <= chunk or item.request.known <= LM
        assert item.request.num_blocks * 16 >= item.start + item.num_tokens


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(1, 40), ORDERS, st.integers(1, 3), st.integers(0))
def test_pieces_conserve_tokens_requests_and_blocks(
    lengths: list[int], chunk: int, order: Order, depth: int, seed: int
) -> None:
    """Requests come, are cancelled, computed and released at random; up to `depth` batches are in flight."""
    rng = random.Random(seed)
    blocks = BlockManager(14, 16)
    scheduler = PrefillScheduler(limits(chunk), blocks, Ordering(order))
    requests = [Request(str(i), n, 1 + i % 3, arrival_s=i, due_s=rng.random()) for i, n in enumerate(lengths)]
    pending, flights = list(requests), list[Batch]()
    computed, cancelled, leased = list[Request](), set[str](), list[Request]()
    for _ in range(3000):
        if pending and rng.random() < 0.6:
            scheduler.add(pending.pop(0))
        batch = scheduler.schedule() if len(flights) < depth else None
        if batch is not None:
            check_batch(batch, chunk)
            flights.append(batch)
        flying = {item.request.id for flight in flights for item in flight.prefill}
        if rng.random() < 0.05 and (id := str(rng.randrange(len(lengths)))) not in flying:
            gone = scheduler.cancel(id)
            cancelled |= {gone.id} if gone is not None else set()
        if flights and (rng.random() < 0.7 or len(flights) == depth):
            done = flights.pop(0)
            ended = scheduler.complete(done)
            sampled = [item.request for item in done.prefill if item.request.generated]
            computed += sampled
            leased += [request for request in sampled if request.blocks]
            assert all(request.max_tokens == 1 for request in ended)
        if leased and rng.random() < 0.5:
            scheduler.release(leased.pop(rng.randrange(len(leased))))
        assert held(requests) == blocks.num_blocks - blocks.free
        waiting = sum(r.known for r in scheduler.waiting) + scheduler._rest
        assert scheduler.waiting_tokens == waiting
        assert 0 <= scheduler.credits() <= 2 * LM
        if not pending and not flights and not scheduler.queued and not leased:
            break
    assert not pending
    assert not scheduler.queued, "a prompt waits for ever"
    assert sorted(r.id for r in computed) == sorted({r.id for r in requests} - cancelled)
    assert all(r.computed == r.prompt_len for r in computed)
    assert blocks.free == blocks.num_blocks
    assert scheduler.waiting_tokens == scheduler._long_tokens == 0
    blocks.check_integrity()


@settings(max_examples=60, deadline=None)
@given(LENGTHS)
def test_without_pieces_nothing_changes(lengths: list[int]) -> None:
    """FCFS without the option: whole prompts in order, long ones alone."""
    scheduler = PrefillScheduler(limits(None), BlockManager(10_000, 16))
    for i, n in enumerate(lengths):
        scheduler.add(Request(str(i), n, 2))
    seen = []
    while (batch := scheduler.schedule()) is not None:
        assert batch.prefill_tokens <= LM or len(batch.prefill) == 1
        assert all(item.samples for item in batch.prefill)
        seen += [item.request.id for item in batch.prefill]
        scheduler.complete(batch)
    assert seen == [str(i) for i in range(len(lengths))]


def drain(scheduler: PrefillScheduler) -> list[list[str]]:
    out = []
    while (batch := scheduler.schedule()) is not None:
        out.append([item.request.id for item in batch.prefill])
        scheduler.complete(batch)
    return out


def test_short_prompts_go_between_the_pieces_of_a_long_one() -> None:
    scheduler = PrefillScheduler(limits(16), BlockManager(100, 16))
    scheduler.add(Request("long", 64, 2))
    first = scheduler.schedule()
    assert first is not None
    for name in ("a", "b", "c"):
        scheduler.add(Request(name, 12, 2))
    assert scheduler.credits() == 2 * LM - 16 - 36
    scheduler.add(Request("long2", 40, 2))
    scheduler.add(Request("d", 20, 2))
    scheduler.complete(first)
    assert drain(scheduler) == [
        ["a", "b"], ["long"], ["c", "d"], ["long"], ["long"], ["long2"], ["long2"], ["long2"],
    ]  # fmt: skip


def test_a_prompt_in_pieces_is_not_overtaken_in_memory() -> None:
    """It has all its blocks from the start, and one that waits for blocks lets nobody pass."""
    blocks = BlockManager(6, 16)
    scheduler = PrefillScheduler(limits(16), blocks)
    short = Request("short", 30, 2)
    for request in (short, Request("long", 80, 2), Request("later", 10, 2)):
        scheduler.add(request)
    assert drain(scheduler) == [["short"]]
    assert scheduler.credits() == 0
    scheduler.release(short)
    assert [ids for ids in drain(scheduler) if ids != ["long"]] == [["later"]]


@pytest.mark.parametrize(
    ("order", "expected"),
    [("fcfs", ["0", "1", "2", "3"]), ("shortest", ["2", "1", "3", "0"]), ("deadline", ["1", "3", "0", "2"])],
)
def test_orders(order: Order, expected: list[str]) -> None:
    scheduler = PrefillScheduler(limits(None), BlockManager(100, 16), Ordering(order, 1.0))
    for i, (tokens, due) in enumerate([(31, 8.0), (20, 3.0), (10, 9.0), (25, 5.0)]):
        scheduler.add(Request(str(i), tokens, 2, arrival_s=i, due_s=due))
    assert [id for batch in drain(scheduler) for id in batch] == expected


def test_priority_goes_before_the_order_and_age_beats_length() -> None:
    scheduler = PrefillScheduler(limits(None), BlockManager(100, 16), Ordering("shortest", 10.0))
    scheduler.add(Request("old and long", 30, 2, arrival_s=0.0))
    scheduler.add(Request("new and short", 5, 2, arrival_s=3.0))
    scheduler.add(Request("newer, short, urgent", 31, 2, arrival_s=4.0, priority=-1))
    assert [id for ids in drain(scheduler) for id in ids] == [
        "newer, short, urgent", "old and long", "new and short",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="ageing_tokens_per_s=0"):
        Ordering("shortest", 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(STANDBY, max_size=16), st.integers(0))
def test_standby_conserves_blocks_and_ends_everything(
    lengths: list[tuple[int, int, bool]], seed: int
) -> None:
    rng = random.Random(seed)
    blocks = BlockManager(14, 16)
    scheduler = StandbyScheduler(PrefillScheduler(limits(16), blocks))
    requests = [Request(str(i), p, o) for i, (p, o, _) in enumerate(lengths)]
    for request, (_, _, whole) in zip(requests, lengths, strict=True):
        scheduler.add_whole(request) if whole else scheduler.add(request)
    ended, leased = set[str](), list[Request]()
    for _ in range(5000):
        batch = scheduler.schedule()
        if batch is not None:
            done = scheduler.complete(batch)
            ended |= {request.id for request in done}
            handed_out = [item.request for item in batch.prefill if not lengths[int(item.request.id)][2]]
            leased += [request for request in handed_out if request.generated and request.id not in ended]
        if rng.random() < 0.02 and (gone := scheduler.cancel(str(rng.randrange(len(lengths) or 1)))):
            ended.add(gone.id)
        for request in leased:
            if rng.random() < 0.3:
                scheduler.prefill.release(request)
                ended.add(request.id)
        leased = [request for request in leased if request.id not in ended]
        scheduler.preempted()
        if len(ended) == len(requests):
            break
        list(scheduler.whole.running.synced())
        assert held(requests) == blocks.num_blocks - blocks.free
    assert ended == {request.id for request in requests}
    assert blocks.free == blocks.num_blocks
    assert scheduler.waiting_tokens == 0
