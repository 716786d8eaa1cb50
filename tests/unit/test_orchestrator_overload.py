"""Refusals at once, the order of the queue, and long prompts that are overtaken."""

from __future__ import annotations

import asyncio
import dataclasses
import json

import pytest

from distserve.core.parsing import ConfigError
from distserve.serving.attainment import Attainment, Objectives
from distserve.serving.orchestrator_config import OrchestratorConfig
from distserve.serving.pace import DecodePace, DrainRate, PrefillPace
from engine_double import generate
from orchestrator_bench import CONFIG, VOCAB, Bench, Recorder, scenario


def refusal(sink: Recorder) -> str:
    assert sink.error is not None
    assert sink.error.code == "RESOURCE_EXHAUSTED"
    return sink.error.message


async def told_pace(bench: Bench, *samples: tuple[int, int]) -> None:
    """The prefill instance has taken steps of so many tokens, in so many microseconds."""
    engine = bench.engine("prefill_0")
    load = bench.orchestrator.fleet.links["prefill_0"].load
    for tokens, micros in samples:
        steps, all_tokens, all_micros = engine.pace
        engine.pace = (steps + 1, all_tokens + tokens, all_micros + micros)
        await bench.until(lambda: load.reported.get("prefill_steps") == engine.pace[0])


@scenario(config=dataclasses.replace(CONFIG, max_queue_tokens=100), engines={"prefill_0": {"credits": 4}})
async def test_the_queue_is_bounded_in_tokens(bench: Bench) -> None:
    prefill = bench.engine("prefill_0")
    prefill.paused = True
    first = await bench.request([1] * 300, 2)  # goes to the instance
    second = await bench.request([2] * 90, 2)
    third = await bench.request([3] * 20, 2)
    assert (
        refusal(third) == "queue full: 90 tokens of prompts wait, 100 may, 20 more are given; try again later"
    )
    prefill.paused = False
    for sink in (first, second):
        await sink.end()
    await bench.settled()
    assert bench.orchestrator.router.waiting_tokens == 0


@scenario(engines={"prefill_0": {"credits": 64}})
async def test_an_unreachable_deadline_is_refused_at_once(bench: Bench) -> None:
    await told_pace(bench, (100, 100_000), (50, 50_000), (100, 100_000))  # a millisecond per token
    prefill = bench.engine("prefill_0")
    prefill.paused = True
    waiting = [await bench.request([n] * 50, 1) for n in range(4)]
    late = await bench.request([9] * 50, 1, ttft_slo=0.2)
    message = refusal(late)
    assert message.startswith("deadline unreachable: the first token in 0.2 s; the first token is expected")
    assert "200 tokens are ahead, 1000 are computed per second" in message
    too_late = await bench.request([9] * 50, 1, deadline=0.2)
    assert "the end in 0.2 s" in refusal(too_late)
    in_time = await bench.request([8] * 50, 1, ttft_slo=0.5, deadline=5.0)
    urgent = await bench.request([7] * 50, 1, ttft_slo=0.2, priority=-1)
    prefill.paused = False
    for sink in (*waiting, in_time, urgent):
        await sink.end()
        assert sink.error is None
    await bench.settled()
    refused = ("distserve_requests_total", {"outcome": "refused", "code": "RESOURCE_EXHAUSTED"})
    await bench.until(lambda: bench.metrics.total(refused[0], **refused[1]) == 2)


@scenario()
async def test_what_cannot_be_told_is_not_refused(bench: Bench) -> None:
    """No step has been measured yet."""
    bench.engine("prefill_0").paused = True
    sinks = [await bench.request([n] * 200, 1, ttft_slo=1e-6) for n in range(6)]
    bench.engine("prefill_0").paused = False
    for sink in sinks:
        await sink.end()
        assert sink.error is None


@scenario(config=dataclasses.replace(CONFIG, slo_ttft_s=0.2, refuse_late=True))
async def test_the_servers_own_objective(bench: Bench) -> None:
    await told_pace(bench, (100, 100_000), (50, 50_000))
    bench.engine("prefill_0").paused = True
    sinks = [await bench.request([n] * 400, 1) for n in range(3)]
    assert "first token in 0.2 s" in refusal(sinks[-1])
    own = await bench.request([9] * 10, 1, ttft_slo=60.0)
    bench.engine("prefill_0").paused = False
    await own.end()
    assert own.error is None


@scenario()
async def test_one_stall_says_nothing_of_the_usual_pace(bench: Bench) -> None:
    await told_pace(bench, (100, 1_000), (100, 1_000))
    stalled = await bench.request([1, 2, 3], 40)
    await stalled.tokens(2)
    bench.engine("decode_0").paused = True
    await asyncio.sleep(1.0)
    bench.engine("decode_0").paused = False
    await stalled.end()
    long = await bench.request([1, 2, 3], 200, deadline=4.0, min_tokens=200)
    await long.end()
    assert long.error is None


