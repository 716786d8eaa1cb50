"""Which submits an instance takes: shape, ranges, and whether a request can ever fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distserve.core.blocks import blocks_for
from distserve.core.config import EngineConfig
from distserve.core.model_config import ModelConfig
from distserve.core.parsing import ConfigError, nearest
from distserve.core.request import Request
from distserve.engine.requests import EngineRequest, Owner
from distserve.serving.schema import SAMPLING_KEYS, ServingError
from distserve.transfer.handle import Handle, Layout
from distserve.worker.step import SamplingParams

SUBMIT_KEYS = (
    "id",
    "prompt",
    "output",
    "max_tokens",
    "sampling",
    "deadline_s",
    "handle",
    "to_end",
    "priority",
    "due_s",
)
MAX_ID_CHARS = 256
MAX_STOP_IDS = 1024
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INTEGERS = ("top_k", "seed", "min_tokens")


@dataclass(frozen=True)
class Bounds:
    """What a request is measured against. Tokens, except `num_blocks`."""

    role: str
    max_context: int
    num_blocks: int
    block_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig, num_blocks: int) -> Bounds:
        context = min(config.max_context or model.max_context, model.max_context)
        eos = model.eos_token_ids
        return cls(config.role, context, num_blocks, config.block_size, model.vocab_size, eos)


class Admission:
    """Turns `submit` entries into requests. Raises `ServingError` naming field, value and what is allowed.

    `layout`: of the KV that a decode instance can take over.
    """

    def __init__(self, bounds: Bounds, layout: Layout | None = None) -> None:
        self._bounds = bounds
        self._layout = layout
        self._keys = itertools.count(1)

    def admit(self, entry: Mapping[str, Any], owner: Owner, now: float) -> EngineRequest:
        """The request of one entry, which arrives at `now`."""
        for key in entry:
            if key not in SUBMIT_KEYS:
                raise _invalid(f"unknown key '{key}'{nearest(str(key), SUBMIT_KEYS)}")
        prompt = self._token_ids(entry, "prompt")
        if not prompt:
            raise _invalid("prompt=[]: must have at least one token")
        output = self._token_ids(entry, "output")
        max_tokens = _integer(entry, "max_tokens", 1)
        if len(output) >= max_tokens:
            raise _invalid(f"max_tokens={max_tokens}: must be above the {len(output)} tokens of output")
        handle = self._handle(entry.get("handle"), prompt, output)
        to_end = entry.get("to_end", False)
        if not isinstance(to_end, bool):
            raise _invalid(f"to_end={to_end!r}: must be true or false")
        self._check_fit(len(prompt), len(output), max_tokens, to_end)
        request = Request(
            id=str(next(self._keys)),
            prompt_len=len(prompt),
            max_tokens=max_tokens,
            arrival_s=now,
            priority=_integer(entry, "priority") if "priority" in entry else 0,
            due_s=now + _seconds(entry, "due_s"),
            generated=len(output),
            computed=handle.num_tokens if handle is not None else 0,
            tokens=prompt + output,
        )
        params = self._sampling(entry.get("sampling"))
        deadline = _seconds(entry, "deadline_s")
        return EngineRequest(
            id=entry_id(entry),
            owner=owner,
            request=request,
            params=params,
            arrival_s=now,
            deadline_s=now + deadline if deadline < math.inf else None,
            handle=handle,
            to_end=to_end,
        )

    def _token_ids(self, entry: Mapping[str, Any], name: str) -> list[int]:
        ids = entry.get(name, [])
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            raise _invalid(f"{name}: must be a list of token ids")
        if ids and (min(ids) < 0 or max(ids) >= self._bounds.vocab_size):
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise _invalid(f"{name}: token id {wrong} must be in [0, {self._bounds.vocab_size})")
        return ids

    def _check_fit(self, prompt: int, output: int, max_tokens: int, to_end: bool) -> None:
        bounds = self._bounds
        total = prompt + max_tokens
        if total > bounds.max_context:
            raise _invalid(
                f"prompt of {prompt} tokens and max_tokens={max_tokens}: together {total}, "
                f"allowed by the context are {bounds.max_context}"
            )
        # a prefill instance keeps what is known now, the others the output to come as well
        stored = prompt + output if bounds.role == "prefill" and not to_end else total
        need = blocks_for(stored, bounds.block_size)
        if need > bounds.num_blocks:
            # not RESOURCE_EXHAUSTED, which means that a later attempt may succeed
            raise _invalid(
                f"prompt of {prompt} tokens and max_tokens={max_tokens}: {need} KV blocks of "
                f"{bounds.block_size} tokens are needed, the {bounds.role} instance has {bounds.num_blocks}"
            )

    def _handle(self, wire: Any, prompt: list[int], output: list[int]) -> Handle | None:
        if wire is None:
            return None
        if self._layout is None:
            raise _invalid(f"handle: a {self._bounds.role} instance pulls no KV")
        try:
            handle = Handle.from_wire(wire)
        except (ValueError, TypeError, KeyError) as error:
            raise _invalid(f"handle: {error}") from None
        differing = self._layout.mismatch(handle.layout)
        if differing is not None:
            raise ServingError("FAILED_PRECONDITION", f"handle: {differing}")
        known = len(prompt) + len(output)
        if not output or handle.num_tokens != known - 1 or handle.first_token != output[-1]:
            raise _invalid(
                f"handle: covers {handle.num_tokens} tokens, followed by token {handle.first_token}; prompt "
                f"and output must be these tokens ({len(prompt)} + {len(output)} given)"
            )
        return handle

    def _sampling(self, values: Any) -> SamplingParams:
        values = {} if values is None else values
        if not isinstance(values, dict):
            raise _invalid(f"sampling={values!r}: must be a map")
        for key in values:
            if key not in SAMPLING_KEYS:
                raise _invalid(f"unknown key 'sampling.{key}'{nearest(str(key), SAMPLING_KEYS)}")
        chosen: dict[str, Any] = {}
        for name in _NUMBERS:
            if name in values:
                if not _is_number(values[name]):
                    raise _invalid(f"{name}={values[name]!r}: must be a number")
                chosen[name] = float(values[name])
        for name in _INTEGERS:
            if name in values:
                chosen[name] = _integer(values, name)
        if values.get("logprobs") is not None:
            chosen["logprobs"] = _integer(values, "logprobs")
        try:
            return SamplingParams(end_ids=self._end_ids(values), **chosen)
        except ConfigError as error:
            raise _invalid(str(error)) from None

    def _end_ids(self, values: Mapping[str, Any]) -> tuple[int, ...]:
        ignore_eos = values.get("ignore_eos", False)
        if not isinstance(ignore_eos, bool):
            raise _invalid(f"ignore_eos={ignore_eos!r}: must be true or false")
        stop = self._token_ids(values, "stop_token_ids")
        if len(stop) > MAX_STOP_IDS:
            raise _invalid(f"stop_token_ids: {len(stop)} given, allowed are {MAX_STOP_IDS}")
        eos = () if ignore_eos else self._bounds.eos_token_ids
        return tuple(dict.fromkeys((*eos, *stop)))


def entry_id(entry: Any) -> str:
    """The id of a `submit` entry. Raises `ServingError` (INVALID_ARGUMENT)."""
    id = entry.get("id") if isinstance(entry, dict) else None
    if not isinstance(id, str) or not 0 < len(id) <= MAX_ID_CHARS:
        raise _invalid(f"requests: id={str(id)[:100]!r}: must be a string of 1 to {MAX_ID_CHARS} characters")
    return id


def _integer(values: Mapping[str, Any], name: str, low: int | None = None) -> int:
    value = values.get(name)
    if type(value) is not int or (low is not None and value < low):
        at_least = "" if low is None else f" of at least {low}"
        raise _invalid(f"{name}={value!r}: must be an integer{at_least}")
    return value


def _seconds(values: Mapping[str, Any], name: str) -> float:
    """Infinity for absent or null."""
    value = values.get(name)
    if value is not None and not (_is_number(value) and value >= 0):
        raise _invalid(f"{name}={value!r}: must be a number of seconds, 0 or more")
    return math.inf if value is None else float(value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and value == value and abs(value) != float("inf")


def _invalid(message: str) -> ServingError:
    return ServingError("INVALID_ARGUMENT", message)
