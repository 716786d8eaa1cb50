"""Properties of the schedulers: conservation, FCFS, and skipping steps equals single steps."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from distserve.core.batch import Batch
from distserve.core.blocks import BlockManager, CountingBlocks, blocks_for
from distserve.core.config import Policy
from distserve.core.decode_scheduler import DecodeScheduler
from distserve.core.decode_set import DecodeSet
from distserve.core.prefill_scheduler import PrefillScheduler
from distserve.core.request import Request
from distserve.core.scheduler import Limits
from distserve.core.unified_scheduler import UnifiedScheduler

LENGTHS = st.tuples(st.integers(1, 70), st.integers(1, 50))


def decode_set(lengths: list[tuple[int, int]], counting: bool) -> DecodeSet:
    blocks = CountingBlocks(10_000, 16) if counting else BlockManager(10_000, 16)
    running = DecodeSet(blocks)
    for i, (prompt, output) in enumerate(lengths):
        request = Request(str(i), prompt, output + 1, generated=1, computed=prompt)
        blocks.allocate(request, blocks_for(prompt, 16))
        running.join(request)
    return running


@settings(deadline=None)
@given(st.lists(LENGTHS, min_size=1, max_size=12), st.integers(1, 60))
def test_advance_k_equals_k_single_steps(lengths: list[tuple[int, int]], limit: int) -> None:
    skipping, stepping = decode_set(lengths, counting=True), decode_set(lengths, counting=False)
    skipping.begin()
    steps = min(limit, skipping.horizon())
    ended = skipping.advance(steps)
    ended_single: list[Request] = []
    for _ in range(steps):
        stepping.begin()
        ended_single += stepping.advance()
    assert [r.id for r in ended] == [r.id for r in ended_single]
    assert skipping.context == stepping.context
    assert skipping.blocks.free == stepping.blocks.free
    for a, b in zip(skipping.synced(), stepping.synced(), strict=True):
        assert (a.generated, a.computed, a.num_blocks) == (b.generated, b.computed, b.num_blocks)
        assert b.num_blocks == len(b.blocks)


@settings(deadline=None)
@given(st.lists(LENGTHS, min_size=1, max_size=10), st.integers(1, 200))
def test_horizon_is_the_last_step_that_has_its_blocks(lengths: list[tuple[int, int]], spare: int) -> None:
    running = decode_set(lengths, counting=True)
    running.blocks.free = spare
    if running.growth() > spare:
        return
    running.begin()
    horizon = running.horizon()
    ended = running.advance(horizon)
    assert running.blocks.free >= 0
    assert ended or running.growth() > running.blocks.free


def run_step(
    scheduler: DecodeScheduler | UnifiedScheduler, rng: random.Random
) -> tuple[Batch | None, list[Request]]:
    batch = scheduler.schedule()
    if batch is None:
        return None, []
    assert batch.prefill_tokens + batch.num_decodes > 0
    ids = [item.request.id for item in batch.prefill if item.samples]
    ids += [item.request.id for item in batch.decode_items()]
    return batch, scheduler.complete(batch, [i for i in ids if rng.random() < 0.05])


def owned(scheduler: UnifiedScheduler | DecodeScheduler) -> list[int]:
    requests = [*scheduler.waiting, *scheduler.running.synced()]
    if isinstance(scheduler, DecodeScheduler):
        requests += [*scheduler.pulling.values(), *scheduler.incoming]
    return [block for request in requests for block in request.blocks]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(LENGTHS, min_size=1, max_size=25),
    st.sampled_from(["prefill_first", "chunked_prefill"]),
    st.integers(0),
)
def test_unified_conserves_requests_and_blocks(
    lengths: list[tuple[int, int]], policy: Policy, seed: int
) -> None:
    rng = random.Random(seed)
    blocks = BlockManager(12, 16)  # 192 tokens: preemption happens
    scheduler = UnifiedScheduler(Limits(8, 64, 32), blocks, policy)
    pending = [Request(str(i), p, o) for i, (p, o) in enumerate(lengths)]
    ended: set[str] = set()
    cancelled: set[str] = set()
    for _ in range(5000):
        if pending and rng.random() < 0.5:
            scheduler.add(pending.pop(0))
        batch, done = run_step(scheduler, rng)
        ended |= {r.id for r in done}
        if rng.random() < 0.02 and (victim := scheduler.cancel(str(rng.randrange(len(lengths))))):
            cancelled.add(victim.id)
        held = owned(scheduler)
        assert len(held) == len(set(held)) == blocks.num_blocks - blocks.free
        blocks.check_integrity()
        if batch is None and not pending and not scheduler.waiting and not len(scheduler.running):
            break
    assert ended | cancelled == {str(i) for i in range(len(lengths))}
    assert blocks.free == blocks.num_blocks


@settings(max_examples=60, deadline=None)
@given(st.lists(LENGTHS, min_size=1, max_size=25), st.integers(0))
def test_prefill_then_decode_conserves_blocks_and_is_fcfs(lengths: list[tuple[int, int]], seed: int) -> None:
    rng = random.Random(seed)
    source, target = BlockManager(20, 16), BlockManager(14, 16)
    prefill, decode = PrefillScheduler(Limits(8, 64), source), DecodeScheduler(Limits(6, 64), target)
    requests = [Request(str(i), p, o) for i, (p, o) in enumerate(lengths)]
    for request in requests:
        prefill.add(request)
    order: list[str] = []
    ended: list[str] = []
    admitted: list[str] = []
    for _ in range(5000):
        batch = prefill.schedule()
        if batch is not None:
            assert batch.prefill_tokens <= 64 or len(batch.prefill) == 1
            order += [item.request.id for item in batch.prefill]
            ended += [r.id for r in prefill.complete(batch)]
            for item in batch.prefill:
                if item.request.id not in ended:
                    r = item.request
                    decode.add(Request(r.id, r.prompt_len, r.max_tokens, generated=1, computed=r.computed))
        for request in decode.admit():
            assert request.blocks
            admitted.append(request.id)
        for request in list(decode.pulling.values()):
            if rng.random() < 0.7:
                prefill.release(requests[int(request.id)])
                decode.start(request)
        ended += [r.id for r in run_step(decode, rng)[1]]
        held = owned(decode)
        assert len(held) == len(set(held)) == target.num_blocks - target.free
        if len(ended) == len(requests):
            break
    assert order == [r.id for r in requests]
    assert admitted == sorted(admitted, key=int)
    assert sorted(ended) == sorted(r.id for r in requests)
    assert source.free == source.num_blocks
    assert target.free == target.num_blocks


def test_two_owners_keep_a_block_until_both_let_go() -> None:
    blocks = BlockManager(4, 16)
    request = Request("a", 32, 1)
    blocks.allocate(request, 2)
    held = list(request.blocks)
    blocks.hold(held)
    blocks.release(request)
    assert blocks.free == 2
    blocks.drop(held)
    assert blocks.free == 4
    blocks.check_integrity()


def test_lack_of_blocks_preempts_the_last_and_recomputes_it() -> None:
    blocks = BlockManager(6, 16)
    scheduler = UnifiedScheduler(Limits(8, 64), blocks)
    for i in range(2):
        scheduler.add(Request(str(i), 30, 40))
    ended: list[Request] = []
    preempted: list[str] = []
    for _ in range(200):
        batch = scheduler.schedule()
        preempted += [r.id for r in scheduler.preempted()]
        if batch is None:
            break
        ended += scheduler.complete(batch)
    assert preempted == ["1"]
    assert [(r.id, r.generated) for r in ended] == [("0", 40), ("1", 40)]
    assert blocks.free == 6
