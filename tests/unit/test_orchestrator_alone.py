"""Instances that serve requests whole while no instance of the other kind is up."""

from __future__ import annotations

import dataclasses

import pytest

from engine_double import EngineDouble, generate
from orchestrator_bench import CONFIG, VOCAB, Bench, run, scenario, text_of

PROMPT = [1, 2, 3]
PREFILL_TOO = dataclasses.replace(CONFIG, prefill_may_decode=True)


@scenario()
async def test_decode_alone_serves_what_comes_and_what_was_there(bench: Bench) -> None:
    prefill = bench.engine("prefill_0")
    prefill.paused = True
    early = await bench.request(PROMPT, 6)
    await bench.until(lambda: len(prefill.queue) == 1)
    prefill.kill()
    await early.end()
    assert early.ids == generate(PROMPT, 6, VOCAB)
    assert bench.orchestrator.ready
    late = await bench.request([4, 5], 6)
    await late.end()
    assert late.ids == generate([4, 5], 6, VOCAB)
    assert late.final.stage_times["prefill_instance"] == "decode_0"
    prefill.paused = False
    prefill.restart()
    await bench.until(lambda: bench.orchestrator.fleet.links["prefill_0"].up)
    again = await bench.request([6], 6)
    await again.end()
    assert again.final.stage_times["prefill_instance"] == "prefill_0"
    await bench.settled()


@scenario(config=dataclasses.replace(CONFIG, decode_may_prefill=False))
async def test_decode_alone_may_be_forbidden(bench: Bench) -> None:
    bench.engine("prefill_0").kill()
    await bench.until(lambda: not bench.orchestrator.ready)
    sink = await bench.request(PROMPT, 6)
    await sink.end()
    assert sink.error is not None
    assert sink.error.code == "UNAVAILABLE"


@scenario(config=PREFILL_TOO)
async def test_prefill_alone_goes_on_with_streams_of_a_dead_decode_instance(bench: Bench) -> None:
    tokens = generate(PROMPT, 60, VOCAB)
    sink = await bench.request(PROMPT, 60)
    await sink.tokens(10)
    bench.engine("decode_0").kill()
    await sink.end()
    assert (sink.ids, sink.text) == (tokens, text_of(tokens))
    assert sink.final.stage_times["prefill_instance"] == "prefill_0"
    assert "decode_instance" not in sink.final.stage_times
    assert bench.orchestrator.ready
    bench.engine("decode_0").restart()
    await bench.until(lambda: bench.orchestrator.fleet.links["decode_0"].up)
    again = await bench.request([6], 6)
    await again.end()
    assert again.final.stage_times["decode_instance"] == "decode_0"
    await bench.settled()


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("prefill", "decode", "unified")])
def test_what_waits_for_decode_starts_over(roles: tuple[str, ...]) -> None:
    """A request whose KV waits at prefill when the last decode instance dies."""

    async def body(bench: Bench) -> None:
        decode = bench.engine("decode_0")
        decode.paused = True
        if "unified_0" in bench.network.engines:
            bench.engine("unified_0").freeze()
            await bench.until(lambda: not bench.orchestrator.fleet.links["unified_0"].up)
        sink = await bench.request(PROMPT, 20)
        await sink.tokens(1)
        await bench.until(lambda: len(bench.engine("prefill_0").leases) == 1)
        if "unified_0" in bench.network.engines:
            bench.engine("unified_0").thaw()
            await bench.until(lambda: bench.orchestrator.fleet.links["unified_0"].up)
        EngineDouble.kill(decode)
        await sink.end()
        assert sink.ids == generate(PROMPT, 20, VOCAB)
        await bench.settled()

    run(body, roles=roles, config=PREFILL_TOO if len(roles) == 2 else CONFIG)


@scenario(config=PREFILL_TOO, engines={"prefill_0": {"blocks": 8}, "decode_0": {"blocks": 100}})
async def test_what_a_lone_prefill_instance_cannot_hold_is_refused_in_time(bench: Bench) -> None:
    """It blocks nobody meanwhile."""
    bench.engine("decode_0").kill()
    await bench.until(lambda: bench.orchestrator.fleet.limits() is not None)
    await bench.until(lambda: not bench.orchestrator.fleet.can_decode(1))
    large = await bench.request(PROMPT, 1000)
    small = await bench.request(PROMPT, 20)
    await small.end()
    assert small.ids == generate(PROMPT, 20, VOCAB)
    await large.end()
    assert large.error is None or large.error.code == "UNAVAILABLE"
    await bench.settled()
