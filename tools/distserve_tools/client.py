"""A small streaming client of the orchestrator, over gRPC. Synchronous; one object may serve many threads."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from distserve.serving.access import Access
from distserve.serving.schema import ERROR_CODES

_END_S = 3.0
_OUTPUTS = (
    "text_output",
    "output_ids",
    "finish_reason",
    "prompt_tokens",
    "completion_tokens",
    "stage_times",
)


class RequestError(RuntimeError):
    """The server refused or failed a request. `code` is one of the schema's `ERROR_CODES`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


@dataclass(frozen=True)
class Chunk:
    """One message of a generation. The fields after `token_ids` come with the last one."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    stage_times: Mapping[str, Any] = field(default_factory=dict)  # seconds
    received_s: float = 0.0  # `time.monotonic()`


@dataclass(frozen=True)
class Completion:
    """A whole generation, with the moments at which its request left and its messages with tokens came."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    stage_times: Mapping[str, Any]
    sent_s: float
    token_s: tuple[float, ...]

    @property
    def ttft_s(self) -> float:
        """From sending to the first token's message."""
        return self.token_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        """(last token - first token) / (n - 1); 0 for one token."""
        count = len(self.token_ids)
        return (self.token_s[-1] - self.token_s[0]) / (count - 1) if count > 1 else 0.0


class Client:
    """Talks to one server's orchestrator at `url` (host:port of its gRPC endpoint).

    `access` is for control operations that change the server.
    """

    def __init__(self, url: str, model: str = "orchestrator", access: Access | None = None) -> None:
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", -1),
            # a server that is started again is found again at once
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        self._access = access
        self._channel = grpc.insecure_channel(url, options=options)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._model = model

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stream(
        self,
        prompt: str | Sequence[int],
        timeout_s: float = 600.0,
        stream: bool = True,
        on_call: Callable[[grpc.Call], None] | None = None,
        **sampling: Any,
    ) -> Iterator[Chunk]:
        """Generates from a text or from token ids; `sampling` as in `sampling_parameters`.

        Closing the iterator early cancels the request; so does `cancel()` of the call that `on_call` gets,
        from any thread and at any moment, but by gRPC (see `_end`). Raises `RequestError`.
        """
        key = secrets.token_hex(16)
        sampling["cancel_key"] = key
        request = service_pb2.ModelInferRequest(model_name=self._model)
        if isinstance(prompt, str):
            _add_text(request, "text_input", prompt)
        else:
            _add(request, "input_ids", "INT32", len(prompt), np.asarray(prompt, np.int32).tobytes())
        _add_text(request, "sampling_parameters", json.dumps(sampling))
        for name, value in (("stream", stream), ("exclude_input_in_output", True)):
            _add(request, name, "BOOL", 1, bytes([value]))
        for response in self._responses(request, _OUTPUTS, timeout_s, on_call, key):
            yield _chunk(response)

    def complete(
        self, prompt: str | Sequence[int], timeout_s: float = 600.0, stream: bool = True, **sampling: Any
    ) -> Completion:
        """Like `stream`, gathered. Raises `RequestError`, also for an end without a finish reason."""
        sent_s = time.monotonic()
        return gather(self.stream(prompt, timeout_s, stream, **sampling), sent_s)

    def control(self, op: str, timeout_s: float = 10.0, **arguments: Any) -> dict[str, Any]:
        """A control operation of the orchestrator, such as `status`. Raises `RequestError`."""
        request = service_pb2.ModelInferRequest(model_name=self._model)
        if self._access is not None and op not in ("status", "cancel"):
            arguments["key"] = self._access.operator_key
        _add_text(request, "control", json.dumps({"op": op, **arguments}))
        answers = [
            json.loads(_outputs(response)["control_output"][4:])
            for response in self._responses(request, ("control_output",), timeout_s)
        ]
        if not answers:
            raise RequestError("UNAVAILABLE", f"no answer to {op!r}")
        answer: dict[str, Any] = answers[0]
        return answer

    def _responses(
        self,
        request: Any,
        outputs: Sequence[str],
        timeout_s: float,
        on_call: Callable[[grpc.Call], None] | None = None,
        key: str | None = None,
    ) -> Iterator[Any]:
        tensor = service_pb2.ModelInferRequest.InferRequestedOutputTensor
        request.outputs.extend(tensor(name=name) for name in outputs)
        call = self._stub.ModelStreamInfer(iter([request]), timeout=timeout_s)
        if on_call is not None:
            on_call(call)
        ended = False
        try:
            for message in call:
                if message.error_message:
                    raise request_error(message.error_message)
                yield message.infer_response
            ended = True
        except grpc.RpcError as error:
            ended = True
            raise RequestError(error.code().name, error.details() or "") from None
        finally:
            if not ended:
                self._end(call, key)

    def _end(self, call: Any, key: str | None) -> None:
        """Has the orchestrator end a request, and reads its stream to the end.

        A stream that is cancelled by gRPC may crash Triton 24.10 (its issues 7368 and 8034), or, between its
        last response and its end, be kept for ever, so that its model never unloads. It is the last resort.
        """
        last_resort = threading.Timer(_END_S, call.cancel)
        last_resort.start()
        try:
            if key is not None:
                with contextlib.suppress(RequestError):
                    self.control("cancel", _END_S, cancel_key=key)
            with contextlib.suppress(grpc.RpcError):
                for _ in call:
                    pass
        finally:
            last_resort.cancel()


