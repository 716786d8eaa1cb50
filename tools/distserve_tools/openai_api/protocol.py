"""Request bodies of /v1/completions and /v1/chat/completions: what is taken, what is refused, and why."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from distserve_tools.openai_api.errors import ApiError

Prompt = str | list[int]

# Handed to the orchestrator as they are; it checks ranges and names the field in its errors.
_SAMPLING: Mapping[str, tuple[type, ...]] = {
    "temperature": (int, float),
    "top_p": (int, float),
    "top_k": (int,),
    "min_p": (int, float),
    "min_tokens": (int,),
    "seed": (int,),
    "presence_penalty": (int, float),
    "frequency_penalty": (int, float),
    "repetition_penalty": (int, float),
    "ignore_eos": (bool,),
    "stop_token_ids": (list,),
}
_COMMON = {"model", "stream", "stream_options", "n", "stop", "user", "max_tokens", *_SAMPLING}
_COMPLETION = _COMMON | {"prompt", "logprobs", "echo", "best_of", "suffix", "logit_bias"}
_CHAT = _COMMON | {
    "messages",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "response_format",
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "parallel_tool_calls",
    "metadata",
    "store",
    "service_tier",
}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none",),
}
MAX_CHOICES = 128


@dataclass(frozen=True)
class GenerationRequest:
    """One API call after validation. `prompts` x `n` choices are generated."""

    model: str
    prompts: tuple[Prompt, ...]
    sampling: Mapping[str, Any]  # of one choice; the i-th choice of a seeded request uses seed + i
    n: int
    stream: bool
    include_usage: bool
    logprobs: int | None  # alternatives per token; None: no logprobs


def parse_completion(body: object) -> GenerationRequest:
    """Raises `ApiError` 400 naming the parameter."""
    values = _mapping(body, _COMPLETION)
    logprobs = _typed(values, "logprobs", (int,), None)
    if logprobs is not None and not 0 <= logprobs <= 20:
        raise _bad("logprobs", logprobs, "0 to 20")
    return _request(values, _prompts(values), logprobs, default_max_tokens=16)


def parse_chat(
    body: object, render: Callable[[list[dict[str, Any]]], list[int]], max_context: int
) -> GenerationRequest:
    """`render` turns messages into token ids with the model's chat template. Raises `ApiError` 400."""
    values = _mapping(body, _CHAT)
    prompt = render(_messages(values))
    logprobs = None
    if _typed(values, "logprobs", (bool,), False):
        logprobs = _typed(values, "top_logprobs", (int,), 0)
        if not 0 <= logprobs <= 20:
            raise _bad("top_logprobs", logprobs, "0 to 20")
    elif _typed(values, "top_logprobs", (int,), None) is not None:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if values.get("max_completion_tokens") is not None:
        values = {**values, "max_tokens": values["max_completion_tokens"]}
    return _request(values, (prompt,), logprobs, default_max_tokens=max(1, max_context - len(prompt)))


def _request(
    values: Mapping[str, Any], prompts: tuple[Prompt, ...], logprobs: int | None, default_max_tokens: int
) -> GenerationRequest:
    n = _typed(values, "n", (int,), 1)
    if not 1 <= n * len(prompts) <= MAX_CHOICES:
        raise _bad("n", n, f"1 to {MAX_CHOICES} choices in all")
    options = _typed(values, "stream_options", (dict,), None) or {}
    sampling = {
        name: values[name]
        for name, types in _SAMPLING.items()
        if _typed(values, name, types, None) is not None
    }
    sampling.setdefault("temperature", 1.0)  # OpenAI's default
    sampling["max_tokens"] = _typed(values, "max_tokens", (int,), default_max_tokens)
    stop = _stop(values.get("stop"))
    if stop:
        sampling["stop"] = stop
    return GenerationRequest(
        model=_typed(values, "model", (str,), ""),
        prompts=prompts,
        sampling=sampling,
        n=n,
        stream=_typed(values, "stream", (bool,), False),
        include_usage=bool(options.get("include_usage", False)),
        logprobs=logprobs,
    )


def _mapping(body: object, known: set[str]) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise ApiError(400, f"the body must be a JSON object, found {type(body).__name__}")
    for name, value in body.items():
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise ApiError(400, f"unknown parameter '{name}'{hint}", param=name)
        if name in _NEUTRAL and value is not None and value not in _NEUTRAL[name]:
            raise ApiError(400, f"{name} is not supported", param=name)
    return body


def _typed(values: Mapping[str, Any], name: str, types: tuple[type, ...], default: Any) -> Any:
    value = values.get(name)
    if value is None:
        return default
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        wanted = " or ".join(t.__name__ for t in types)
        raise _bad(name, value, wanted)
    return value


def _prompts(values: Mapping[str, Any]) -> tuple[Prompt, ...]:
    prompt = values.get("prompt")
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt:
        if all(type(p) is int for p in prompt):
            return (prompt,)
        if all(isinstance(p, str) for p in prompt):
            return tuple(prompt)
        if all(isinstance(p, list) and p and all(type(t) is int for t in p) for p in prompt):
            return tuple(prompt)
    raise ApiError(
        400,
        "prompt: expected a string, a list of strings, token ids, or a list of token id lists",
        param="prompt",
    )


def _messages(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    messages = values.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages: expected a non-empty list", param="messages")
    out = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError(400, f"{where}: expected an object with a role", param="messages")
        out.append({"role": message["role"], "content": _content(message.get("content"), where)})
    return out


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [p["text"] for p in content if _is_text_part(p)]
        if len(parts) == len(content):
            return "".join(parts)
    raise ApiError(400, f"{where}.content: expected a string or text parts", param="messages")


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _stop(stop: object) -> list[str]:
    if stop is None:
        return []
    strings = [stop] if isinstance(stop, str) else stop
    if isinstance(strings, list) and len(strings) <= 16 and all(isinstance(s, str) and s for s in strings):
        return strings
    raise _bad("stop", stop, "a non-empty string or up to 16 of them")


def _bad(name: str, value: object, allowed: str) -> ApiError:
    return ApiError(400, f"{name}={value!r}: allowed is {allowed}", param=name)
