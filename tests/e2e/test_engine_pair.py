"""Real engine processes, real sockets, real transfers: prefill + pull + decode == unified == transformers.

A small driver takes the orchestrator's place. After every test all blocks are free and nothing is pending.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from distserve.serving.schema import ServingError
from engine_process import EngineProcess, Record
from model_zoo import Zoo, ZooModel, prompt

BLOCK = 16
BLOCKS = 64
OUTPUT = 20
LENGTHS = (2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1)
TIMEOUT_S = 1.5
GREEDY: dict[str, Any] = {"ignore_eos": True}


def settings(model: ZooModel, instance: str, role: str, core: int, **more: Any) -> dict[str, Any]:
    return {
        "instance": instance,
        "role": role,
        "model": str(model.folder),
        "devices": [f"cpu:{core}"],
        "block_size": BLOCK,
        "num_blocks": BLOCKS,
        "transfer_timeout_s": TIMEOUT_S,
        **more,
    }


class Fleet:
    """The engines of this module, and what an orchestrator would do with them."""

    def __init__(self, model: ZooModel, engines: dict[str, EngineProcess]) -> None:
        self.model = model
        self.engines = engines
        self.p, self.d = engines["prefill"], engines["decode"]
        self._count = 0

    def ids(self, count: int) -> list[str]:
        self._count += count
        return [f"r{n}" for n in range(self._count - count, self._count)]

    def prefill(self, entry: dict[str, Any], p: EngineProcess | None = None) -> Record:
        p = p or self.p
        p.caller.accept(entry)
        return p.caller.wait(entry["id"], lambda record: record.event("prefilled"))

    def handed_out(self, entry: dict[str, Any], p: EngineProcess | None = None) -> dict[str, Any]:
        """The entry for decode, with handle and first token."""
        event = self.prefill(entry, p).events[-1]
        return {**entry, "output": [*entry.get("output", []), event["token"]], "handle": event["handle"]}

    def disaggregated(self, entries: Sequence[dict[str, Any]]) -> list[list[int]]:
        self.p.caller.accept(*entries)
        for entry in entries:
            self.d.caller.accept(self.decode_entry(entry))
        return [self.p.caller.records[e["id"]].tokens + self.decoded(e["id"]).tokens for e in entries]

    def decode_entry(self, entry: dict[str, Any]) -> dict[str, Any]:
        event = self.p.caller.wait(entry["id"], lambda record: record.event("prefilled")).events[-1]
        return {**entry, "output": [event["token"]], "handle": event["handle"]}

    def decoded(self, id: str) -> Record:
        record = self.d.caller.finish(id)
        assert record.error is None, record.error
        return record

    def unified(self, policy: str, entries: Sequence[dict[str, Any]]) -> list[list[int]]:
        caller = self.engines[policy].caller
        caller.accept(*entries)
        return [caller.finish(entry["id"]).tokens for entry in entries]

    def entries(self, prompts: Sequence[list[int]], sampling: dict[str, Any]) -> list[dict[str, Any]]:
        ids = self.ids(len(prompts))
        return [
            {"id": id, "prompt": tokens, "max_tokens": OUTPUT, "sampling": sampling}
            for id, tokens in zip(ids, prompts, strict=True)
        ]


@contextmanager
def stopped(engine: EngineProcess) -> Iterator[None]:
    engine.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        engine.process.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def all_engines(zoo: Zoo) -> Iterator[Fleet]:
    torch.set_num_threads(1)  # the engines have the cores
    model = zoo("llama-gqa-tied")
    configs = {
        "prefill": settings(model, "p0", "prefill", 0),
        "decode": settings(model, "d0", "decode", 1),
        "prefill_first": settings(model, "u0", "unified", 0),
        "chunked_prefill": settings(model, "u1", "unified", 1, policy="chunked_prefill", chunk_tokens=24),
    }
    with ExitStack() as stack, ThreadPoolExecutor(len(configs)) as pool:
        started = {name: pool.submit(EngineProcess, **config) for name, config in configs.items()}
        engines = {name: stack.enter_context(future.result()) for name, future in started.items()}
        yield Fleet(model, engines)


@pytest.fixture
def fleet(all_engines: Fleet) -> Iterator[Fleet]:
    yield all_engines
    for engine in all_engines.engines.values():
        engine.settled()


@pytest.mark.parametrize("length", LENGTHS)
def test_one_request_equals_transformers(fleet: Fleet, length: int) -> None:
    tokens = prompt(length)
    expected = [fleet.model.greedy(tokens, OUTPUT)]
    assert fleet.disaggregated(fleet.entries([tokens], GREEDY)) == expected
    assert fleet.unified("prefill_first", fleet.entries([tokens], GREEDY)) == expected
    assert fleet.unified("chunked_prefill", fleet.entries([tokens], GREEDY)) == expected


def test_many_requests_equal_transformers(fleet: Fleet) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate((*LENGTHS, 1, 5, 48, 49, 16) * 2)]
    expected = [fleet.model.greedy(tokens, OUTPUT) for tokens in prompts]
    assert fleet.disaggregated(fleet.entries(prompts, GREEDY)) == expected
    assert fleet.unified("prefill_first", fleet.entries(prompts, GREEDY)) == expected
    assert fleet.unified("chunked_prefill", fleet.entries(prompts, GREEDY)) == expected


def test_seeded_sampling_depends_on_neither_batch_nor_instance(fleet: Fleet) -> None:
    prompts = [prompt(length, 7) for length in (*LENGTHS, 3)]
    sampling = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 11, "presence_penalty": 0.5}
    sampling |= {"repetition_penalty": 1.1, "logprobs": 2, "ignore_eos": True}
    apart = fleet.disaggregated(fleet.entries(prompts, sampling))
    assert apart == fleet.unified("prefill_first", fleet.entries(prompts, sampling))
    alone = [fleet.unified("chunked_prefill", fleet.entries([tokens], sampling))[0] for tokens in prompts]
    assert apart == alone
    assert apart != [fleet.model.greedy(tokens, OUTPUT) for tokens in prompts]
    other = fleet.disaggregated(fleet.entries(prompts, {**sampling, "seed": 12}))
    assert all(a != b for a, b in zip(apart, other, strict=True))


def test_a_continued_request_repeats_and_misses_nothing(fleet: Fleet) -> None:
    tokens = prompt(33)
    expected = fleet.model.greedy(tokens, OUTPUT)
    (entry,) = fleet.entries([tokens], GREEDY)
    entry["output"] = expected[:7]
    moved = fleet.handed_out(entry)
    assert moved["output"] == expected[:8]
    fleet.d.caller.accept(moved)
    assert fleet.decoded(entry["id"]).tokens == expected[8:]
    (entry,) = fleet.entries([tokens], GREEDY)
    fleet.d.caller.accept({**entry, "output": expected[:7]})  # no prefill instance is left
    assert fleet.decoded(entry["id"]).tokens == expected[7:]


def test_a_request_that_ends_with_its_first_token_moves_nothing(fleet: Fleet) -> None:
    before = fleet.p.status()["transfers"]
    tokens = prompt(20)
    first = fleet.model.greedy(tokens, 1)
    one, stop = fleet.entries([tokens, tokens], {**GREEDY, "stop_token_ids": first})
    for entry, reason in (({**one, "max_tokens": 1, "sampling": GREEDY}, "length"), (stop, "stop")):
        record = fleet.prefill(entry)
        assert (record.tokens, record.finished) == (first, reason)
        assert "handle" not in record.events[0]
    assert fleet.p.settled()["transfers"] == before


def test_cancel_while_queued_and_while_leased(fleet: Fleet) -> None:
    fill = fleet.entries([prompt(200, seed) for seed in range(4)], GREEDY)  # 13 of 64 blocks each
    for entry in fill:
        fleet.prefill(entry)
    (queued,) = fleet.entries([prompt(230)], GREEDY)
    fleet.p.caller.accept(queued)
    deadline = time.monotonic() + 10
    while ((status := fleet.p.status())["queued"], status["leases"]) != (1, 4):
        assert time.monotonic() < deadline, status
        time.sleep(0.02)
    fleet.p.caller.manage("cancel", queued["id"], fill[0]["id"])
    assert fleet.p.caller.finish(queued["id"]).finished == "cancelled"
    fleet.p.caller.manage("release", *(entry["id"] for entry in fill[1:]))


def test_cancel_during_the_pull(fleet: Fleet) -> None:
    entry = fleet.handed_out(fleet.entries([prompt(40)], GREEDY)[0])
    with stopped(fleet.p):
        fleet.d.caller.accept(entry)
        fleet.d.caller.wait(entry["id"], lambda record: record.event("admitted"))
        fleet.d.caller.manage("cancel", entry["id"])
        assert fleet.d.caller.finish(entry["id"]).finished == "cancelled"
        fleet.d.settled(TIMEOUT_S + 1)
    fleet.p.caller.manage("release", entry["id"])


def test_cancel_while_decoding(fleet: Fleet) -> None:
    entry = {**fleet.entries([prompt(5)], GREEDY)[0], "max_tokens": 240}
    fleet.d.caller.accept(fleet.handed_out(entry))
    fleet.d.caller.wait(entry["id"], lambda record: record.tokens)
    fleet.d.caller.manage("cancel", entry["id"])
    record = fleet.d.caller.finish(entry["id"])
    assert record.finished == "cancelled"
    assert len(record.tokens) < 239


def test_a_silent_prefill_instance_fails_its_transfers_only(fleet: Fleet) -> None:
    moved = fleet.handed_out(fleet.entries([prompt(40)], GREEDY)[0])
    (other,) = fleet.entries([prompt(9)], GREEDY)
    with stopped(fleet.p):
        fleet.d.caller.accept(moved, other)
        assert fleet.decoded(other["id"]).tokens == fleet.model.greedy(prompt(9), OUTPUT)
        record = fleet.d.caller.finish(moved["id"], TIMEOUT_S + 2)
    assert record.error is not None
    assert record.error["code"] == "UNAVAILABLE"
    assert "kv transfer failed" in record.error["message"]
    fleet.p.caller.manage("release", moved["id"])
    again = fleet.entries([prompt(40)], GREEDY)
    assert fleet.disaggregated(again) == [fleet.model.greedy(prompt(40), OUTPUT)]


def test_handles_are_good_once_and_for_their_engine_only(fleet: Fleet) -> None:
    moved = fleet.handed_out(fleet.entries([prompt(40)], GREEDY)[0])
    handle = moved["handle"]
    forged = {**moved, "id": "forged", "handle": {**handle, "nonce": bytes(16)}}
    stale = {**moved, "id": "stale", "handle": {**handle, "epoch": handle["epoch"] - 1}}
    other = {**moved, "id": "other", "handle": {**handle, "layout": {**handle["layout"], "dtype": "bf16"}}}
    short = {**moved, "id": "short", "prompt": moved["prompt"][:-1]}
    refused = {result["id"]: result["error"] for result in fleet.d.caller.submit(other, short)}
    assert refused["other"]["code"] == "FAILED_PRECONDITION"
    assert "dtype='bf16'" in refused["other"]["message"]
    assert "covers 40 tokens" in refused["short"]["message"]
    for bad in (forged, stale):
        fleet.d.caller.accept(bad)
        record = fleet.d.caller.finish(bad["id"])
        assert record.error is not None
        assert record.error["code"] == "FAILED_PRECONDITION", record.error
        assert record.tokens == []
    fleet.d.caller.accept(moved)
    fleet.decoded(moved["id"])
    fleet.d.caller.accept({**moved, "id": "again"})
    error = fleet.d.caller.finish("again").error
    assert error is not None
    assert error["code"] == "FAILED_PRECONDITION"


def test_kill_9_of_the_prefill_engine_during_a_pull(fleet: Fleet) -> None:
    doomed = EngineProcess(**settings(fleet.model, "p1", "prefill", 0))
    moved = fleet.handed_out(fleet.entries([prompt(40)], GREEDY)[0], doomed)
    doomed.process.send_signal(signal.SIGSTOP)
    fleet.d.caller.accept(moved)
    fleet.d.caller.wait(moved["id"], lambda record: record.event("admitted"))
    doomed.kill()
    record = fleet.d.caller.finish(moved["id"])
    assert record.error is not None
    assert record.error["code"] == "UNAVAILABLE"
    assert "deadline" not in record.error["message"]  # by the end of its connection
    doomed.connection.close()
    doomed.caller.stop()
    fleet.d.settled()
    with EngineProcess(**settings(fleet.model, "p1", "prefill", 0)) as reborn:
        late = fleet.handed_out(fleet.entries([prompt(17)], GREEDY)[0], reborn)
        stale = {**moved["handle"], "addresses": late["handle"]["addresses"]}
        fleet.d.caller.accept({**moved, "id": "stale-p1", "handle": stale}, late)
        assert fleet.decoded(late["id"]).tokens == fleet.model.greedy(prompt(17), OUTPUT)[1:]
        error = fleet.d.caller.finish("stale-p1").error
        assert error is not None
        assert error["code"] == "FAILED_PRECONDITION"
        assert "epoch" in error["message"]
        reborn.settled()


def test_preemption_changes_no_token(fleet: Fleet) -> None:
    prompts = [prompt(30, seed) for seed in range(4)]
    expected = [fleet.model.greedy(tokens, 50) for tokens in prompts]
    with EngineProcess(**settings(fleet.model, "d1", "decode", 1, num_blocks=13)) as tiny:
        entries = [{**entry, "max_tokens": 50} for entry in fleet.entries(prompts, GREEDY)]
        for entry in entries:
            tiny.caller.accept(fleet.handed_out(entry))
        assert [tiny.caller.finish(entry["id"]).tokens for entry in entries] == [e[1:] for e in expected]
        assert tiny.settled()["preemptions"] > 0


def test_a_dead_owner_leaves_nothing(fleet: Fleet) -> None:
    with EngineProcess(**settings(fleet.model, "p2", "prefill", 0, lease_s=0.3, heartbeat_s=0.1)) as engine:
        engine.caller.stop()
        call = {"owner": "dead", "epoch": 1, "requests": fleet.entries([prompt(40)], GREEDY)}
        assert engine.connection.call("submit", **call)["results"][0]["ok"]
        engine.settled(3)


def test_sigterm_ends_in_order(fleet: Fleet) -> None:
    engine = EngineProcess(**settings(fleet.model, "u2", "unified", 0))
    engine.process.terminate()
    assert engine.process.wait(5) == 0
    engine.connection.close()
    engine.caller.stop()


def test_a_bad_configuration_is_refused_by_name(fleet: Fleet) -> None:
    bad = {"model": "/nowhere", "devices": ["cpu:4096"]}
    with pytest.raises(ServingError, match=r"unknown key 'polcy'; did you mean 'policy'\?"):
        EngineProcess(**settings(fleet.model, "u3", "unified", 0, polcy="prefill_first"))
    with pytest.raises(ServingError, match="no core 4096"):
        EngineProcess(**{**settings(fleet.model, "u3", "unified", 0), **bad})


def test_the_loop_does_not_spin_while_idle(fleet: Fleet) -> None:
    engine = fleet.d
    ticks = [_cpu_ticks(engine.process)]
    time.sleep(1.0)
    ticks.append(_cpu_ticks(engine.process))
    assert ticks[1] - ticks[0] <= 3  # of 100 per second


def _cpu_ticks(process: subprocess.Popen[bytes]) -> int:
    with open(f"/proc/{process.pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
