"""The orchestrator against instances in memory: answers, admission, balance."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from engine_double import generate
from orchestrator_bench import CONFIG, VOCAB, Bench, letter, scenario, text_of

PROMPT = [1, 2, 3]


@scenario()
async def test_tokens_text_and_last_message(bench: Bench) -> None:
    sink = await bench.request(PROMPT, 8)
    await sink.end()
    expected = generate(PROMPT, 8, VOCAB)
    assert sink.ids == expected
    assert sink.text == text_of(expected)
    assert len(sink.chunks) == 8  # one message per token; the last one has the end with it
    assert (sink.final.finish_reason, sink.final.prompt_tokens, sink.final.completion_tokens) == (
        "length",
        3,
        8,
    )
    times = sink.final.stage_times
    stages = ("prefill_queue_s", "prefill_s", "decode_queue_s", "transfer_s", "decode_s")
    assert sum(times[stage] for stage in stages) == pytest.approx(times["e2e_s"])
    assert 0 < times["ttft_s"] < times["e2e_s"]
    assert times["prefill_instance"] == "prefill_0"
    assert times["decode_instance"] == "decode_0"
    await bench.settled()


@scenario(engines={"decode_0": {"heartbeat_s": 0.1}})
async def test_first_token_is_out_before_decode_starts(bench: Bench) -> None:
    bench.engine("decode_0").paused = True
    sink = await bench.request(PROMPT, 4)
    await sink.tokens(1)
    assert sink.ids == generate(PROMPT, 1, VOCAB)
    await bench.until(lambda: len(bench.engine("decode_0").queue) == 1)
    bench.engine("decode_0").paused = False
    await sink.end()
    assert sink.ids == generate(PROMPT, 4, VOCAB)


@scenario()
async def test_not_streaming_gives_one_message(bench: Bench) -> None:
    sink = await bench.request(PROMPT, 8, stream=False)
    await sink.end()
    assert len(sink.chunks) == 1
    assert sink.ids == generate(PROMPT, 8, VOCAB)


@scenario()
async def test_finished_at_first_token_never_meets_decode(bench: Bench) -> None:
    first = generate(PROMPT, 1, VOCAB)[0]
    sinks = [
        await bench.request(PROMPT, 1),
        await bench.request(PROMPT, 8, stop_token_ids=(first,)),
        await bench.request(PROMPT, 8, stop=(letter(first),)),
    ]
    for sink, reason, text in zip(sinks, ("length", "stop", "stop"), (letter(first), "", ""), strict=True):
        await sink.end()
        assert (sink.final.finish_reason, sink.text, sink.ids) == (reason, text, [first])
    await bench.settled()
    assert all(names == ["prefill_0"] for names in bench.network.submits.values())


@scenario(roles=("unified",))
async def test_unified_instance(bench: Bench) -> None:
    sink = await bench.request(PROMPT, 8)
    await sink.end()
    assert sink.ids == generate(PROMPT, 8, VOCAB)
    await bench.settled()


@scenario(roles=("unified", "prefill", "decode"))
async def test_unified_and_disaggregated_side_by_side(bench: Bench) -> None:
    sinks = [await bench.request([n, 1], 6) for n in range(20)]
    for n, sink in enumerate(sinks):
        await sink.end()
        assert sink.ids == generate([n, 1], 6, VOCAB)
    used = {sink.final.stage_times["prefill_instance"] for sink in sinks}
    assert used == {"unified_0", "prefill_0"}


@scenario(roles=("prefill", "prefill", "decode", "decode"), step_s=0.01)
async def test_200_concurrent_requests(bench: Bench) -> None:
    prompts = [[n % 199, n // 199, *range(n % 17)] for n in range(200)]
    sinks = [await bench.request(prompt, 1 + n % 12) for n, prompt in enumerate(prompts)]
    for n, (prompt, sink) in enumerate(zip(prompts, sinks, strict=True)):
        await sink.end(30.0)
        assert sink.ids == generate(prompt, 1 + n % 12, VOCAB)
        assert sink.text == text_of(sink.ids)
    await bench.settled()
    decodes = [names[-1] for names in bench.network.submits.values() if names[-1].startswith("decode")]
    assert abs(decodes.count("decode_0") - decodes.count("decode_1")) < 60


@scenario()
async def test_stop_string_across_first_and_second_token(bench: Bench) -> None:
    tokens = generate(PROMPT, 8, VOCAB)
    sink = await bench.request(PROMPT, 8, stop=(text_of(tokens[:2]),))
    await sink.end()
    assert (sink.text, sink.ids, sink.final.finish_reason) == ("", tokens[:2], "stop")
    later = await bench.request(PROMPT, 8, stop=("nothing", text_of(tokens[3:5])))
    await later.end()
    assert (later.text, later.final.completion_tokens) == (text_of(tokens[:3]), 5)
    await bench.settled()


@scenario()
async def test_stop_string_waits_for_min_tokens(bench: Bench) -> None:
    tokens = generate(PROMPT, 8, VOCAB)
    sink = await bench.request(PROMPT, 8, stop=(letter(tokens[1]),), min_tokens=3)
    await sink.end()
    assert sink.ids == tokens


@scenario(end_ids=[generate(PROMPT, 3, VOCAB)[2]])
async def test_end_token_is_counted_and_silent(bench: Bench) -> None:
    sink = await bench.request(PROMPT, 8, stop_token_ids=(generate(PROMPT, 3, VOCAB)[2],))
    await sink.end()
    tokens = generate(PROMPT, 3, VOCAB)
    assert (sink.ids, sink.text, sink.final.finish_reason) == (tokens, text_of(tokens[:2]), "stop")


@scenario()
async def test_logprobs_accumulate(bench: Bench) -> None:
    sink = await bench.request(PROMPT, 5, logprobs=1)
    await sink.end()
    assert [len(chunk.logprobs) for chunk in sink.chunks] == [len(chunk.ids) for chunk in sink.chunks]
    assert sink.chunks[-1].cumulative_logprob == pytest.approx(-5.0)


# admission


@scenario(engines={"decode_0": {"blocks": 4}})
async def test_prompt_and_output_limits_follow_the_smallest_pool(bench: Bench) -> None:
    sink = await bench.request([1] * 64, 8)
    assert sink.error is not None
    assert sink.error.code == "INVALID_ARGUMENT"
    assert "input_ids" in sink.error.message
    assert "63" in sink.error.message
    fits = await bench.request([1] * 60, 1000)
    await fits.end()
    assert (fits.final.finish_reason, fits.final.completion_tokens) == ("length", 4)


@scenario()
async def test_long_text_is_refused_by_size(bench: Bench) -> None:
    sink = await bench.request("x" * 1_000_000, 8)
    assert sink.error is not None
    assert "text_input: 1000000 bytes" in sink.error.message


@scenario(config=dataclasses.replace(CONFIG, max_queue=3), engines={"prefill_0": {"credits": 4}})
async def test_full_queue_refuses_at_once_and_order_is_kept(bench: Bench) -> None:
    prefill = bench.engine("prefill_0")
    prefill.paused = True
    sinks = [await bench.request([n, 1, 2], 2) for n in range(5)]
    assert sinks[4].error is not None
    assert sinks[4].error.code == "RESOURCE_EXHAUSTED"
    prefill.paused = False
    for sink in sinks[:4]:
        await sink.end()
    assert list(bench.network.submits) == sorted(bench.network.submits)
    await bench.settled()
    await bench.until(
        lambda: (
            bench.metrics.total("distserve_requests_total", outcome="refused", code="RESOURCE_EXHAUSTED") == 1
        )
    )


@scenario(engines={"prefill_0": {"credits": 16}})
async def test_prompt_above_all_credits_runs_alone(bench: Bench) -> None:
    sinks = [await bench.request([n] * 40, 3) for n in range(4)]
    for n, sink in enumerate(sinks):
        await sink.end()
        assert sink.ids == generate([n] * 40, 3, VOCAB)


@scenario(roles=("prefill", "prefill", "decode"), engines={"prefill_0": {"prefill_s": 0.3}})
async def test_slow_instance_gets_less(bench: Bench) -> None:
    sinks = []
    for n in range(20):
        sinks.append(await bench.request([n] * 100, 1))
        await asyncio.sleep(0.01)
    for sink in sinks:
        await sink.end()
    used = [sink.final.stage_times["prefill_instance"] for sink in sinks]
    assert used.count("prefill_0") < used.count("prefill_1")


@scenario(roles=())
async def test_without_instances_requests_fail_in_time(bench: Bench) -> None:
    sink = await bench.request(PROMPT)
    assert sink.error is not None
    assert sink.error.code == "UNAVAILABLE"
    assert not bench.orchestrator.ready


@scenario(config=dataclasses.replace(CONFIG, request_timeout_s=0.3))
async def test_deadline_of_the_request(bench: Bench) -> None:
    bench.engine("decode_0").paused = True
    sink = await bench.request(PROMPT)
    await sink.end()
    assert sink.error is not None
    assert sink.error.code == "DEADLINE_EXCEEDED"
    await bench.settled()
