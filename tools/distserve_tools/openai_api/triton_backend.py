"""Generation and control through Triton's gRPC endpoint, asyncio only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from distserve.serving.schema import ERROR_CODES
from distserve_tools.openai_api.errors import ApiError
from distserve_tools.openai_api.protocol import Prompt
from distserve_tools.openai_api.restart_watch import RestartWatch

_CHANNEL = [
    ("grpc.max_send_message_length", 2**31 - 1),
    ("grpc.max_receive_message_length", 2**31 - 1),
    # a server that is started again is found again at once
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
_END_S = 3.0
_CANCEL_S = 1.0
_AGAIN_S = 0.2
_OUTPUTS = ("text_output", "output_ids", "finish_reason", "prompt_tokens", "completion_tokens")


@dataclass(frozen=True)
class Chunk:
    """One message of a generation. `finish_reason` and the counts come with the last one."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: list[Any]  # one entry per token, as the orchestrator sends them
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int


class TritonBackend:
    """A client of one server. Every generation ends by its last chunk, an `ApiError`, or the deadline."""

    def __init__(self, url: str, timeout_s: float, model: str = "orchestrator") -> None:
        self._client = triton.InferenceServerClient(url, channel_args=_CHANNEL)
        self._model = model
        self._timeout_s = timeout_s
        self._restarts = RestartWatch(self.status)
        self._ending: set[asyncio.Task[None]] = set()  # streams that nobody reads any more

    async def close(self) -> None:
        await self._restarts.close()
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._client.close()

    async def status(self, timeout_s: float = 5.0) -> dict[str, Any]:
        """The orchestrator's `status`. Raises `ApiError` 503 if it does not answer in time."""
        asked_s = time.monotonic()
        status = await self._control({"op": "status"}, timeout_s)
        self._restarts.told(status, asked_s)
        return status

    async def _control(self, call: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        inputs = {"control": np.array([json.dumps(call).encode()], dtype=object)}
        request = self._request(inputs, ("control_output",))
        answer: dict[str, Any] | None = None
        never = asyncio.get_running_loop().create_future()
        async with aclosing(self._responses(request, timeout_s, never)) as responses:
            async for result in responses:
                answer = json.loads(result.as_numpy("control_output")[0])
        if answer is None:
            raise ApiError(503, f"no answer to {call['op']!r}", "service_unavailable")
        return answer

    async def generate(
        self, prompt: Prompt, sampling: Mapping[str, Any], logprobs: int | None
    ) -> AsyncGenerator[Chunk, None]:
        """Streams one choice. Closing the iterator early cancels the request on the server."""
        key = secrets.token_hex(16)
        parameters = {**sampling, "cancel_key": key, **({} if logprobs is None else {"logprobs": logprobs})}
        inputs = {
            "stream": np.array([True]),
            "exclude_input_in_output": np.array([True]),
            "sampling_parameters": np.array([json.dumps(parameters).encode()], dtype=object),
        }
        if isinstance(prompt, str):
            inputs["text_input"] = np.array([prompt.encode()], dtype=object)
        else:
            inputs["input_ids"] = np.array(prompt, dtype=np.int32)
        outputs = _OUTPUTS if logprobs is None else (*_OUTPUTS, "logprobs")
        if logprobs is not None:
            inputs["return_logprobs"] = np.array([True])
        request = self._request(inputs, outputs)
        finished = False
        with self._restarts.request() as watched:
            source = self._responses(request, self._timeout_s, watched.lost, key)
            async with aclosing(source) as responses:
                async for result in responses:
                    chunk = _chunk(result)
                    finished = chunk.finish_reason is not None
                    yield chunk
        if finished:
            return
        raise ApiError(502, "the generation ended without its last message", "server_error")

    def _request(self, inputs: Mapping[str, Any], outputs: tuple[str, ...]) -> dict[str, Any]:
        tensors = []
        for name, values in inputs.items():
            tensor = triton.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype))
            tensor.set_data_from_numpy(values)
            tensors.append(tensor)
        requested = [triton.InferRequestedOutput(name) for name in outputs]
        return {"model_name": self._model, "inputs": tensors, "outputs": requested}

    async def _responses(
        self, request: dict[str, Any], timeout_s: float, lost: asyncio.Future[None], key: str | None = None
    ) -> AsyncGenerator[Any, None]:
        async def one() -> AsyncIterator[dict[str, Any]]:
            yield request

        deadline = time.monotonic() + timeout_s
        stream = self._client.stream_infer(one())
        following: asyncio.Future[Any] | None = None
        ended = False
        try:
            while True:
                following = asyncio.ensure_future(anext(stream))
                left_s = max(0.0, deadline - time.monotonic())
                await asyncio.wait({following, lost}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    raise _orphaned() if lost.done() else _late(timeout_s)
                result, error = following.result()
                if error is not None:
                    raise _api_error(error)
                yield result
        except StopAsyncIteration:
            ended = True
        except grpc.RpcError as error:  # the server is gone
            ended = True
            raise ApiError.of_code(error.code().name, error.details() or "no answer from Triton") from None
        finally:
            if not ended:
                task = asyncio.create_task(self._end(stream, following, key))
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)

    async def _end(self, stream: Any, following: asyncio.Future[Any] | None, key: str | None) -> None:
        """Has the orchestrator end a request, and reads its stream to the end.

        A stream that is cancelled by gRPC may crash Triton 24.10 (its issues 7368 and 8034), or, between its
        last response and its end, be kept for ever, so that its model never unloads. It is the last resort.
        """
        reading = asyncio.create_task(_to_the_end(stream, following))
        give_up_s = time.monotonic() + _END_S
        try:
            while not reading.done() and time.monotonic() < give_up_s:
                if key is not None:  # perhaps it is not admitted yet: then again
                    with contextlib.suppress(ApiError):
                        await self._control({"op": "cancel", "cancel_key": key}, _CANCEL_S)
                await asyncio.wait({reading}, timeout=_AGAIN_S)
        finally:
            if not reading.done():
                stream.cancel()
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)


async def _to_the_end(stream: Any, following: asyncio.Future[Any] | None) -> None:
    with contextlib.suppress(StopAsyncIteration, grpc.RpcError):
        if following is not None:
            await following
        async for _ in stream:
            pass


def _orphaned() -> ApiError:
    return ApiError.of_code("UNAVAILABLE", "the orchestrator has died and was started again; try again")


def _late(timeout_s: float) -> ApiError:
    return ApiError.of_code("DEADLINE_EXCEEDED", f"no end within {timeout_s:g} s")


def _chunk(result: Any) -> Chunk:
    def first(name: str) -> Any:
        values = result.as_numpy(name)
        return values.flat[0] if values is not None and values.size else None

    text, reason, entries = first("text_output"), first("finish_reason"), first("logprobs")
    ids = result.as_numpy("output_ids")
    return Chunk(
        text=text.decode() if text else "",
        token_ids=tuple(int(i) for i in ids) if ids is not None else (),
        logprobs=json.loads(entries) if entries else [],
        finish_reason=reason.decode() if reason else None,
        prompt_tokens=int(first("prompt_tokens") or 0),
        completion_tokens=int(first("completion_tokens") or 0),
    )


def _api_error(error: InferenceServerException) -> ApiError:
    """In a stream Triton drops the status of an error, so the orchestrator writes the code into the text."""
    message = error.message() or "unknown error"
    for code in ERROR_CODES:
        head, found, rest = message.partition(f"{code}: ")
        if found and len(head) < 40:
            return ApiError.of_code(code, rest)
    return ApiError(503 if "UNAVAILABLE" in str(error.status()) else 500, message, "server_error")
