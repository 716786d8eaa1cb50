"""From a message to a client's output tensors, as names and arrays; free of Triton."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from distserve.serving.chunk import Chunk
from distserve.serving.params import Parameters
from distserve.serving.schema import ORCHESTRATOR_OUTPUTS

Outputs = dict[str, npt.NDArray[Any]]
_ALL = frozenset(spec.name for spec in ORCHESTRATOR_OUTPUTS)


class ResponseBuilder:
    """Makes the outputs of one request.

    Only outputs that the client requested are made; a client that names none has requested all. Those of
    vllm_backend and tensorrt_llm_bls that have a ``return_*`` input wait for it, except that the last message
    always has ``finish_reason``. ``batch_index`` (always 0) comes only to clients that name their outputs.

    Args:
        prefix: the prompt's text where ``text_output`` begins with it, else empty.
        decode_token: one token as text, for the alternatives in ``logprobs``.
    """

    def __init__(
        self, params: Parameters, requested: frozenset[str], prefix: str, decode_token: Callable[[int], str]
    ) -> None:
        self._params, self._requested = params, requested
        self._named = requested < _ALL
        self._prefix, self._decode_token = prefix, decode_token

    def build(self, chunk: Chunk) -> Outputs:
        """The outputs of one message."""
        outputs: Outputs = {}
        if "text_output" in self._requested:  # an array of a string takes as long as all others
            outputs["text_output"] = _strings(self._prefix + chunk.text)
            self._prefix = ""
        outputs["output_ids"] = np.array(chunk.ids, np.int32)
        self._add_vllm(outputs, chunk)
        if self._params.return_log_probs:
            outputs["cum_log_probs"] = np.array([chunk.cumulative_logprob], np.float32)
            values = [entry["logprob"] for entry in chunk.logprobs]
            outputs["output_log_probs"] = np.array([values], np.float32)
        if self._named:
            outputs["batch_index"] = np.zeros(1, np.int32)
        if chunk.final is not None:
            outputs["prompt_tokens"] = np.array([chunk.final.prompt_tokens], np.uint32)
            outputs["completion_tokens"] = np.array([chunk.final.completion_tokens], np.uint32)
            outputs["stage_times"] = _strings(json.dumps(chunk.final.stage_times))
        if not self._named:
            return outputs
        return {name: value for name, value in outputs.items() if name in self._requested}

    def _add_vllm(self, outputs: Outputs, chunk: Chunk) -> None:
        params, final = self._params, chunk.final
        if final is not None:
            outputs["finish_reason"] = _strings(final.finish_reason)
        elif params.return_finish_reason:
            outputs["finish_reason"] = _strings("None")  # as vllm_backend has it
        if params.return_cumulative_logprob:
            outputs["cumulative_logprob"] = np.array([chunk.cumulative_logprob], np.float32)
        if params.return_logprobs:
            outputs["logprobs"] = _strings("null" if params.logprobs is None else self._logprobs(chunk))
        if params.return_num_input_tokens:
            outputs["num_input_tokens"] = np.array([chunk.prompt_tokens], np.uint32)
        if params.return_num_output_tokens:
            outputs["num_output_tokens"] = np.array([len(chunk.ids)], np.uint32)

    def _logprobs(self, chunk: Chunk) -> str:
        pairs = zip(chunk.ids, chunk.logprobs, strict=True)
        return json.dumps([self._logprob_entry(token, entry) for token, entry in pairs])

    def _logprob_entry(self, token: int, entry: dict[str, Any]) -> dict[str, Any]:
        """vLLM's form: token id -> logprob, rank, text; the chosen token may be below the alternatives."""
        top_ids, top_logprobs = entry.get("top_ids") or [], entry.get("top_logprobs") or []
        pairs = zip(top_ids, top_logprobs, strict=True)
        shown: dict[int, tuple[float, int | None]] = {}
        for rank, (top, value) in enumerate(pairs, start=1):
            shown[top] = (value, rank)
        shown.setdefault(token, (entry["logprob"], None))
        return {
            str(i): {"logprob": value, "rank": rank, "decoded_token": self._decode_token(i)}
            for i, (value, rank) in shown.items()
        }


def _strings(text: str) -> npt.NDArray[Any]:
    return np.array([text.encode()], dtype=np.object_)
