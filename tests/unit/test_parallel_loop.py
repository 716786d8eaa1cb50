"""The loop with several steps in flight, as a pipeline has them."""

from __future__ import annotations

import random

import pytest

from distserve.core.blocks import CountingBlocks
from distserve.core.config import Policy
from distserve.core.prefill_scheduler import PrefillScheduler
from distserve.core.request import Request
from distserve.core.scheduler import Limits
from distserve.worker.parallel import RankLost
from engine_node import Node, continuation, copy_pages, prefilled

LIMITS = Limits(max_batch_size=12, max_batch_tokens=10, chunk_tokens=6)


def flow(node: Node, rng: random.Random, ids: list[str]) -> None:
    """Steps end now and then, in order, until all requests are over."""
    for _ in range(3000):
        if all(map(node.over, ids)):
            return
        if rng.random() < 0.5:
            node.executor.land()
        node.turns()
    raise AssertionError(node.events[-5:])


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("policy", ["prefill_first", "chunked_prefill"])
def test_tokens_are_those_of_the_oracle_with_preemption(policy: Policy, stages: int) -> None:
    node = Node("unified", num_blocks=14, limits=LIMITS, policy=policy, stages=stages)
    prompts = {str(n): [(7 * n + i) % 97 for i in range(n)] for n in (1, 3, 4, 5, 8, 9, 13, 20)}
    for id, prompt in prompts.items():
        node.submit(id, prompt, 12)
    flow(node, random.Random(stages), list(prompts))
    for id, prompt in prompts.items():
        assert node.tokens(id) == continuation(prompt, 12), id
    assert node.loop.counters.preemptions > 0
    node.assert_empty()


def test_prefill_and_decode_keep_their_pipelines_full() -> None:
    p, d = Node("prefill", limits=LIMITS, stages=2), Node("decode", limits=LIMITS, stages=2)
    for id in "abcd":
        p.submit(id, [ord(id) % 97] * 8, 9)
    p.turns(3)
    assert len(p.loop._flights) == 3
    for _ in range(4):
        p.executor.land()
    p.turns(6)
    for id in "abcd":
        event = p.last(id)
        entry = {"prompt": [ord(id) % 97] * 8, "max_tokens": 9, "output": [event["token"]]}
        d.submit(id, **entry, handle=event["handle"])
        d.turns()
        copy_pages(p, d)
    for _ in range(2):  # the first two began by themselves
        d.executor.land()
        d.turns(2)
    assert [len(flight.items) for flight in d.loop._flights._flights] == [2, 2]
    flow(d, random.Random(0), list("abcd"))
    for id in "abcd":
        expected = continuation([ord(id) % 97] * 8, 9)
        assert d.tokens(id) == expected[1:]
    p.assert_empty()
    d.assert_empty()


def test_batches_of_prompts_wait_in_front_of_a_busy_stage() -> None:
    p = Node("prefill", limits=LIMITS, stages=2)
    ids = "abcdefgh"
    for id in ids:
        p.submit(id, [1] * 8, 5)
    p.turns(10)
    assert len(p.loop._flights) == 4  # one per stage, and as many behind them
    assert p.load.queued == 4
    p.executor.land()
    p.turns(2)
    assert (len(p.loop._flights), p.load.queued) == (4, 3)
    flow(p, random.Random(0), list(ids))
    for id in ids:
        p.manage("release", id)
    p.assert_empty()


def idle_share(stages: int, lm: int) -> float:
    """Of the stages' time, with a full queue of prompts of very different lengths; a stage takes a fifth of
    the time of 512 tokens, and a time per token.
    """
    rng = random.Random(1)
    scheduler = PrefillScheduler(Limits(64, lm), CountingBlocks(10**6, 16))
    for i in range(400):
        scheduler.add(Request(str(i), max(4, min(2000, int(rng.lognormvariate(5.2, 1.0)))), 2))
    in_flight = stages + Node("prefill", stages=stages).role.ahead
    free, ends, busy = [0.0] * stages, [0.0] * in_flight, 0.0
    while (batch := scheduler.schedule()) is not None:
        stage_s = 0.2 + sum(item.num_tokens for item in batch.prefill) / 512
        at = ends[-in_flight]
        for stage in range(stages):
            free[stage] = at = max(at, free[stage]) + stage_s
        ends.append(at)
        busy += stage_s * stages
        scheduler.complete(batch)
    return 1 - busy / (ends[-1] * stages)


def test_batches_of_about_lm_leave_few_stages_idle() -> None:
    assert idle_share(2, 512) < 0.06 < 0.1 < idle_share(2, 1)  # 1: each prompt alone
    assert idle_share(4, 512) < 0.15 < 0.2 < idle_share(4, 1)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_what_is_in_flight_ends_after_its_step(how: str) -> None:
    node = Node("unified", limits=LIMITS, stages=2)
    node.submit("a", [1] * 8, 30, **({"deadline_s": 5.0} if how == "deadline" else {}))
    node.submit("b", [2] * 8, 6)
    node.turns(2)
    held = node.blocks.free
    if how == "cancel":
        node.manage("cancel", "a")
    node.now += 6
    node.turns()
    assert not node.over("a")
    assert node.blocks.free == held  # its step may still write
    node.executor.land()
    node.turns()
    reason = {"cancel": "cancelled", "deadline": "error"}[how]
    assert node.last("a")["reason"] == reason
    flow(node, random.Random(0), ["b"])
    assert node.tokens("b") == continuation([2] * 8, 6)
    node.assert_empty()


def test_a_cancelled_request_that_ends_with_its_step_ends_once() -> None:
    node = Node("unified", limits=LIMITS, stages=2)
    node.submit("a", [1] * 8, 1)
    node.turns()
    node.manage("cancel", "a")
    node.turns()
    node.executor.land()
    node.turns()
    assert [event.last for event in node.events if event.id == "a"] == [True]
    node.assert_empty()


def test_a_cancelled_prompt_that_was_handed_out_leaves_no_lease() -> None:
    node = Node("prefill", limits=LIMITS, stages=2)
    node.submit("a", [1] * 8, 5)
    node.turns()
    node.manage("release", "a")
    node.turns()
    node.executor.land()
    node.turns()
    node.assert_empty()


def test_a_lost_rank_fails_every_request_and_ends_the_engine() -> None:
    node = Node("prefill", limits=LIMITS, stages=2)
    prefilled_node = Node("prefill", limits=LIMITS)
    prefilled(prefilled_node, "leased", [1] * 5, 4)
    for id in "abc":
        node.submit(id, [1] * 8, 5)
    node.turns(3)
    node.executor.lost = prefilled_node.executor.lost = RankLost("rank 1 has ended with signal SIGKILL")
    node.inbox.poke()
    with pytest.raises(RankLost):
        node.loop.run(node)
    for id in "abc":
        assert node.last(id)["error"] == {
            "code": "UNAVAILABLE",
            "message": "the engine starts again: rank 1 has ended with signal SIGKILL",
        }
    prefilled_node.inbox.poke()
    with pytest.raises(RankLost):
        prefilled_node.loop.run(prefilled_node)
    assert len(prefilled_node.of("leased")) == 1  # its last event had been sent
