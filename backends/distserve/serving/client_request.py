"""A client's request: what the orchestrator makes of its tensors and request parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from distserve.serving.params import Parameters, invalid, merge, parse_parameters
from distserve.serving.schema import ServingError

MAX_JSON_BYTES = 1 << 20
CANCEL_KEY_CHARS = range(16, 129)


@dataclass(frozen=True)
class ClientRequest:
    """A validated request; exactly one of ``text`` and ``ids`` is there."""

    params: Parameters
    text: str | None = None
    ids: tuple[int, ...] | None = None
    timeout_s: float | None = None
    client_id: str = ""  # the client's own word for it, for logs only
    cancel_key: str = ""  # whoever knows it may cancel the request


def parse_request(
    tensors: Mapping[str, Any],
    parameters: str,
    vocab_size: int,
    timeout_s: float | None = None,
    client_id: str = "",
) -> ClientRequest:
    """Read a request.

    Args:
        tensors: values by input name: scalars for shape [1], lists for shape [-1], texts as `str`.
        parameters: Triton's request parameters, a JSON object as text.
        vocab_size: token ids must be below it.
        timeout_s: the client's own, from its arrival.
        client_id: what the client calls the request.

    Raises:
        ServingError: INVALID_ARGUMENT, naming the field, its value and what is allowed.
    """
    given = dict(tensors)
    sampling = _json_object("sampling_parameters", given.pop("sampling_parameters", None))
    merged = merge((given, sampling, _json_object("parameters", parameters)))
    text, ids = merged.pop("text_input", None), merged.pop("input_ids", None)
    if (text is None) == (ids is None):
        both = "both are given" if text is not None else "none is given"
        raise ServingError("INVALID_ARGUMENT", f"text_input or input_ids: {both}; exactly one is needed")
    cancel_key = merged.pop("cancel_key", None)
    params = parse_parameters(merged, vocab_size)
    request = ClientRequest(
        params,
        timeout_s=timeout_s,
        client_id=client_id,
        cancel_key="" if cancel_key is None else read_cancel_key("cancel_key", cancel_key),
    )
    if text is not None:
        return replace(request, text=_text(text))
    return replace(request, ids=_ids(ids, vocab_size))


def read_cancel_key(field: str, key: object) -> str:
    """Raises `ServingError` (INVALID_ARGUMENT)."""
    if not isinstance(key, str) or len(key) not in CANCEL_KEY_CHARS:
        allowed = f"{CANCEL_KEY_CHARS[0]} to {CANCEL_KEY_CHARS[-1]}"
        raise invalid(field, key, f"must be a string of {allowed} characters that nobody can guess")
    return key


def _json_object(field: str, text: object) -> Mapping[str, Any]:
    if text is None or text == "":
        return {}
    if not isinstance(text, str):
        raise invalid(field, text, "must be a JSON object in a string")
    if len(text) > MAX_JSON_BYTES:
        raise invalid(field, text, f"at most {MAX_JSON_BYTES} characters are allowed")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(field, text, f"must be a JSON object ({error})") from None
    if not isinstance(values, dict):
        raise invalid(field, text, "must be a JSON object")
    return values


def _text(text: object) -> str:
    if not isinstance(text, str):
        raise invalid("text_input", text, "must be a string")
    if not text:
        raise invalid("text_input", text, "must not be empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid("text_input", text, "must be valid Unicode (it has a lone surrogate)") from None
    return text


def _ids(ids: object, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(ids, (list, tuple)):
        raise invalid("input_ids", ids, "must be a list of token ids")
    if not ids:
        raise invalid("input_ids", ids, "must not be empty")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise invalid("input_ids", token, f"each must be an integer in [0, {vocab_size})")
    return tuple(ids)
