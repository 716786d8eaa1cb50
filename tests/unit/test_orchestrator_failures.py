"""The orchestrator when clients go, and when instances die, restart, fall silent or refuse."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from distserve.serving.orchestrator_config import InstanceSpec
from distserve.serving.schema import ServingError
from engine_double import EngineDouble, generate
from orchestrator_bench import CONFIG, VOCAB, Bench, Recorder, run, scenario, text_of

PROMPT = [1, 2, 3]


# cancellation


@pytest.mark.parametrize("stage", ["queued", "prefilling", "handoff", "decode queue", "decoding", "unsent"])
def test_cancel_in_every_stage_frees_everything(stage: str) -> None:
    async def body(bench: Bench) -> None:
        prefill, decode = bench.engine("prefill_0"), bench.engine("decode_0")
        prefill.paused = stage in ("queued", "prefilling", "unsent")
        decode.paused = stage == "decode queue"
        if stage == "queued":
            await bench.request([9] * 512, 4)  # takes all credits
        if stage == "handoff":
            decode.refuse["submit"] = ServingError("RESOURCE_EXHAUSTED", "full")
        sink = await bench.request(PROMPT, 1000)
        session = bench.session
        if stage == "queued":
            assert session.state == "queued"
        elif stage == "prefilling":
            await bench.until(lambda: len(prefill.queue) == 1)
        elif stage == "handoff":
            await bench.until(lambda: session.state == "handoff" and len(prefill.leases) == 1)
        elif stage == "decode queue":
            await bench.until(lambda: len(decode.queue) == 1)
        elif stage == "decoding":
            await sink.tokens(5)
        bench.orchestrator.cancel(session)
        await sink.end()
        assert sink.error is not None
        assert sink.error.code == "CANCELLED"
        prefill.paused = decode.paused = False
        for other in list(bench.orchestrator.sessions.values()):
            bench.orchestrator.cancel(other)
        await bench.settled()
        bench.orchestrator.cancel(session)  # again: no effect

    run(body)


@scenario()
async def test_lost_cancel_is_repeated(bench: Bench) -> None:
    sink = await bench.request(PROMPT, 4000)
    await sink.tokens(3)
    decode = bench.engine("decode_0")

    async def lost(call: dict[str, Any]) -> bytes:
        del decode._cancel  # type: ignore[attr-defined]
        raise ServingError("DEADLINE_EXCEEDED", "lost")

    decode._cancel = lost  # type: ignore[method-assign]
    bench.orchestrator.cancel(bench.session)
    await bench.settled()


# failures


@scenario()
async def test_lost_replies_lose_no_token(bench: Bench) -> None:
    bench.engine("decode_0").lose_replies = {"poll": 2}
    bench.engine("prefill_0").lose_replies = {"poll": 1, "submit": 1}
    sink = await bench.request(PROMPT, 30)
    await sink.end()
    assert sink.ids == generate(PROMPT, 30, VOCAB)
    assert sink.final.stage_times["recoveries"] == 0


async def continued(bench: Bench, fault: Callable[[EngineDouble], None], **params: Any) -> Recorder:
    """Start a stream, let the fault hit the decode instance in the middle, and check the whole output."""
    tokens = generate(PROMPT, 60, VOCAB)
    sink = await bench.request(PROMPT, 60, **params)
    await sink.tokens(10)
    assert bench.session.link is not None
    fault(bench.engine(bench.session.link.name))
    await sink.end()
    assert sink.ids == tokens
    assert sink.text == text_of(tokens)
    return sink


TWO_DECODES = ("prefill", "decode", "decode")


@scenario(roles=TWO_DECODES)
async def test_dead_decode_instance_is_continued_elsewhere(bench: Bench) -> None:
    sink = await continued(bench, EngineDouble.kill)
    times = sink.final.stage_times
    assert times["recoveries"] == 1
    stages = ("prefill_queue_s", "prefill_s", "decode_queue_s", "transfer_s", "decode_s")
    assert sum(times[stage] for stage in stages) == pytest.approx(times["e2e_s"])
    await bench.settled()


@scenario(roles=TWO_DECODES)
async def test_new_epoch_in_mid_stream(bench: Bench) -> None:
    await continued(bench, EngineDouble.restart)
    await bench.settled()


@scenario()
async def test_only_decode_instance_restarts(bench: Bench) -> None:
    await continued(bench, EngineDouble.restart)
    await bench.settled()


@scenario(roles=TWO_DECODES)
async def test_silent_decode_instance_is_continued_and_cleaned_up_later(bench: Bench) -> None:
    frozen: list[EngineDouble] = []

    def freeze(engine: EngineDouble) -> None:
        engine.freeze()
        frozen.append(engine)

    await continued(bench, freeze)
    frozen[0].thaw()
    await bench.settled()


@scenario(roles=TWO_DECODES)
async def test_eviction_is_continued(bench: Bench) -> None:
    await continued(bench, lambda engine: engine.evict(next(iter(engine.running))))
    await bench.settled()


@scenario(roles=TWO_DECODES)
async def test_stop_string_across_a_failure(bench: Bench) -> None:
    tokens = generate(PROMPT, 60, VOCAB)
    stop = text_of(tokens[8:14])
    sink = await bench.request(PROMPT, 60, stop=(stop,))
    await sink.tokens(10)
    assert bench.session.link is not None
    bench.engine(bench.session.link.name).kill()
    await sink.end()
    assert (sink.text, sink.ids) == (text_of(tokens[:8]), tokens[:14])


@scenario(roles=("unified", "unified"))
async def test_unified_failure_is_continued(bench: Bench) -> None:
    await continued(bench, EngineDouble.kill)
    await bench.settled()


@scenario(roles=("prefill", "prefill", "decode"))
async def test_dead_prefill_instance_before_and_after_token_one(bench: Bench) -> None:
    for engine in bench.network.engines.values():
        engine.paused = engine.role == "prefill"
    early = await bench.request(PROMPT, 5)
    await bench.until(lambda: any(engine.queue for engine in bench.network.engines.values()))
    assert bench.session.link is not None
    bench.engine(bench.session.link.name).kill()
    for engine in bench.network.engines.values():
        engine.paused = engine.role == "decode"
    await early.tokens(1)
    await bench.until(lambda: bool(bench.engine("decode_0").queue))
    next(e for e in bench.network.engines.values() if e.role == "prefill" and not e.dead).restart()
    bench.engine("decode_0").paused = False  # its pull meets a stale handle
    await early.end()
    assert early.ids == generate(PROMPT, 5, VOCAB)
    await bench.settled()


@scenario()
async def test_recoveries_are_bounded(bench: Bench) -> None:
    bench.engine("decode_0").refuse["submit"] = ServingError("INTERNAL", "always")
    sink = await bench.request(PROMPT, 10)
    await sink.end()
    assert sink.error is not None
    assert sink.error.code == "UNAVAILABLE"
    assert "always" in sink.error.message
    await bench.settled()


@scenario()
async def test_no_decode_instance_left_fails_in_time(bench: Bench) -> None:
    sink = await bench.request(PROMPT, 1000)
    await sink.tokens(5)
    bench.engine("decode_0").kill()
    await sink.end(3.0)
    assert sink.error is not None
    assert sink.error.code == "UNAVAILABLE"
    assert not bench.orchestrator.ready
    bench.engine("decode_0").restart()
    await bench.until(lambda: bench.orchestrator.ready)
    again = await bench.request(PROMPT, 5)
    await again.end()
    assert again.ids == generate(PROMPT, 5, VOCAB)


@scenario(config=dataclasses.replace(CONFIG, hop_timeout_s=0.3))
async def test_request_that_an_instance_has_forgotten(bench: Bench) -> None:
    sink = await bench.request(PROMPT, 100)
    await sink.tokens(5)
    bench.engine("decode_0").running.clear()
    await sink.end()
    assert sink.ids == generate(PROMPT, 100, VOCAB)


@scenario(roles=("prefill", "prefill", "decode", "decode"))
async def test_instance_that_submits_do_not_reach_is_left_alone(bench: Bench) -> None:
    """A dead instance looks idle until its poll finds out: no request may spend its continuations on it."""
    for name in ("prefill_0", "decode_0"):
        bench.engine(name).lose_replies = {"submit": 1000}
    sinks = [await bench.request([n], 5) for n in range(6)]
    for n, sink in enumerate(sinks):
        await sink.end()
        assert sink.ids == generate([n], 5, VOCAB)
        assert sink.final.stage_times["recoveries"] <= 2
    await bench.settled()


@scenario(roles=TWO_DECODES)
async def test_full_decode_instance_is_passed_over(bench: Bench) -> None:
    bench.engine("decode_0").refuse["submit"] = ServingError("RESOURCE_EXHAUSTED", "full")
    sinks = [await bench.request([n], 5) for n in range(6)]
    for n, sink in enumerate(sinks):
        await sink.end()
        assert sink.ids == generate([n], 5, VOCAB)
        assert sink.final.stage_times["recoveries"] == 0
        assert sink.final.stage_times["decode_instance"] == "decode_1"


@scenario()
async def test_invalid_argument_of_an_instance_reaches_the_client(bench: Bench) -> None:
    bench.engine("prefill_0").refuse["submit"] = ServingError("INVALID_ARGUMENT", "top_k=-7: no")
    sink = await bench.request(PROMPT, 5)
    await sink.end()
    assert sink.error is not None
    assert (sink.error.code, sink.error.message) == ("INVALID_ARGUMENT", "top_k=-7: no")


@pytest.mark.parametrize(("field", "value"), [("model_hash", "other"), ("dtype", "bf16")])
def test_instance_whose_kv_does_not_fit_is_not_used(field: str, value: str) -> None:
    async def body(bench: Bench) -> None:
        sinks = [await bench.request([n], 3) for n in range(6)]
        for sink in sinks:
            await sink.end()
            assert sink.final.stage_times["decode_instance"] == "decode_0"
        entry = next(e for e in bench.orchestrator.fleet.describe() if e["instance"] == "decode_1")
        assert (entry["usable"], entry["misfit"]) == (False, True)
        assert entry["reason"].startswith(f"{field}={value!r}: prefill_0 has ")

    run(body, roles=TWO_DECODES, engines={"decode_1": {field: value}})


@scenario()
async def test_lease_is_renewed_while_decode_waits(bench: Bench) -> None:
    bench.engine("decode_0").paused = True
    sink = await bench.request(PROMPT, 3)
    await bench.until(lambda: bench.network.calls.count(("prefill_0", "renew")) >= 2)
    bench.engine("decode_0").paused = False
    await sink.end()
    await bench.settled()
    before = bench.network.calls.count(("prefill_0", "renew"))
    await asyncio.sleep(0.5)
    assert bench.network.calls.count(("prefill_0", "renew")) == before


@scenario(step_s=0.01)
async def test_chaos_every_request_ends_once_and_right(bench: Bench) -> None:
    """Engines restart again and again under load; what completes is right, and nothing stays behind."""
    for name in ("prefill_1", "decode_1"):
        role = name.partition("_")[0]
        bench.network.add(name, role)
        bench.orchestrator.add_link(InstanceSpec(name, role))  # type: ignore[arg-type]
    prompts = [[n, n + 1] for n in range(60)]
    sinks = [await bench.request(prompt, 40) for prompt in prompts]
    for name in ("decode_0", "prefill_1", "decode_1", "prefill_0"):
        await asyncio.sleep(0.1)
        bench.engine(name).restart()
    for prompt, sink in zip(prompts, sinks, strict=True):
        await sink.end(20.0)
        assert sink.error is None, sink.error
        assert sink.ids == generate(prompt, 40, VOCAB)
    await bench.settled()


def test_stop_lets_running_requests_end() -> None:
    sinks: list[Recorder] = []

    async def body(bench: Bench) -> None:
        sinks.append(await bench.request(PROMPT, 20))
        sinks.append(await bench.request(PROMPT, 4000))

    run(body)
    assert sinks[0].final.completion_tokens == 20
    assert sinks[1].error is not None
    assert sinks[1].error.code == "UNAVAILABLE"
