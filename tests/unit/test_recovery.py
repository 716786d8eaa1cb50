"""Which errors of an instance end a request, which let it wait, and which let it go on elsewhere."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest

from distserve.serving.recovery import RECOVERY, Recovery
from distserve.serving.schema import ERROR_CODES, ErrorCode, ServingError
from engine_double import generate
from orchestrator_bench import CONFIG, VOCAB, Bench, run, scenario

PROMPT = [1, 2, 3]
FINAL = {"INVALID_ARGUMENT", "CANCELLED", "DEADLINE_EXCEEDED"}


def test_every_code_has_its_place() -> None:
    assert set(RECOVERY) == set(ERROR_CODES)
    assert set(RECOVERY.values()) == set(get_args(Recovery))
    assert {code for code, recovery in RECOVERY.items() if recovery == "final"} == FINAL


@pytest.mark.parametrize("code", ERROR_CODES)
def test_an_error_in_mid_stream(code: ErrorCode) -> None:
    """The only decode instance ends the request once; what is not final is continued there."""

    async def body(bench: Bench) -> None:
        sink = await bench.request(PROMPT, 40)
        await sink.tokens(5)
        bench.engine("decode_0").end_with(ServingError(code, "so it is"))
        await sink.end()
        if code in FINAL:
            assert sink.error is not None
            assert sink.error.code == code
            assert len(bench.network.submits) == 1, "it was submitted again"
        else:
            assert sink.ids == generate(PROMPT, 40, VOCAB)
            assert sink.final.stage_times["recoveries"] == 1
        await bench.settled()

    run(body)


@scenario()
async def test_the_engines_word_on_a_deadline_is_the_last(bench: Bench) -> None:
    sink = await bench.request(PROMPT, 4000)
    await sink.tokens(5)
    bench.engine("decode_0").end_with(ServingError("DEADLINE_EXCEEDED", "not finished 3 s after submit"))
    await sink.end()
    assert sink.error is not None
    assert sink.error.code == "DEADLINE_EXCEEDED"
    assert "after its arrival" in sink.error.message
    assert "of at most" in sink.error.message
    assert not any(name == "distserve_recoveries_total" for name, _ in bench.metrics.values)


@scenario(config=dataclasses.replace(CONFIG, request_timeout_s=0.5))
async def test_a_request_is_not_continued_after_its_deadline(bench: Bench) -> None:
    sink = await bench.request(PROMPT, 4000)
    await sink.tokens(1)
    bench.engine("decode_0").kill()
    await sink.end(3.0)
    assert sink.error is not None
    assert sink.error.code == "DEADLINE_EXCEEDED"


@scenario(roles=("prefill", "decode", "decode"))
async def test_silence_of_an_instance_is_no_deadline_of_the_request(bench: Bench) -> None:
    sink = await bench.request(PROMPT, 60)
    await sink.tokens(5)
    assert bench.session.link is not None
    frozen = bench.engine(bench.session.link.name)
    frozen.freeze()
    await sink.end()
    assert sink.ids == generate(PROMPT, 60, VOCAB)
    frozen.thaw()
    await bench.settled()
