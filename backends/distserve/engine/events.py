"""The events of the instance protocol, as `distserve.serving.schema` describes them. Pure functions."""

from __future__ import annotations

from typing import Any

from distserve.engine.requests import EngineRequest
from distserve.serving.schema import ServingError
from distserve.worker.step import TokenLogprobs

Fields = dict[str, Any]


def prefilled(state: EngineRequest, token: int, logprobs: TokenLogprobs | None, now: float) -> Fields:
    """The first token. `finished` or `handle` is added by the caller."""
    assert state.scheduled_s is not None
    fields: Fields = {
        "type": "prefilled",
        "token": token,
        "queue_s": state.scheduled_s - state.arrival_s,
        "prefill_s": now - state.scheduled_s,
    }
    if logprobs is not None:
        fields["logprob"] = logprob_entry(logprobs)
    return fields


def token(value: int, logprobs: TokenLogprobs | None) -> Fields:
    fields: Fields = {"type": "token", "tokens": [value]}
    if logprobs is not None:
        fields["logprobs"] = [logprob_entry(logprobs)]
    return fields


def admitted(state: EngineRequest) -> Fields:
    assert state.admitted_s is not None
    return {"type": "admitted", "queue_s": state.admitted_s - state.arrival_s}


def started(state: EngineRequest) -> Fields:
    assert state.admitted_s is not None
    assert state.started_s is not None
    return {
        "type": "started",
        "queue_s": state.admitted_s - state.arrival_s,
        "transfer_s": state.started_s - state.admitted_s,
    }


def finished(state: EngineRequest, reason: str, error: ServingError | None, now: float) -> Fields:
    fields: Fields = {"type": "finished", "reason": reason, "preemptions": state.request.preemptions}
    if error is not None:
        fields["error"] = error.to_wire()
    if state.started_s is not None:
        fields["decode_s"] = now - state.started_s
    return fields


def logprob_entry(value: TokenLogprobs) -> Fields:
    return {
        "logprob": value.chosen,
        "top_ids": list(value.top_ids),
        "top_logprobs": list(value.top_logprobs),
    }
