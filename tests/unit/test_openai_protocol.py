"""Bodies of the OpenAI front end: what is taken, and the 400 for everything else."""

from __future__ import annotations

from typing import Any

import pytest

from distserve_tools.openai_api.errors import ApiError
from distserve_tools.openai_api.generation import jobs
from distserve_tools.openai_api.protocol import parse_chat, parse_completion

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "a"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}


def render(messages: list[dict[str, Any]]) -> list[int]:
    return [len(message["content"]) for message in messages]


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"prompt": None}, "prompt", "expected a string"),
        ({"prompt": []}, "prompt", "expected a string"),
        ({"prompt": ["a", 1]}, "prompt", "expected a string"),
        ({"prompt": [[1], []]}, "prompt", "expected a string"),
        ({"max_token": 3}, "max_token", "did you mean 'max_tokens'"),
        ({"max_tokens": "3"}, "max_tokens", "allowed is int"),
        ({"temperature": "hot"}, "temperature", "allowed is int or float"),
        ({"stream": 1}, "stream", "allowed is bool"),
        ({"n": 0}, "n", "1 to 128"),
        ({"n": 100, "prompt": ["a", "b"]}, "n", "1 to 128"),
        ({"n": True}, "n", "allowed is int"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"echo": True}, "echo", "not supported"),
        ({"logprobs": 21}, "logprobs", "0 to 20"),
        ({"stop": ["a", ""]}, "stop", "non-empty"),
        ({"stop": 3}, "stop", "non-empty"),
    ],
)
def test_completion_refusals_name_the_parameter(change: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ApiError) as error:
        parse_completion({**COMPLETION, **change})
    assert (error.value.status, error.value.param) == (400, param)
    assert message in error.value.message


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_chat_refusals_name_the_parameter(change: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as error:
        parse_chat({**CHAT, **change}, render, 100)
    assert (error.value.status, error.value.param) == (400, param)


def test_defaults_are_openai_s() -> None:
    completion = parse_completion(COMPLETION)
    assert completion.sampling == {"temperature": 1.0, "max_tokens": 16}
    chat = parse_chat(CHAT, render, max_context=100)
    assert chat.prompts == ([1],)
    assert chat.sampling["max_tokens"] == 99
    assert parse_chat({**CHAT, "max_completion_tokens": 7}, render, 100).sampling["max_tokens"] == 7


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    assert parse_chat({**CHAT, "messages": [{"role": "user", "content": parts}]}, render, 9).prompts == ([3],)


def test_seeded_choices_differ_by_their_seed() -> None:
    request = parse_completion({**COMPLETION, "prompt": [[1], [2]], "n": 2, "seed": 5})
    assert [(prompt, sampling["seed"]) for prompt, sampling in jobs(request)] == [
        ([1], 5),
        ([1], 6),
        ([2], 5),
        ([2], 6),
    ]
