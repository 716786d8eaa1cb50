"""The loop and the roles, driven turn by turn."""

from __future__ import annotations

from functools import partial

import pytest

from distserve.core.config import Policy
from distserve.core.scheduler import Limits
from distserve.engine.loop import MAX_FAILURES, EngineFailure
from distserve.engine.ops import DropOwner
from distserve.transfer.errors import TransferError
from engine_node import OWNER, VOCAB, Node, continuation, copy_pages, next_token, prefilled


@pytest.mark.parametrize("policy", ["prefill_first", "chunked_prefill"])
def test_unified_tokens_are_those_of_the_oracle(policy: Policy) -> None:
    node = Node("unified", policy=policy)
    prompts = {str(n): [(7 * n + i) % VOCAB for i in range(n)] for n in (1, 3, 4, 5, 8, 13, 30)}
    for id, prompt in prompts.items():
        node.submit(id, prompt, 9)
    node.until(lambda: all(map(node.over, prompts)))
    for id, prompt in prompts.items():
        assert node.tokens(id) == continuation(prompt, 9), id
        assert node.last(id)["reason"] == "length"
    node.assert_empty()
    assert node.executor.known == set() or len(node.loop._steps._leaving) == len(node.executor.known)


def test_preempted_requests_are_recomputed_with_the_same_tokens() -> None:
    node = Node("unified", num_blocks=9)
    for id in "abc":
        node.submit(id, [ord(id) % VOCAB] * 6, 18)
    node.until(lambda: all(map(node.over, "abc")))
    assert node.loop.counters.preemptions > 0
    assert sum(node.last(id)["preemptions"] for id in "abc") == node.loop.counters.preemptions
    for id in "abc":
        assert node.tokens(id) == continuation([ord(id) % VOCAB] * 6, 18)
    node.assert_empty()


def test_prefill_hands_out_and_decode_takes_over() -> None:
    p, d = Node("prefill"), Node("decode")
    entry = prefilled(p, "r", [5, 6, 7, 8, 9], 8)
    assert p.load.leases == 1
    assert p.blocks.free == p.blocks.num_blocks - 2
    d.submit(**entry)
    d.turns()
    assert d.last("r")["type"] == "admitted"
    assert d.load.transfers_pending == 1
    copy_pages(p, d)
    d.until(lambda: d.over("r"))
    assert entry["output"] + d.tokens("r") == continuation([5, 6, 7, 8, 9], 8)
    assert [fields["type"] for fields in d.of("r")][:3] == ["admitted", "started", "token"]
    p.assert_empty()
    d.assert_empty()


def test_a_recovered_request_goes_on_after_its_output() -> None:
    expected = continuation([5, 6, 7], 10)
    p, d, u = Node("prefill"), Node("decode"), Node("unified")
    entry = prefilled(p, "r", [5, 6, 7], 10, output=expected[:4])
    assert entry["output"] == expected[:5]
    d.submit(**entry)
    d.turns()
    copy_pages(p, d)
    d.until(lambda: d.over("r"))
    assert d.tokens("r") == expected[5:]
    for node in (u, Node("decode")):  # without a handle: computed on the spot
        node.submit("r", [5, 6, 7], 10, output=expected[:4])
        node.until(partial(node.over, "r"))
        assert node.tokens("r") == expected[4:]
        assert node.of("r")[0]["type"] == "prefilled"
        node.assert_empty()


def test_a_prefill_instance_serves_to_the_end_what_is_marked_so() -> None:
    node = Node("prefill")
    expected = {id: continuation([ord(id) % VOCAB] * 6, 12) for id in "abc"}
    node.submit("a", [ord("a") % VOCAB] * 6, 12, to_end=True)
    node.submit("b", [ord("b") % VOCAB] * 6, 12)
    node.submit("c", [ord("c") % VOCAB] * 6, 12, to_end=True, output=expected["c"][:5])
    node.until(lambda: node.over("a") and node.over("c"))
    assert node.tokens("a") == expected["a"]
    assert node.tokens("c") == expected["c"][5:]
    assert [fields["type"] for fields in node.of("a")] == ["prefilled", *["token"] * 11, "finished"]
    assert "handle" not in node.of("a")[0]
    assert [fields["type"] for fields in node.of("b")] == ["prefilled"]
    assert (node.load.running, node.load.leases) == (0, 1)
    node.submit("a", [ord("a") % VOCAB] * 6, 50, to_end=True)
    node.turns(3)
    assert node.load.running == 1
    node.manage("cancel", "a", "b")
    node.assert_empty()


