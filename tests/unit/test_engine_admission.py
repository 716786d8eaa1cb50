"""What a submit entry must look like, and what the refusals say."""

from __future__ import annotations

from typing import Any

import pytest

from distserve.engine.admission import Admission, Bounds
from distserve.engine.requests import EngineRequest, Owner
from distserve.serving.schema import ServingError
from distserve.worker.step import SamplingParams

BOUNDS = Bounds("unified", max_context=100, num_blocks=5, block_size=16, vocab_size=50, eos_token_ids=(2,))
OWNER = Owner("a", 1)


def admit(entry: dict[str, Any], bounds: Bounds = BOUNDS) -> EngineRequest:
    return Admission(bounds).admit({"id": "r", "prompt": [5, 6], "max_tokens": 4, **entry}, OWNER, 3.0)


def test_a_request_carries_prompt_and_output() -> None:
    state = admit({"output": [7], "deadline_s": 2})
    request = state.request
    assert (request.prompt_len, request.generated, request.computed, request.known) == (2, 1, 0, 3)
    assert request.tokens == [5, 6, 7]
    assert state.deadline_s == 5.0
    assert state.work_tokens == 3
    assert state.params == SamplingParams(end_ids=(2,))


def test_end_ids_are_the_models_and_the_requests() -> None:
    assert admit({"sampling": {"stop_token_ids": [9, 2]}}).params.end_ids == (2, 9)
    assert admit({"sampling": {"stop_token_ids": [9], "ignore_eos": True}}).params.end_ids == (9,)


def test_keys_are_unique() -> None:
    admission = Admission(BOUNDS)
    entry = {"id": "r", "prompt": [5], "max_tokens": 1}
    assert admission.admit(entry, OWNER, 0.0).key != admission.admit(entry, OWNER, 0.0).key


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"prompt": []}, r"prompt=\[\]: must have at least one token"),
        ({"prompt": "text"}, r"prompt: must be a list of token ids"),
        ({"prompt": [1, True]}, r"prompt: must be a list of token ids"),
        ({"prompt": [1, 50]}, r"prompt: token id 50 must be in \[0, 50\)"),
        ({"output": [-1]}, r"output: token id -1 must be in \[0, 50\)"),
        ({"max_tokens": 0}, r"max_tokens=0: must be an integer of at least 1"),
        ({"max_tokens": "4"}, r"max_tokens='4': must be an integer"),
        ({"output": [1, 1, 1, 1]}, r"max_tokens=4: must be above the 4 tokens of output"),
        ({"max_tokens": 99}, r"prompt of 2 tokens and max_tokens=99: together 101, .* context are 100"),
        ({"max_tokens": 90}, r"6 KV blocks of 16 tokens are needed, the unified instance has 5"),
        ({"deadline_s": -1}, r"deadline_s=-1: must be a number of seconds"),
        ({"deadline_s": float("nan")}, r"deadline_s=nan"),
        ({"promt": [1]}, r"unknown key 'promt'; did you mean 'prompt'\?"),
        ({"sampling": []}, r"sampling=\[\]: must be a map"),
        ({"sampling": {"temprature": 1}}, r"unknown key 'sampling.temprature'; did you mean 'temperature'\?"),
        ({"sampling": {"temperature": "hot"}}, r"temperature='hot': must be a number"),
        ({"sampling": {"temperature": -1}}, r"temperature=-1.0: must be 0 \(greedy\) or more"),
        ({"sampling": {"top_k": 1.5}}, r"top_k=1.5: must be an integer"),
        ({"sampling": {"logprobs": 21}}, r"logprobs=21: must be in \[0, 20\]"),
        ({"sampling": {"ignore_eos": 1}}, r"ignore_eos=1: must be true or false"),
        ({"sampling": {"stop_token_ids": [50]}}, r"stop_token_ids: token id 50"),
        ({"handle": {}}, r"handle: a unified instance pulls no KV"),
    ],
)
def test_refusals_name_field_value_and_what_is_allowed(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ServingError, match=message) as refused:
        admit(entry)
    assert refused.value.code == "INVALID_ARGUMENT"


def test_a_prefill_instance_needs_room_for_what_is_known_only() -> None:
    prefill = Bounds("prefill", 100, 1, 16, 50, ())
    assert admit({"max_tokens": 90}, prefill).request.max_tokens == 90
    with pytest.raises(ServingError, match="2 KV blocks of 16 tokens are needed, the prefill instance has 1"):
        admit({"prompt": [1] * 17}, prefill)
