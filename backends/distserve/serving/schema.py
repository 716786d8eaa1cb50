"""The interface in one place: tensor names of every Triton model, and the protocol of the instances.

Free of torch and of Triton, so that the planner renders ``config.pbtxt`` from it and tools can speak it.

Instance protocol (version 1). One msgpack map in one BYTES tensor each way, ``MESSAGE`` in and ``REPLY`` out.

Call   ``{"v": 1, "op": ..., "owner": str, "epoch": int, ...}``; ``epoch`` is new at every start of the
       caller, and an instance that sees a new epoch of an owner drops what that owner had before.
Reply  ``{"v": 1, "ok": true, ...}`` or ``{"v": 1, "ok": false, "error": {"code": str, "message": str}}``.

``status``   -> instance, role, epoch (new at every engine start), layout, model_hash, max_context,
             block_size, blocks_total, max_batch_size, max_batch_tokens, pieces_above (longer prompts are
             computed in pieces, between which others go; null: they are not), and the `LOAD_KEYS`, all at
             top level. With ``step_times: true`` also step_times: [{prompt_tokens_to, decodes_to, steps,
             prompt_tokens, prompt_squares, prompts, prompt_ends, decodes, context_tokens, wall_s, cpu_s}],
             sums since the engine's start by class of step (`distserve.engine.step_times`).
``submit``   requests: [{id, prompt: [int], output: [int] (produced so far), max_tokens (of the whole output,
             what is in ``output`` included), sampling: {`SAMPLING_KEYS`}, deadline_s? (seconds from now),
             handle? (decode only), to_end? (bool; prefill only: decode it, too, and hand nothing out),
             priority? (int), due_s? (seconds from now, of the first token)}] -> results: [{id, ok: true} |
             {id, ok: false, error}]. Submitting again an id that the same owner and epoch already has is
             ok and does nothing, so that a call whose reply was lost can be repeated.
``poll``     ack: last seq seen -> epoch, seq, events: [{seq, id, type, ...}], load? {`LOAD_KEYS`}. Held
             open up to heartbeat_s, then answered empty. Events that no poll has acknowledged are sent
             again. A second poll of the same owner ends the first one at once.
``cancel``   ids. ``release`` ids (prefill: let go of leases). ``renew`` ids (prefill: extend leases).
             Unknown ids are ok.

Events. ``prefilled`` {token, logprob?, handle? (absent on a unified instance and when finished), finished?:
reason, queue_s, prefill_s}; ``admitted`` {queue_s}; ``started`` {queue_s, transfer_s}: the KV is here and
decoding begins; ``token`` {tokens: [int], logprobs?: [entry]}; ``finished`` {reason, error?: {code,
message}}. A unified instance sends ``prefilled`` without handle, then ``token``; so does a decode
instance for a request without handle, and a prefill instance for one that has ``to_end``. An end or
stop token is sent as a token, too. A logprob entry is {logprob, top_ids: [int], top_logprobs: [float]},
most likely first.

Engine process <-> stub: see `distserve.serving.frames`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgpack

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 64 << 20
"""Upper bound of one encoded message; a 1M-token prompt takes 5 MB."""

DataType = Literal["TYPE_STRING", "TYPE_BOOL", "TYPE_INT32", "TYPE_UINT32", "TYPE_UINT64", "TYPE_FP32"]
Op = Literal["status", "submit", "poll", "cancel", "release", "renew"]
EventType = Literal["prefilled", "admitted", "started", "token", "finished"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
ErrorCode = Literal[
    "INVALID_ARGUMENT",
    "UNAVAILABLE",
    "RESOURCE_EXHAUSTED",
    "NOT_FOUND",
    "FAILED_PRECONDITION",
    "DEADLINE_EXCEEDED",
    "CANCELLED",
    "INTERNAL",
]
ERROR_CODES: tuple[str, ...] = get_args(ErrorCode)

SAMPLING_KEYS: tuple[str, ...] = (
    "temperature",  # float; 0 is greedy
    "top_k",  # int; 0 means all
    "top_p",  # float in (0, 1]
    "min_p",  # float in [0, 1]
    "seed",  # int in [0, 2**64): always there, the orchestrator draws one for a request without
    "repetition_penalty",  # float > 0; 1 is none; over prompt and output
    "presence_penalty",  # float in [-2, 2]; over output
    "frequency_penalty",  # float in [-2, 2]; over output
    "min_tokens",  # int; end and stop tokens are masked until then
    "stop_token_ids",  # [int]
    "ignore_eos",  # bool
    "logprobs",  # None, or the number of alternatives per token (0: the chosen token only)
)
LOAD_KEYS: tuple[str, ...] = (
    "blocks_free",
    "queued",
    "queued_tokens",
    "running",
    "leases",
    "transfers_pending",
    "credits",  # tokens of prefill work that the instance can take into its next batches now
    "preemptions",
    "prefill_steps",  # since the engine's start: steps that computed prompts,
    "prefill_tokens",  # the tokens of these prompts,
    "prefill_us",  # and the microseconds that these steps took
)


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a Triton model; ``dims`` as in config.pbtxt (-1: any length)."""

    name: str
    dtype: DataType
    dims: tuple[int, ...] = (1,)
    optional: bool = True


