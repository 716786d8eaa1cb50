"""Parameters of client requests: precedence, ranges, names; fuzzed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.serving.client_request import ClientRequest, parse_request
from distserve.serving.params import Parameters
from distserve.serving.schema import SAMPLING_KEYS, ServingError, encode

VOCAB = 1000


def read(tensors: dict[str, Any] | None = None, parameters: str = "", **sampling: Any) -> Parameters:
    given = {"text_input": "hello", **(tensors or {})}
    if sampling:
        given["sampling_parameters"] = json.dumps(sampling)
    return parse_request(given, parameters, VOCAB).params


def refusal(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ServingError) as caught:
        read(*args, **kwargs)
    assert caught.value.code == "INVALID_ARGUMENT"
    return caught.value.message


def test_defaults_are_those_of_vllm() -> None:
    params = read()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (16, 1.0, 1.0, 0)
    assert (params.stream, params.exclude_input_in_output, params.logprobs) == (False, None, None)


def test_tensors_win_over_json_over_request_parameters() -> None:
    params = read({"max_tokens": 1}, '{"max_tokens": 3, "top_k": 3, "min_p": 0.3}', max_tokens=2, top_k=2)
    assert (params.max_tokens, params.top_k, params.min_p) == (1, 2, 0.3)
    # a parameter keeps its rank under its other name
    assert read({"random_seed": 7}, seed=8).seed == 7
    assert read({"stop_words": ["a"]}, stop=["b"]).stop == ("a",)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": -5}, "max_tokens=-5"),
        ({"max_tokens": 1.5}, "max_tokens=1.5: must be an integer"),
        ({"max_tokens": True}, "max_tokens=True"),
        ({"max_tokens": [3]}, "max_tokens=[3]"),
        ({"min_tokens": 20}, "at most max_tokens=16"),
        ({"temperature": -0.1}, "temperature=-0.1: must be a number of at least 0"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 10**400}, "temperature=1000"),
        ({"top_p": 0}, "top_p=0: must be a number above 0 and at most 1"),
        ({"top_p": 1.01}, "top_p=1.01"),
        ({"min_p": 2}, "min_p=2"),
        ({"top_k": -2}, "top_k=-2"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: must be a number above 0"),
        ({"presence_penalty": 3}, "presence_penalty=3: must be a number in [-2, 2]"),
        ({"frequency_penalty": -2.5}, "frequency_penalty=-2.5"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, f"seed={2**64}"),
        ({"logprobs": 21}, "logprobs=21: must be an integer in [0, 20]"),
        ({"stop": ""}, "stop=''"),
        ({"stop": [1]}, "stop=[1]: must be a string or a list of strings"),
        ({"stop": ["x"] * 129}, "129 strings"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids=1000: must be below the vocabulary's 1000"),
        ({"stop_token_ids": [-1]}, "stop_token_ids=-1"),
        ({"ignore_eos": "yes"}, "ignore_eos='yes': must be true or false"),
        ({"beam_width": 4}, "beam_width=4: is not supported"),
        ({"n": 2}, "n=2: is not supported"),
        ({"bad_words": ["damn"]}, "bad_words=['damn']: is not supported"),
        ({"temprature": 1}, "unknown parameter 'temprature'; did you mean 'temperature'?"),
        ({"stop": "a", "stop_words": "b"}, "is another name of 'stop'"),
        ({"stream": True, "exclude_input_in_output": False}, "exclude_input_in_output=False"),
    ],
)
def test_refusals_name_field_value_and_what_is_allowed(sampling: dict[str, Any], words: str) -> None:
    assert words in refusal(**sampling)


def test_image_is_refused_by_name() -> None:
    assert "image" in refusal({"image": ["aGVsbG8="]})


def test_names_of_the_endpoints_are_left_alone() -> None:
    parameters = {"id": "7", "timeout": 5, "sequence_id": 3, "triton_final_response": True}
    assert read(parameters=json.dumps(parameters)) == Parameters()


def test_objectives_and_priority() -> None:
    given = read(priority="-3", ttft_slo=0.5, tpot_slo="0.05", deadline=30)
    assert given == Parameters(priority=-3, ttft_slo=0.5, tpot_slo=0.05, deadline=30.0)
    for name in ("ttft_slo", "tpot_slo", "deadline"):
        assert f"{name}=0: must be a number of seconds above 0" in refusal(**{name: 0})
    assert "priority=1.5: must be an integer" in refusal(priority=1.5)


def test_neutral_values_of_missing_features_are_no_errors() -> None:
    neutral = {"beam_width": 1, "n": 1, "length_penalty": 1.0, "pad_id": 2, "bad_words": "", "image": None}
    assert read(**neutral) == Parameters()


def test_forms_of_other_servers() -> None:
    assert read(temperature="0", top_p="0.95", max_tokens="20", ignore_eos="true") == Parameters(
        max_tokens=20, temperature=0.0, top_p=0.95, ignore_eos=True
    )
    assert read({"stop_words": ["", "END"], "end_id": 5, "min_length": 2}, stop_token_ids=[6]) == Parameters(
        min_tokens=2, stop=("END",), stop_token_ids=(6, 5)
    )
    assert read(top_k=-1).top_k == 0
    assert read(max_tokens=16.0).max_tokens == 16


def test_prompt_as_text_or_ids_but_not_both() -> None:
    assert parse_request({"input_ids": [1, 2]}, "", VOCAB) == ClientRequest(Parameters(), ids=(1, 2))
    for tensors, words in (
        ({}, "none is given"),
        ({"text_input": "a", "input_ids": [1]}, "both are given"),
        ({"text_input": ""}, "text_input='': must not be empty"),
        ({"text_input": "a\udc80"}, "lone surrogate"),
        ({"input_ids": []}, "input_ids=[]: must not be empty"),
        ({"input_ids": [1, VOCAB]}, "input_ids=1000: each must be an integer in [0, 1000)"),
        ({"input_ids": [-1]}, "input_ids=-1"),
        ({"text_input": "a", "sampling_parameters": "{"}, "sampling_parameters='{': must be a JSON object"),
        ({"text_input": "a", "sampling_parameters": "[" * 100_000}, "sampling_parameters="),
        ({"text_input": "a", "sampling_parameters": "3"}, "must be a JSON object"),
    ):
        with pytest.raises(ServingError) as caught:
            parse_request(tensors, "", VOCAB)
        assert words in caught.value.message
        assert len(caught.value.message) < 400


def test_the_wire_has_every_sampling_key_and_a_seed() -> None:
    assert set(Parameters().to_wire(5)) == set(SAMPLING_KEYS)
    assert Parameters().to_wire(5)["seed"] == 5
    assert Parameters(seed=0).to_wire(5)["seed"] == 0
    assert Parameters(return_cumulative_logprob=True).to_wire(5)["logprobs"] == 0
    encode(Parameters(seed=2**64 - 1).to_wire(5))


NAMES = st.sampled_from(
    [*SAMPLING_KEYS, "max_tokens", "stop", "stop_words", "end_id", "beam_width", "image", "id", "stream", "x"]
) | st.text(max_size=8)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from([0, 1, 0.5, "1", "0.5"])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2)
)


@given(st.dictionaries(NAMES, VALUES, max_size=6), st.dictionaries(NAMES, VALUES, max_size=3))
def test_anything_is_either_read_or_refused_with_one_clear_error(
    sampling: dict[str, Any], parameters: dict[str, Any]
) -> None:
    tensors = {"text_input": "hello", "sampling_parameters": json.dumps(sampling)}
    try:
        params = parse_request(tensors, json.dumps(parameters), VOCAB).params
    except ServingError as caught:
        refused = caught
    else:
        check(params)
        return
    assert refused.code == "INVALID_ARGUMENT"
    assert 5 < len(refused.message) < 2000


def check(params: Parameters) -> None:
    assert 1 <= params.max_tokens < 2**31
    assert 0 <= params.min_tokens <= params.max_tokens
    assert params.temperature >= 0
    assert 0 < params.top_p <= 1
    assert all(params.stop)
    assert all(0 <= token < VOCAB for token in params.stop_token_ids)
    encode({"sampling": params.to_wire(1)})
