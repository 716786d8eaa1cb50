"""The `stop` operation: what is here ends, nothing new comes, no instance is called any more."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from distserve.serving.control import run_control
from distserve.serving.schema import ServingError
from engine_double import generate
from orchestrator_bench import VOCAB, Bench, scenario

PROMPT = [1, 2, 3]


async def stop(bench: Bench, **arguments: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(
        await run_control(bench.orchestrator, json.dumps({"op": "stop", **arguments}))
    )
    return answer


@scenario()
async def test_running_requests_end_and_new_ones_are_refused(bench: Bench) -> None:
    sink = await bench.request(PROMPT, 30)
    stopping = asyncio.ensure_future(stop(bench, drain_s=20))
    await asyncio.sleep(0)
    await bench.until(lambda: bench.orchestrator.stopping)
    refused = await bench.request(PROMPT, 2)
    await refused.end()
    assert refused.error is not None
    assert "shutting down" in refused.error.message
    assert (await stopping)["stopped"] is True
    await sink.end()
    assert sink.ids == generate(PROMPT, 30, VOCAB)
    assert all(link.phase == "down" for link in bench.orchestrator.fleet)
    assert (await stop(bench))["stopped"] is True  # nothing left to do


@scenario()
async def test_what_does_not_end_in_time_fails(bench: Bench) -> None:
    bench.engine("decode_0").paused = True
    sink = await bench.request(PROMPT, 30)
    await sink.tokens(1)
    await stop(bench, drain_s=0.05)
    assert sink.error is not None
    assert (sink.error.code, sink.ends) == ("UNAVAILABLE", 1)


@pytest.mark.parametrize("drain_s", [-1, "1", True, 1e9])
def test_a_bad_time_is_refused(drain_s: Any) -> None:
    @scenario()
    async def check(bench: Bench) -> None:
        with pytest.raises(ServingError, match=r"control\.drain_s"):
            await stop(bench, drain_s=drain_s)
        assert not bench.orchestrator.stopping

    check()
