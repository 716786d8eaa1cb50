"""The whole path through a real tritonserver: right tokens, nothing left behind."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving import BLOCK_SIZE, Deployment, deployed, greedy_mismatches

from distserve_tools.client import RequestError
from model_zoo import CONTEXT, Zoo, prompt

GREEDY = {"temperature": 0.0, "ignore_eos": True}
LENGTHS = [k * BLOCK_SIZE + d for k in (1, 2, 5) for d in (-1, 0, 1)]


@pytest.mark.parametrize("length", LENGTHS)
def test_streamed_and_whole_answers_are_the_greedy_ones(deployment: Deployment, length: int) -> None:
    ids = prompt(length)
    streamed = deployment.client.complete(ids, max_tokens=24, **GREEDY)
    whole = deployment.client.complete(ids, max_tokens=24, stream=False, **GREEDY)
    assert streamed.token_ids == whole.token_ids
    assert streamed.text == whole.text
    assert len(streamed.token_ids) == 24
    assert len(streamed.token_s) > 1
    assert len(whole.token_s) == 1
    assert (streamed.finish_reason, streamed.prompt_tokens) == ("length", length)
    assert streamed.completion_tokens == 24
    assert greedy_mismatches(deployment.model, ids, streamed.token_ids) == []


def test_32_at_once_get_the_same_as_alone(deployment: Deployment) -> None:
    prompts = [prompt(LENGTHS[i % len(LENGTHS)], seed=i) for i in range(32)]
    with ThreadPoolExecutor(32) as pool:
        calls = [pool.submit(deployment.client.complete, ids, max_tokens=20, **GREEDY) for ids in prompts]
        answers = [call.result() for call in calls]
    for ids, answer in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == 20
        assert greedy_mismatches(deployment.model, ids, answer.token_ids) == []


def test_stage_times_add_up(deployment: Deployment) -> None:
    answer = deployment.client.complete(prompt(40), max_tokens=12, **GREEDY)
    stages = ("prefill_queue_s", "prefill_s", "decode_queue_s", "transfer_s", "decode_s")
    times = [float(answer.stage_times[stage]) for stage in stages]
    assert min(times) >= 0
    assert sum(times) == pytest.approx(answer.stage_times["e2e_s"], abs=1e-6)
    assert answer.stage_times["transfer_s"] > 0
    assert answer.stage_times["e2e_s"] <= answer.token_s[-1] - answer.sent_s + 0.05


def test_one_token_ends_at_prefill(deployment: Deployment) -> None:
    answer = deployment.client.complete(prompt(33), max_tokens=1, **GREEDY)
    assert greedy_mismatches(deployment.model, prompt(33), answer.token_ids) == []
    assert len(answer.token_ids) == 1
    assert answer.stage_times["transfer_s"] == 0
    assert answer.stage_times["decode_s"] < 1e-3


def test_http_streams_the_same_text(deployment: Deployment) -> None:
    body = {"text_input": "The capital", "max_tokens": 16, **GREEDY}
    expected = deployment.client.complete("The capital", max_tokens=16, **GREEDY)
    parts = [json.loads(line[6:]) for line in _post(deployment, "generate_stream", body | {"stream": True})]
    assert "".join(_first(part["text_output"]) for part in parts) == expected.text
    assert len(parts) > 1
    (whole,) = [json.loads(line) for line in _post(deployment, "generate", body)]
    # a vllm_backend answer begins with the prompt unless it is asked not to
    assert _first(whole["text_output"]).endswith(expected.text)


def test_a_closed_stream_frees_its_blocks(deployment: Deployment) -> None:
    stream = deployment.client.stream(prompt(20), max_tokens=CONTEXT - 20, **GREEDY)
    next(stream)
    stream.close()  # wait_idle of the fixture is the check


@pytest.mark.parametrize(
    ("ids", "sampling", "named"),
    [
        ([], {}, "input_ids"),
        (prompt(CONTEXT + 1), {}, str(CONTEXT)),
        (prompt(4), {"max_tokens": 0}, "max_tokens"),
        (prompt(4), {"temperatur": 1.0}, "temperature"),
    ],
)
def test_bad_input_is_refused_by_name(
    deployment: Deployment, ids: list[int], sampling: dict[str, Any], named: str
) -> None:
    with pytest.raises(RequestError) as caught:
        deployment.client.complete(ids, **sampling)
    assert caught.value.code == "INVALID_ARGUMENT"
    assert named in caught.value.message
    assert deployment.client.complete(prompt(4), max_tokens=2, **GREEDY).completion_tokens == 2


def test_objectives_that_cannot_be_kept_are_refused_at_once(deployment: Deployment) -> None:
    deployment.client.complete(prompt(40), max_tokens=100, **GREEDY)  # shows how fast it is
    for objective, words in (("tpot_slo", "1e-06 s per token"), ("ttft_slo", "the first token in 1e-06 s")):
        with pytest.raises(RequestError, match=f"deadline unreachable: {words}") as caught:
            deployment.client.complete(prompt(40), max_tokens=100, **GREEDY, **{objective: 1e-6})
        assert caught.value.code == "RESOURCE_EXHAUSTED"
        kept = deployment.client.complete(prompt(40), max_tokens=4, **GREEDY, **{objective: 600.0})
        assert len(kept.token_ids) == 4


def test_unified_gives_the_same_tokens(zoo: Zoo, deployment: Deployment, tmp_path: Path) -> None:
    prompts = [prompt(length, seed=7) for length in LENGTHS]
    apart = [deployment.client.complete(ids, max_tokens=16, **GREEDY).token_ids for ids in prompts]
    seeded = deployment.client.complete(prompts[0], max_tokens=16, temperature=1.0, seed=5, ignore_eos=True)
    with deployed(tmp_path, zoo("llama"), [{"role": "unified"}]) as unified:
        for ids, tokens in zip(prompts, apart, strict=True):
            assert unified.client.complete(ids, max_tokens=16, **GREEDY).token_ids == tokens
        again = unified.client.complete(prompts[0], max_tokens=16, temperature=1.0, seed=5, ignore_eos=True)
        assert again.token_ids == seeded.token_ids
        unified.wait_idle()


def _post(deployment: Deployment, method: str, body: dict[str, Any]) -> list[str]:
    connection = http.client.HTTPConnection(deployment.server.http_url, timeout=60)
    try:
        connection.request("POST", f"/v2/models/orchestrator/{method}", json.dumps(body))
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    assert response.status == 200, text
    return [line for line in text.splitlines() if line]


def _first(value: Any) -> str:
    return str(value[0] if isinstance(value, list) else value)