STAGE_INPUTS = (TensorSpec("MESSAGE", "TYPE_STRING", optional=False),)
STAGE_OUTPUTS = (TensorSpec("REPLY", "TYPE_STRING", optional=False),)

# `text_input` is optional: a request may bring `input_ids` or `control` in its place. The model checks.
ORCHESTRATOR_INPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("text_input", "TYPE_STRING"),
    TensorSpec("input_ids", "TYPE_INT32", (-1,)),
    TensorSpec("control", "TYPE_STRING"),
    # vllm_backend
    TensorSpec("stream", "TYPE_BOOL"),
    TensorSpec("sampling_parameters", "TYPE_STRING"),
    TensorSpec("exclude_input_in_output", "TYPE_BOOL"),
    TensorSpec("return_finish_reason", "TYPE_BOOL"),
    TensorSpec("return_cumulative_logprob", "TYPE_BOOL"),
    TensorSpec("return_logprobs", "TYPE_BOOL"),
    TensorSpec("return_num_input_tokens", "TYPE_BOOL"),
    TensorSpec("return_num_output_tokens", "TYPE_BOOL"),
    TensorSpec("image", "TYPE_STRING", (-1,)),  # there to be refused by name
    # tensorrt_llm_bls
    TensorSpec("max_tokens", "TYPE_INT32"),
    TensorSpec("bad_words", "TYPE_STRING", (-1,)),
    TensorSpec("stop_words", "TYPE_STRING", (-1,)),
    TensorSpec("end_id", "TYPE_INT32"),
    TensorSpec("pad_id", "TYPE_INT32"),
    TensorSpec("top_k", "TYPE_INT32"),
    TensorSpec("top_p", "TYPE_FP32"),
    TensorSpec("temperature", "TYPE_FP32"),
    TensorSpec("length_penalty", "TYPE_FP32"),
    TensorSpec("repetition_penalty", "TYPE_FP32"),
    TensorSpec("min_length", "TYPE_INT32"),
    TensorSpec("presence_penalty", "TYPE_FP32"),
    TensorSpec("frequency_penalty", "TYPE_FP32"),
    TensorSpec("random_seed", "TYPE_UINT64"),
    TensorSpec("return_log_probs", "TYPE_BOOL"),
    TensorSpec("beam_width", "TYPE_INT32"),
    # the rest of the sampling parameters, so that HTTP clients may send lists
    TensorSpec("min_tokens", "TYPE_INT32"),
    TensorSpec("min_p", "TYPE_FP32"),
    TensorSpec("seed", "TYPE_UINT64"),
    TensorSpec("stop", "TYPE_STRING", (-1,)),
    TensorSpec("stop_token_ids", "TYPE_INT32", (-1,)),
    TensorSpec("ignore_eos", "TYPE_BOOL"),
    # in time or not at all
    TensorSpec("priority", "TYPE_INT32"),
    TensorSpec("ttft_slo", "TYPE_FP32"),
    TensorSpec("tpot_slo", "TYPE_FP32"),
    TensorSpec("deadline", "TYPE_FP32"),
)