@scenario()
async def test_a_pace_per_token_that_cannot_be_kept_is_refused_at_once(bench: Bench) -> None:
    unknown = await bench.request([1, 2, 3], 200, tpot_slo=1e-6)  # nothing has been decoded yet
    await unknown.end()
    assert unknown.error is None
    refused = await bench.request([1, 2, 3], 40, tpot_slo=1e-6)
    message = refusal(refused)
    assert message.startswith("deadline unreachable: 1e-06 s per token; 0.0")
    assert "(1 requests at a time where it would be decoded)" in message
    kept = await bench.request([1, 2, 3], 40, tpot_slo=10.0)
    single = await bench.request([1, 2, 3], 1, tpot_slo=1e-6)  # has no second token
    for sink in (kept, single):
        await sink.end()
        assert sink.error is None
    await bench.settled()


@scenario(config=dataclasses.replace(CONFIG, slo_tpot_s=1e-6, refuse_late=True))
async def test_the_servers_own_pace_per_token(bench: Bench) -> None:
    await (await bench.request([1, 2, 3], 200)).end()
    assert "1e-06 s per token" in refusal(await bench.request([1, 2, 3], 40))
    own = await bench.request([1, 2, 3], 40, tpot_slo=10.0)
    await own.end()
    assert own.error is None


@scenario(engines={"prefill_0": {"credits": 4}})
async def test_priority_overtakes(bench: Bench) -> None:
    prefill = bench.engine("prefill_0")
    prefill.paused = True
    priorities = [0, 2, 0, -1, 2, -1]
    sinks = [await bench.request([n, 1, 2], 1, priority=p) for n, p in enumerate(priorities)]
    prefill.paused = False
    for sink in sinks:
        await sink.end()
    order = [bench.sessions.index(session) for session in _by_submit(bench)]
    assert order == [0, 3, 5, 2, 1, 4]  # the first one had been sent at once


def _by_submit(bench: Bench) -> list[object]:
    by_number = {session.number: session for session in bench.sessions if session is not None}
    return [by_number[int(id.split("-")[1].split(".")[0])] for id in bench.network.submits]


@scenario(
    config=dataclasses.replace(CONFIG, scheduling="shortest", ageing_tokens_per_s=1.0),
    engines={"prefill_0": {"credits": 8}},
)
async def test_shortest_first(bench: Bench) -> None:
    bench.engine("prefill_0").paused = True
    lengths = [8, 7, 3, 5, 4]
    sinks = [await bench.request([n] * length, 1) for n, length in enumerate(lengths)]
    bench.engine("prefill_0").paused = False
    for sink in sinks:
        await sink.end()
    assert [lengths[bench.sessions.index(s)] for s in _by_submit(bench)] == [8, 3, 4, 5, 7]


@scenario(
    config=dataclasses.replace(CONFIG, scheduling="deadline", slo_ttft_s=5.0),
    engines={"prefill_0": {"credits": 8}},
)
async def test_earliest_deadline_first(bench: Bench) -> None:
    bench.engine("prefill_0").paused = True
    limits = [None, None, 9.0, 2.0, 4.0]
    sinks = [await bench.request([n] * 8, 1, ttft_slo=limit) for n, limit in enumerate(limits)]
    bench.engine("prefill_0").paused = False
    for sink in sinks:
        await sink.end()
    assert [limits[bench.sessions.index(s)] for s in _by_submit(bench)] == [None, 2.0, 4.0, None, 9.0]


@scenario(engines={"prefill_0": {"credits": 64, "pieces_above": 32, "prefill_s": 0.02}})
async def test_short_prompts_pass_long_ones_that_wait(bench: Bench) -> None:
    prefill = bench.engine("prefill_0")
    prefill.paused = True
    longs = [await bench.request([n] * 100, 1) for n in range(3)]
    shorts = [await bench.request([n] * 20, 1) for n in range(10, 13)]
    await bench.until(lambda: len(prefill.queue) == 4)
    queued = sorted(len(entry["prompt"]) for _, entry in prefill.queue.values())
    assert queued == [20, 20, 20, 100]  # one long prompt at a time, the short ones beside it
    assert bench.orchestrator.router.waiting_tokens == 200
    prefill.paused = False
    for n, sink in zip((0, 1, 2, 10, 11, 12), (*longs, *shorts), strict=True):
        await sink.end()
        assert sink.ids == generate([n] * (100 if n < 3 else 20), 1, VOCAB)
    await bench.settled()


@scenario(config=dataclasses.replace(CONFIG, max_queue=4, unavailable_after_s=0.3))
async def test_requests_that_wait_for_instances_are_bounded(bench: Bench) -> None:
    for engine in bench.network.engines.values():
        engine.kill()
    sinks = await asyncio.wait_for(asyncio.gather(*(bench.request([n], 1) for n in range(10))), 5.0)
    codes = [sink.error.code for sink in sinks if sink.error is not None]
    assert sorted(codes) == ["RESOURCE_EXHAUSTED"] * 6 + ["UNAVAILABLE"] * 4