def gather(chunks: Iterator[Chunk], sent_s: float) -> Completion:
    """Puts the chunks of one generation together."""
    text = ""
    ids: list[int] = []
    times: list[float] = []
    last: Chunk | None = None
    for chunk in chunks:
        text += chunk.text
        ids += chunk.token_ids
        if chunk.token_ids:
            times.append(chunk.received_s)
        if chunk.finish_reason is not None:
            last = chunk  # the stream is read to its end all the same
    if last is None or last.finish_reason is None:
        raise RequestError("INTERNAL", "the generation ended without its last message")
    return Completion(
        text,
        tuple(ids),
        last.finish_reason,
        last.prompt_tokens,
        last.completion_tokens,
        last.stage_times,
        sent_s,
        tuple(times),
    )


def request_error(text: str) -> RequestError:
    """In a stream Triton drops the status of an error, so the orchestrator writes the code into the text."""
    for code in ERROR_CODES:
        head, found, rest = text.partition(f"{code}: ")
        if found and len(head) < 40:
            return RequestError(code, rest)
    return RequestError("INTERNAL", text)


def _chunk(response: Any) -> Chunk:
    raw = _outputs(response)
    reason = _text(raw.get("finish_reason", b""))
    times = _text(raw.get("stage_times", b""))
    return Chunk(
        text=_text(raw.get("text_output", b"")),
        token_ids=tuple(np.frombuffer(raw.get("output_ids", b""), np.int32).tolist()),
        finish_reason=reason or None,
        prompt_tokens=_number(raw.get("prompt_tokens", b"")),
        completion_tokens=_number(raw.get("completion_tokens", b"")),
        stage_times=json.loads(times) if times else {},
        received_s=time.monotonic(),
    )


def _outputs(response: Any) -> dict[str, bytes]:
    pairs = zip(response.outputs, response.raw_output_contents, strict=True)
    return {tensor.name: raw for tensor, raw in pairs}


def _text(raw: bytes) -> str:
    """The first element of a BYTES tensor: a length, then that many bytes."""
    return raw[4 : 4 + int.from_bytes(raw[:4], "little")].decode()


def _number(raw: bytes) -> int:
    return int.from_bytes(raw[:4], "little")


def _add(request: Any, name: str, dtype: str, size: int, raw: bytes) -> None:
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name=name, datatype=dtype, shape=[size])
    request.inputs.append(tensor)
    request.raw_input_contents.append(raw)


def _add_text(request: Any, name: str, text: str) -> None:
    data = text.encode()
    _add(request, name, "BYTES", 1, len(data).to_bytes(4, "little") + data)