def test_a_short_prompt_overtakes_a_long_one_between_its_pieces() -> None:
    node = Node("prefill", limits=Limits(max_batch_size=8, max_batch_tokens=24, prefill_chunk_tokens=10))
    long = list(range(60))
    node.submit("long", long, 2)
    node.turns()
    node.submit("short", [1, 2, 3], 2)
    node.submit("gone", long, 2)
    node.turns()
    assert node.over("short")
    assert not node.over("long")
    node.until(lambda: node.over("long"))
    assert node.tokens("long") == continuation(long, 1)
    node.turns()
    node.manage("cancel", "gone")  # after its first piece
    node.turns()
    assert node.last("gone")["reason"] == "cancelled"
    node.manage("release", "long", "short")
    node.assert_empty()
    node.submit("failed", long, 2)
    node.turns()
    node.executor.fail_with = MemoryError("no room")
    node.turns()
    assert node.last("failed")["error"]["code"] == "INTERNAL"
    node.assert_empty()


@pytest.mark.parametrize("role", ["prefill", "unified", "decode"])
def test_a_request_that_ends_with_its_first_token_is_not_handed_out(role: str) -> None:
    node = Node(role)
    node.submit("length", [5, 6], 1)
    stop = next_token([5, 6])
    node.submit("stop", [5, 6], 9, sampling={"stop_token_ids": [stop]})
    node.until(lambda: node.over("length") and node.over("stop"))
    for id, reason in (("length", "length"), ("stop", "stop")):
        (event,) = node.of(id)
        assert (event["type"], event["finished"], event.get("handle")) == ("prefilled", reason, None)
    node.assert_empty()


def test_end_tokens_count_from_min_tokens_on() -> None:
    node = Node("unified")
    expected = continuation([5, 6, 7], 6)
    node.submit("r", [5, 6, 7], 6, sampling={"stop_token_ids": expected[:5], "min_tokens": 4})
    node.until(lambda: node.over("r"))
    assert node.tokens("r") == expected[:4]
    assert node.last("r")["reason"] == "stop"


def test_cancel_in_every_stage_of_prefill() -> None:
    node = Node("prefill", num_blocks=4)
    prefilled(node, "leased", [1] * 12, 4)
    node.submit("queued", [2] * 8, 4)  # two blocks, one is free
    node.turns()
    assert node.load.queued == 1
    node.manage("cancel", "queued", "nobody")
    node.turns()
    assert node.last("queued")["reason"] == "cancelled"
    node.manage("release", "leased")
    node.assert_empty()
    assert len(node.of("leased")) == 1  # its last event was `prefilled`


def test_cancel_in_every_stage_of_decode() -> None:
    p, d = Node("prefill"), Node("decode", limits=Limits(max_batch_size=2, max_batch_tokens=24))
    for id in ("running", "pulling", "incoming"):
        entry = prefilled(p, id, [3] * 6, 50)
        d.submit(**entry)
        d.turns()
        if id == "running":
            copy_pages(p, d)
            d.turns(3)
    assert (d.load.running, d.load.transfers_pending, d.load.queued) == (1, 1, 1)
    d.manage("cancel", "incoming", "running", "pulling")
    d.turns(2)
    for id in ("running", "pulling", "incoming"):
        assert d.last(id)["reason"] == "cancelled"
    assert d.blocks.free == d.blocks.num_blocks - 2  # the copy still writes
    assert d.load.transfers_pending == 1
    assert d.puller.cancelled == [d.puller.copies[-1][2]]
    copy_pages(p, d)
    d.assert_empty()


def test_blocks_under_a_copy_are_not_reused() -> None:
    p, d = Node("prefill"), Node("decode", num_blocks=5)
    d.submit(**prefilled(p, "a", [3] * 8, 5))
    d.turns()
    d.manage("cancel", "a")
    d.submit(**prefilled(p, "b", [4] * 8, 5))
    d.turns(2)
    assert not set(d.puller.copies[0][1]) & set(d.puller.copies[1][1])
    copy_pages(p, d, 1)
    d.until(lambda: d.over("b"))
    assert d.tokens("b") == continuation([4] * 8, 5)[1:]
    copy_pages(p, d, 0)
    d.assert_empty()


def test_a_failed_copy_ends_the_request_and_returns_its_blocks() -> None:
    p, d = Node("prefill"), Node("decode")
    d.submit(**prefilled(p, "lost", [3] * 6, 5))
    d.submit(**prefilled(p, "stale", [3] * 6, 5))
    d.turns()
    d.puller.copies[0][2].set_exception(TransferError("UNAVAILABLE", "peer_gone", "no source"))
    d.puller.copies[1][2].set_exception(TransferError("FAILED_PRECONDITION", "stale_epoch", "epoch=7"))
    d.turns()
    assert d.last("lost")["error"] == {"code": "UNAVAILABLE", "message": "kv transfer failed: no source"}
    assert d.last("stale")["error"]["code"] == "FAILED_PRECONDITION"
    assert d.loop.counters.transfers_failed == 2
    d.assert_empty()