@scenario(config=dataclasses.replace(CONFIG, request_timeout_s=30.0))
async def test_deadline_of_a_request(bench: Bench) -> None:
    sink = await bench.request([1, 2], 4000, deadline=0.4)
    await sink.end(3.0)
    assert sink.error is not None
    assert sink.error.code == "DEADLINE_EXCEEDED"
    await bench.settled()


def test_pace_tells_overhead_from_share() -> None:
    pace = PrefillPace()
    assert not pace.known
    for tokens in (10, 500, 100, 300):
        pace.note(1, tokens, 0.02 + 0.001 * tokens)
    assert pace.seconds(1000) == pytest.approx(1.02, rel=1e-6)
    assert pace.rate(512) == pytest.approx(512 / 0.532, rel=1e-6)


def test_pace_of_one_size_makes_no_claim_about_others() -> None:
    pace = PrefillPace()
    for _ in range(20):
        pace.note(1, 10, 0.02)
    assert pace.seconds(4000) == pytest.approx(0.02)
    assert pace.rate(512) == pytest.approx(512 / 0.02)
    for _ in range(3):
        pace.note(4, 2000, 1.0)
    assert pace.seconds(500) == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize("usual", [1, 2, 8])
def test_slow_first_steps_do_not_spoil_the_pace(usual: int) -> None:
    pace = PrefillPace()
    pace.note(1, 200, 5.0)
    for n in range(usual):
        pace.note(1, 200 + 100 * (n % 3), 0.01 + 0.0002 * (200 + 100 * (n % 3)))
    assert pace.seconds(300) < 0.1
    assert pace.rate(512) > 4000


def test_pace_of_output_follows_the_number_of_requests_and_forgets() -> None:
    pace = DecodePace()
    assert pace.seconds(0.0, 1) is None
    for n in range(1, 11):
        pace.note(float(n), n, 0.010 + 0.002 * n)
        pace.note(n + 0.01, n, 9.0)  # too soon after the one before to count
    assert pace.seconds(10.0, 20) == pytest.approx(0.050)
    assert pace.seconds(35.5, 1) == pytest.approx(0.012)
    assert pace.seconds(40.1, 1) is None


@pytest.mark.parametrize("usual", [2, 5])
def test_a_stall_does_not_spoil_the_pace_of_output(usual: int) -> None:
    pace = DecodePace()
    pace.note(0.0, 1, 10.0)
    assert pace.seconds(0.0, 1) is None
    for n in range(usual):
        pace.note(1.0 + n, 1, 0.010)
    assert pace.seconds(1.0 + usual, 1) == pytest.approx(0.010)


def test_drain_rate_needs_a_queue_that_stays_filled() -> None:
    drain = DrainRate(window_s=5.0, least_s=1.0)
    drain.left(0.0, 500, empty=False)
    assert drain.rate(0.5) is None
    for tenth in range(1, 101):
        drain.left(tenth / 10, 100, empty=False)
    assert drain.rate(10.0) == pytest.approx(1000, rel=0.05)
    drain.left(10.1, 100, empty=True)
    assert drain.rate(12.0) is None


def test_attainment_window() -> None:
    window = Attainment(10.0)
    assert window.summary(0.0) == {"ttft": 1.0, "tpot": 1.0, "both": 1.0, "requests": 0}
    window.note(0.0, False, False)
    window.note(5.0, True, False)
    window.note(6.0, True, True)
    assert window.summary(9.0) == {"ttft": 2 / 3, "tpot": 1 / 3, "both": 1 / 3, "requests": 3}
    assert window.summary(15.5) == {"ttft": 1.0, "tpot": 1.0, "both": 1.0, "requests": 1}
    own = Objectives(tpot_s=0.1).or_else(Objectives(1.0, 0.5))
    assert own == Objectives(1.0, 0.1)
    assert own.met(1.0, 0.2, 5) == (True, False)
    assert own.met(1.1, 0.2, 1) == (False, True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"scheduling": "lifo"}, "scheduling"),
        ({"ageing_tokens_per_s": 0}, "ageing_tokens_per_s=0"),
        ({"slo_ttft_s": -1.0}, "slo_ttft_s=-1.0: must be above 0"),
        ({"refuse_late": True}, "refuse_late=true: needs slo_ttft_s or slo_tpot_s"),
        ({"max_queue_tokens": 0}, "max_queue_tokens=0"),
    ],
)
def test_settings_are_checked(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OrchestratorConfig.load(json.dumps({"model": "m", **settings}))


def test_a_queue_that_stands_still_behind_a_long_prompt_is_no_rate() -> None:
    drain = DrainRate(window_s=5.0, least_s=1.0)
    drain.left(0.0, 0, empty=False)
    assert drain.rate(3.0) is None
    drain.left(3.0, 600, empty=False)
    assert drain.rate(3.0) == pytest.approx(200.0)
    assert drain.rate(20.0) is None
