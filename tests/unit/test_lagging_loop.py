"""The loop over an executor whose decode steps begin before the tokens of the step before are known."""

from __future__ import annotations

import pytest

from distserve.core.config import Policy
from distserve.core.scheduler import Limits
from distserve.worker.step import LAST_SAMPLED
from engine_node import Node, continuation, copy_pages, prefilled

PROMPTS = {str(n): [(7 * n + i) % 97 for i in range(n)] for n in (1, 3, 4, 5, 8, 13, 20)}


def late(node: Node) -> int:
    """Steps that had a token which only the device knew."""
    return sum(any(item.tokens == [LAST_SAMPLED] for item in step.items) for step in node.executor.steps)


@pytest.mark.parametrize("policy", ["prefill_first", "chunked_prefill"])
def test_tokens_are_those_of_the_oracle_and_most_steps_run_ahead(policy: Policy) -> None:
    node = Node("unified", policy=policy, lag=1)
    for number, (id, prompt) in enumerate(PROMPTS.items()):
        if number % 3 == 2:  # some prompts come while others are being decoded ahead
            seen = late(node)
            node.until(lambda seen=seen: late(node) > seen)
        node.submit(id, prompt, 9)
    node.until(lambda: all(map(node.over, PROMPTS)))
    for id, prompt in PROMPTS.items():
        assert node.tokens(id) == continuation(prompt, 9), id
        assert node.last(id)["reason"] == "length"
    assert late(node) >= 7
    node.assert_empty()
    assert not node.loop._flights


def test_a_request_that_stops_is_computed_once_more_and_no_token_of_it_is_told() -> None:
    node = Node("unified", lag=1)
    texts = {id: continuation(prompt, 12) for id, prompt in PROMPTS.items()}
    stops = {id: next(t for t in text[2:] if text.index(t) >= 2) for id, text in texts.items()}
    for id, prompt in PROMPTS.items():
        node.submit(id, prompt, 12, sampling={"stop_token_ids": [stops[id]]})
    node.until(lambda: all(map(node.over, PROMPTS)))
    for id, text in texts.items():
        assert node.tokens(id) == text[: text.index(stops[id]) + 1], id
        assert node.last(id)["reason"] == "stop"
    node.assert_empty()
    assert node.loop.counters.output_tokens == sum(len(node.tokens(id)) for id in PROMPTS)


def test_preemption_waits_for_the_tokens_that_it_recomputes() -> None:
    limits = Limits(max_batch_size=12, max_batch_tokens=10, chunk_tokens=6)
    node = Node("unified", num_blocks=14, limits=limits, lag=1)
    for id, prompt in PROMPTS.items():
        node.submit(id, prompt, 12)
    node.until(lambda: all(map(node.over, PROMPTS)))
    assert node.loop.counters.preemptions > 0
    for id, prompt in PROMPTS.items():
        assert node.tokens(id) == continuation(prompt, 12), id
    node.assert_empty()


def test_decode_takes_over_cancels_and_expires_between_late_steps() -> None:
    p, d = Node("prefill"), Node("decode", lag=1)
    for id in "abc":
        due = {"deadline_s": 50.0} if id == "c" else {}
        d.submit(**prefilled(p, id, [ord(id) % 97] * 6, 30), **due)
        d.turns()
        copy_pages(p, d)
    d.turns(6)
    assert late(d) > 2
    assert len(d.loop._flights) == 1
    d.manage("cancel", "a")
    d.turns()
    assert d.last("a")["reason"] == "cancelled"
    d.now += 60.0
    d.turns()
    assert d.last("c")["error"]["code"] == "DEADLINE_EXCEEDED"
    d.until(lambda: d.over("b"))
    assert d.tokens("b") == continuation([ord("b") % 97] * 6, 30)[1:]
    d.assert_empty()


def test_a_failed_step_fails_its_batch_and_the_next_requests_are_served() -> None:
    node = Node("unified", lag=1)
    node.submit("a", [1, 2, 3], 20)
    node.submit("b", [4, 5], 20)
    node.turns(6)
    node.executor.fail_with = MemoryError("no room")
    node.turns()
    node.executor.fail_with = None
    for id in "ab":
        assert node.last(id)["error"]["code"] == "INTERNAL"
    node.submit("c", [4, 5], 6)
    node.until(lambda: node.over("c"))
    assert node.tokens("c") == continuation([4, 5], 6)
    node.assert_empty()
