"""Parameters of a client request: names, ranges, defaults; merged from tensors, JSON and request parameters.

Names are those of vllm_backend (its `sampling_parameters` are vLLM's ``SamplingParams``) and
tensorrt_llm_bls; defaults are vLLM's: ``max_tokens`` 16, ``temperature`` 1. As in vllm_backend, numbers
and booleans in the JSON and in request parameters may be written as strings. Where a parameter comes
twice, tensors win over the JSON and that over request parameters. ``end_id`` is one more stop token; the
model's own end tokens stay in force.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distserve.core.parsing import nearest
from distserve.serving.schema import ServingError

MAX_STOP_STRINGS = 128
MAX_STOP_CHARS = 4096
MAX_STOP_IDS = 1024
MAX_LOGPROBS = 20

ENDPOINT_NAMES = frozenset(
    {"id", "timeout", "sequence_id", "sequence_start", "sequence_end", "binary_data_output"}
)
"""Belong to the HTTP and gRPC endpoints and are left there; so are names that begin with ``triton_``."""

ALIASES: Mapping[str, str] = {"stop_words": "stop", "random_seed": "seed", "min_length": "min_tokens"}
"""tensorrt_llm_bls name -> ours."""


@dataclass(frozen=True)
class Parameters:
    """All parameters of one request, validated."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    priority: int = 0
    ttft_slo: float | None = None
    tpot_slo: float | None = None
    deadline: float | None = None
    stream: bool = False
    exclude_input_in_output: bool | None = None
    return_finish_reason: bool = False
    return_cumulative_logprob: bool = False
    return_logprobs: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    return_log_probs: bool = False

    @property
    def wanted_logprobs(self) -> int | None:
        """What the instance is asked for: a client that wants sums only needs the chosen tokens' values."""
        if self.logprobs is None and (self.return_cumulative_logprob or self.return_log_probs):
            return 0
        return self.logprobs

    def to_wire(self, seed: int) -> dict[str, Any]:
        """The ``sampling`` entry of a submit call; ``seed`` where the client gave none."""
        return {
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": seed if self.seed is None else self.seed,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "min_tokens": self.min_tokens,
            "stop_token_ids": list(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "logprobs": self.wanted_logprobs,
        }


def invalid(field: str, value: object, allowed: str) -> ServingError:
    """The one form of a refusal."""
    shown = repr(value)
    if len(shown) > 100:
        shown = shown[:97] + "..."
    return ServingError("INVALID_ARGUMENT", f"{field}={shown}: {allowed}")


def merge(sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge parameters, strongest source first, under their canonical names; nulls count as absent.

    Raises `ServingError` when one source gives a parameter under two names.
    """
    merged: dict[str, Any] = {}
    for source in sources:
        names: dict[str, str] = {}
        for name, value in source.items():
            if value is None or name in ENDPOINT_NAMES or name.startswith("triton_"):
                continue
            key = ALIASES.get(name, name)
            if key in names:
                raise invalid(name, value, f"is another name of '{names[key]}', which is given, too")
            names[key] = name
            if key not in merged:
                merged[key] = _without_empty(value) if name in ("stop_words", "bad_words") else value
    return merged


def parse_parameters(values: Mapping[str, Any], vocab_size: int) -> Parameters:
    """Validate merged parameters.

    Raises `ServingError` (INVALID_ARGUMENT) naming the first refused field, its value and what is allowed.
    """
    given = dict(values)
    end_id = given.pop("end_id", None)
    kwargs: dict[str, Any] = {}
    for name, value in given.items():
        read = _FIELDS.get(name)
        if read is not None:
            kwargs[name] = read(name, value)
        elif name in _UNSUPPORTED:
            _check_unsupported(name, value)
        else:
            raise ServingError("INVALID_ARGUMENT", f"unknown parameter '{name}'{nearest(name, _known())}")
    if end_id is not None:
        kwargs["stop_token_ids"] = (*kwargs.get("stop_token_ids", ()), _integer(0, None)("end_id", end_id))
    params = Parameters(**kwargs)
    for token in params.stop_token_ids:
        if token >= vocab_size:
            raise invalid("stop_token_ids", token, f"must be below the vocabulary's {vocab_size}")
    if params.min_tokens > params.max_tokens:
        raise invalid("min_tokens", params.min_tokens, f"must be at most max_tokens={params.max_tokens}")
    if params.stream and params.exclude_input_in_output is False:
        raise invalid("exclude_input_in_output", False, "must be true or absent when stream is true")
    return params


def _known() -> list[str]:
    return [*_FIELDS, *ALIASES, "end_id", "text_input", "input_ids"]


def _without_empty(value: Any) -> Any:
    """Clients of tensorrt_llm_bls send an empty string for "no words"."""
    if value == "":
        return []
    return [word for word in value if word != ""] if isinstance(value, (list, tuple)) else value


def _integer(low: int, high: int | None) -> Callable[[str, Any], int]:
    allowed = (
        f"must be an integer of at least {low}" if high is None else f"must be an integer in [{low}, {high}]"
    )

    def read(name: str, value: Any) -> int:
        number = value
        if isinstance(number, str):
            try:
                number = int(number.strip()) if len(number) < 32 else None
            except ValueError:
                raise invalid(name, value, allowed) from None
        if isinstance(number, float) and number.is_integer():
            number = int(number)
        if isinstance(number, bool) or not isinstance(number, int):
            raise invalid(name, value, allowed)
        if number < low or (high is not None and number > high):
            raise invalid(name, value, allowed)
        return number

    return read


def _real(low: float, high: float, allowed: str, low_open: bool = False) -> Callable[[str, Any], float]:
    def read(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise invalid(name, value, f"must be a number {allowed}")
        try:
            number = float(value)
        except (ValueError, OverflowError):
            raise invalid(name, value, f"must be a number {allowed}") from None
        if not math.isfinite(number) or number < low or number > high or (low_open and number == low):
            raise invalid(name, value, f"must be a number {allowed}")
        return number

    return read


def _boolean(name: str, value: Any) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise invalid(name, value, "must be true or false")
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise invalid(name, value, "must be a string or a list of strings")
    if len(items) > MAX_STOP_STRINGS:
        raise invalid(name, f"{len(items)} strings", f"at most {MAX_STOP_STRINGS} are allowed")
    for item in items:
        if not 0 < len(item) <= MAX_STOP_CHARS:
            raise invalid(name, item, f"each must have 1 to {MAX_STOP_CHARS} characters")
    return tuple(dict.fromkeys(items))


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    items = value if isinstance(value, (list, tuple)) else [value]
    if len(items) > MAX_STOP_IDS:
        raise invalid(name, f"{len(items)} ids", f"at most {MAX_STOP_IDS} are allowed")
    return tuple(_integer(0, None)(name, item) for item in items)


def _top_k(name: str, value: Any) -> int:
    return max(0, _integer(-1, 2**31 - 1)(name, value))  # vLLM writes "all" as -1, TensorRT-LLM as 0


_PENALTY = _real(-2, 2, "in [-2, 2]")
_DURATION = _real(0, 1e6, "of seconds above 0", low_open=True)
_FIELDS: Mapping[str, Callable[[str, Any], Any]] = {
    "max_tokens": _integer(1, 2**31 - 1),
    "min_tokens": _integer(0, 2**31 - 1),
    "temperature": _real(0, 1e6, "of at least 0 (0: greedy)"),
    "top_k": _top_k,
    "top_p": _real(0, 1, "above 0 and at most 1", low_open=True),
    "min_p": _real(0, 1, "in [0, 1]"),
    "seed": _integer(0, 2**64 - 1),
    "stop": _strings,
    "stop_token_ids": _token_ids,
    "ignore_eos": _boolean,
    "repetition_penalty": _real(0, 1e6, "above 0", low_open=True),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logprobs": _integer(0, MAX_LOGPROBS),
    "priority": _integer(-(2**31), 2**31 - 1),
    "ttft_slo": _DURATION,
    "tpot_slo": _DURATION,
    "deadline": _DURATION,
    "stream": _boolean,
    "exclude_input_in_output": _boolean,
    "return_finish_reason": _boolean,
    "return_cumulative_logprob": _boolean,
    "return_logprobs": _boolean,
    "return_num_input_tokens": _boolean,
    "return_num_output_tokens": _boolean,
    "return_log_probs": _boolean,
}

_ANY = object()
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    # name: the values that ask for nothing, so that they are no errors
    "beam_width": (1,),
    "n": (1,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 0),
    "early_stopping": (False,),
    "pad_id": (_ANY,),  # nothing is padded
    "bad_words": ([], ()),
    "image": ([],),
    "lora_name": (),
    "logit_bias": (),
    "prompt_logprobs": (),
    "guided_decoding": (),
    "structured_outputs": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "embedding_request": (),
    "prompt_embedding_table": (),
    "prompt_vocab_size": (),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "num_draft_tokens": (0,),
}


def _check_unsupported(name: str, value: Any) -> None:
    neutral = _UNSUPPORTED[name]
    if _ANY in neutral or value in neutral or (isinstance(value, str) and value in map(str, neutral)):
        return
    hint = f"only {neutral[0]!r} is allowed" if neutral else "leave it out"
    raise invalid(name, value, f"is not supported by this server; {hint}")