def test_leases_expire_unless_renewed() -> None:
    node = Node("prefill")
    prefilled(node, "a", [1] * 5, 4)
    prefilled(node, "b", [1] * 5, 4)
    node.now += 9
    node.manage("renew", "b", "nobody")
    node.turns()
    node.now += 2
    node.turns()
    assert node.load.leases == 1
    node.now += 9
    node.assert_empty()


def test_deadlines_end_requests_wherever_they_are() -> None:
    p, d = Node("prefill"), Node("decode")
    d.submit(**prefilled(p, "pulling", [3] * 6, 50), deadline_s=3.0)
    d.submit("running", [3] * 6, 50, deadline_s=3.0)
    d.submit("late", [3] * 6, 50, deadline_s=0.0)
    d.turns(3)
    d.now += 4
    d.turns()
    for id in ("pulling", "running", "late"):
        assert d.last(id)["error"]["code"] == "DEADLINE_EXCEEDED"
    copy_pages(p, d)
    d.assert_empty()


def test_an_owner_that_is_gone_leaves_nothing() -> None:
    p = Node("prefill", num_blocks=4)
    prefilled(p, "leased", [1] * 12, 4)
    p.submit("queued", [2] * 8, 4)
    p.turns()
    p.inbox.post(DropOwner(OWNER))
    p.assert_empty()
    assert len(p.loop._ledger) == 0
    assert p.loop._ledger.of(OWNER) == []


@pytest.mark.parametrize("policy", ["prefill_first", "chunked_prefill"])
def test_a_failing_step_fails_its_batch_only(policy: Policy) -> None:
    node = Node("unified", policy=policy, limits=Limits(max_batch_size=2, max_batch_tokens=8, chunk_tokens=6))
    node.submit("a", [1] * 4, 40)
    node.submit("b", [2] * 9, 5)
    node.turns(2)
    node.submit("c", [3] * 4, 5)
    node.executor.fail_with = MemoryError("no room")
    node.turns()
    node.executor.fail_with = None
    assert node.last("a")["error"] == {"code": "INTERNAL", "message": "the step failed: MemoryError: no room"}
    node.until(lambda: node.over("c"))
    assert node.tokens("c") == continuation([3] * 4, 5)
    node.until(lambda: node.over("b"))
    node.assert_empty()


def test_steps_that_keep_failing_end_the_engine() -> None:
    node = Node("prefill")
    node.executor.fail_with = RuntimeError("broken")
    for i in range(MAX_FAILURES - 1):
        node.submit(str(i), [1], 2)
        node.turns()
    node.submit("last", [1], 2)
    with pytest.raises(EngineFailure, match="8 steps failed in succession, the last with: broken"):
        node.turns()


@pytest.mark.parametrize("kind", ["CUDA error", "Triton Error [CUDA]"])
def test_a_broken_device_ends_the_engine_at_once(kind: str) -> None:
    node = Node("prefill")
    node.executor.fail_with = RuntimeError(f"{kind}: an illegal memory access was encountered")
    node.submit("r", [1], 2)
    with pytest.raises(EngineFailure, match="illegal memory access"):
        node.turns()


def test_a_step_that_fails_on_the_device_ends_the_engine() -> None:
    """It had begun well."""
    node = Node("prefill", stages=2)
    node.submit("r", [1], 2)
    node.turns()
    assert node.executor.steps
    node.executor.lost = RuntimeError("CUDA error: an illegal instruction was encountered")
    with pytest.raises(EngineFailure, match="a step failed on the device: CUDA error: an illegal instr"):
        node.turns()


def test_stage_times() -> None:
    p, d = Node("prefill"), Node("decode")
    p.submit("r", [3] * 6, 5)
    p.now += 2
    p.turns()
    assert (p.last("r")["queue_s"], p.last("r")["prefill_s"]) == (2.0, 0.0)
    d.submit("r", [3] * 6, 5, output=[p.last("r")["token"]], handle=p.last("r")["handle"])
    d.now += 1
    d.turns()
    d.now += 4
    copy_pages(p, d)
    d.turns()
    started = next(fields for fields in d.of("r") if fields["type"] == "started")
    assert (started["queue_s"], started["transfer_s"]) == (1.0, 4.0)
    d.now += 3
    d.until(lambda: d.over("r"))
    assert d.last("r")["decode_s"] == 3.0
