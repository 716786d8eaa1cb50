"""Operations on a running orchestrator: status, attach, drain."""

from __future__ import annotations

import json
from typing import Any

import pytest

from distserve.serving.client_request import ClientRequest
from distserve.serving.control import run_control
from distserve.serving.params import Parameters
from distserve.serving.schema import ServingError
from engine_double import generate
from orchestrator_bench import VOCAB, Bench, Recorder, scenario


async def control(bench: Bench, **call: Any) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(await run_control(bench.orchestrator, json.dumps(call)))
    assert answer.pop("ok") is True
    return answer


def instance(status: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(entry for entry in status["instances"] if entry["instance"] == name)
    return found


@scenario()
async def test_requests_are_cancelled_by_their_key(bench: Bench) -> None:
    key, sinks = "k" * 16, [Recorder() for _ in range(3)]
    for sink, given in zip(sinks, (key, key, ""), strict=True):
        params = Parameters(max_tokens=4000 if given else 40, stream=True)
        await bench.orchestrator.serve(ClientRequest(params, ids=(1, 2), cancel_key=given), sink)
    await sinks[0].tokens(2)
    for wrong in ("x" * 16, "x" * 128):
        assert (await control(bench, op="cancel", cancel_key=wrong))["cancelled"] == 0
    for bad in ("", "k" * 15, "k" * 129, 7, None):
        with pytest.raises(ServingError, match=r"control\.cancel_key=.*16 to 128 characters"):
            await control(bench, op="cancel", cancel_key=bad)
    assert (await control(bench, op="cancel", cancel_key=key))["cancelled"] == 2
    for sink in sinks:
        await sink.end()
    assert [sink.error.code if sink.error else None for sink in sinks] == ["CANCELLED", "CANCELLED", None]
    await bench.settled()


@scenario()
async def test_status(bench: Bench) -> None:
    await bench.until(lambda: bench.orchestrator.ready)
    status = await control(bench, op="status")
    assert status["ready"] is True
    assert status["queued"] == 0
    assert status["max_total"] == 4096
    assert instance(status, "prefill_0")["phase"] == "up"
    assert instance(status, "decode_0")["blocks_free"] == 1000


@scenario()
async def test_attach_and_drain_while_running(bench: Bench) -> None:
    long = await bench.request([1, 2], 400)
    await long.tokens(2)
    bench.network.add("decode_1", "decode")
    attached = await control(bench, op="attach", instance={"name": "decode_1", "role": "decode"})
    assert attached["up"] is True
    drained = await control(bench, op="drain", instance="decode_0")
    assert drained == {"instance": "decode_0", "drained": False, "removed": False}
    with pytest.raises(ServingError, match="still has 1 requests"):
        await control(bench, op="drain", instance="decode_0", remove=True)
    sinks = [await bench.request([n], 5) for n in range(8)]
    for sink in sinks:
        await sink.end()
        assert sink.final.stage_times["decode_instance"] == "decode_1"
    await long.end()
    assert long.ids == generate([1, 2], 400, VOCAB)  # what was there has ended in peace
    assert instance(await control(bench, op="status"), "decode_0")["drained"] is True
    await control(bench, op="drain", instance="decode_0", remove=True)
    assert set(bench.orchestrator.fleet.links) == {"prefill_0", "decode_1"}
    await bench.settled()


@scenario(roles=("prefill", "decode", "decode"))
async def test_attach_takes_a_draining_instance_back(bench: Bench) -> None:
    await control(bench, op="drain", instance="decode_0")
    await control(bench, op="drain", instance="decode_1")
    waiting = await bench.request([1], 3)
    await bench.until(lambda: bench.session.state == "queued")
    await control(bench, op="attach", instance={"name": "decode_0", "role": "decode"})
    await waiting.end()
    assert waiting.ids == generate([1], 3, VOCAB)


@scenario()
async def test_refusals_name_what_is_wrong(bench: Bench) -> None:
    await bench.until(lambda: bench.orchestrator.ready)
    for text, words in (
        ("nonsense", "control="),
        ("[]", "with 'op'"),
        ('{"op": "drian"}', "did you mean 'drain'"),
        ('{"op": "drain", "instance": "decode_9"}', "did you mean 'decode_0'"),
        ('{"op": "drain", "instanz": "decode_0"}', "unknown key 'instanz'; did you mean 'instance'"),
        ('{"op": "attach", "instance": {"name": "x", "role": "decoder"}}', "'decode'"),
        ('{"op": "attach", "instance": {"name": "x", "role": "decode", "address": "nohost"}}', "host:port"),
        ('{"op": "attach", "instance": {"name": "decode_0", "role": "prefill"}}', "already attached"),
        ('{"op": "attach", "instance": {"name": "x", "role": "decode"}, "wait_s": -1}', "wait_s"),
        ('{"op": "drain", "instance": "decode_0", "remove": true}', "is not being drained"),
    ):
        with pytest.raises(ServingError) as caught:
            await run_control(bench.orchestrator, text)
        assert words in caught.value.message, text
    assert set(bench.orchestrator.fleet.links) == {"prefill_0", "decode_0"}