ORCHESTRATOR_OUTPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("text_output", "TYPE_STRING", (-1,)),
    # vllm_backend
    TensorSpec("finish_reason", "TYPE_STRING", (-1,)),
    TensorSpec("cumulative_logprob", "TYPE_FP32", (-1,)),
    TensorSpec("logprobs", "TYPE_STRING", (-1,)),
    TensorSpec("num_input_tokens", "TYPE_UINT32"),
    TensorSpec("num_output_tokens", "TYPE_UINT32", (-1,)),
    # tensorrt_llm_bls
    TensorSpec("cum_log_probs", "TYPE_FP32", (-1,)),
    TensorSpec("output_log_probs", "TYPE_FP32", (-1, -1)),
    TensorSpec("batch_index", "TYPE_INT32"),
    # ours
    TensorSpec("output_ids", "TYPE_INT32", (-1,)),
    TensorSpec("prompt_tokens", "TYPE_UINT32"),
    TensorSpec("completion_tokens", "TYPE_UINT32"),
    TensorSpec("stage_times", "TYPE_STRING"),
    TensorSpec("control_output", "TYPE_STRING"),
)


class ServingError(Exception):
    """An error that crosses a boundary; the message names field, value and what is allowed."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.message = message

    def to_wire(self) -> dict[str, str]:
        """The ``error`` entry of a reply or event."""
        return {"code": self.code, "message": self.message}

    @staticmethod
    def from_wire(error: Any) -> ServingError:
        """Read an ``error`` entry; one of an unknown form becomes INTERNAL."""
        if not isinstance(error, Mapping):
            return ServingError("INTERNAL", f"malformed error entry: {error!r}")
        code = error.get("code")
        return ServingError(code if code in ERROR_CODES else "INTERNAL", str(error.get("message", "")))


def encode(message: Mapping[str, Any]) -> bytes:
    """Encode one call or reply, adding the protocol version.

    Raises:
        ServingError: RESOURCE_EXHAUSTED when longer than `MAX_MESSAGE_BYTES`.
    """
    data: bytes = msgpack.packb({"v": PROTOCOL_VERSION, **message}, use_bin_type=True)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ServingError(
            "RESOURCE_EXHAUSTED", f"message of {len(data)} bytes, allowed are {MAX_MESSAGE_BYTES}"
        )
    return data


def decode(data: bytes) -> dict[str, Any]:
    """Decode one call or reply.

    Raises:
        ServingError: INVALID_ARGUMENT: too long, not msgpack, not a map, or of another protocol version.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ServingError(
            "INVALID_ARGUMENT", f"message of {len(data)} bytes, allowed are {MAX_MESSAGE_BYTES}"
        )
    try:
        message = msgpack.unpackb(data, raw=False, strict_map_key=False)
    except (
        ValueError,
        TypeError,
        msgpack.UnpackException,
    ) as error:  # TypeError: a map with a list for a key
        raise ServingError("INVALID_ARGUMENT", f"message is not msgpack: {error}") from error
    if not isinstance(message, dict):
        raise ServingError("INVALID_ARGUMENT", f"message is a {type(message).__name__}, expected a map")
    version = message.get("v")
    if version != PROTOCOL_VERSION:
        raise ServingError(
            "INVALID_ARGUMENT", f"protocol version {version!r}, this side speaks {PROTOCOL_VERSION}"
        )
    return message


def ok_reply(**fields: Any) -> bytes:
    """Encode a successful reply."""
    return encode({"ok": True, **fields})


def error_reply(error: ServingError) -> bytes:
    """Encode a refusal."""
    return encode({"ok": False, "error": error.to_wire()})


def decode_reply(data: bytes) -> dict[str, Any]:
    """Decode a reply; a refusal is raised as the `ServingError` it carries."""
    message = decode(data)
    if message.get("ok") is not True:
        raise ServingError.from_wire(message.get("error"))
    return message
