"""This project's server, over gRPC streams with as little client work per token as possible."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from distserve_tools.load.record import STAGES, Record
from distserve_tools.load.target import Job


class TritonTarget:
    """Talks to the orchestrator with the generated stub, below `tritonclient`'s Python layers.

    Token ids in, token ids out: the generator measures the server, not a tokenizer. Streams are spread
    over `channels` connections.
    """

    def __init__(
        self,
        url: str,
        start_s: float,
        timeout_s: float,
        channels: int = 4,
        model: str = "orchestrator",
        text: bool = False,
    ) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        self._channels = [grpc.aio.insecure_channel(url, options=options) for _ in range(channels)]
        self._stubs = [service_pb2_grpc.GRPCInferenceServiceStub(c) for c in self._channels]
        self._start_s = start_s
        self._timeout_s = timeout_s
        self._model = model
        self._text = text

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def send(self, job: Job, record: Record) -> None:
        request = self._request(job)

        async def one() -> AsyncIterator[Any]:
            yield request

        stub = self._stubs[record.index % len(self._stubs)]
        try:
            record.sent_s = time.monotonic() - self._start_s
            async for message in stub.ModelStreamInfer(one(), timeout=self._timeout_s):
                if message.error_message:
                    record.error = message.error_message
                    return
                self.book(message.infer_response, record)
        except grpc.aio.AioRpcError as error:
            record.error = f"{error.code().name}: {error.details()}"
        finally:
            record.end_s = time.monotonic() - self._start_s

    def book(self, response: Any, record: Record) -> None:
        """Notes one message of the answer."""
        now = time.monotonic() - self._start_s
        for i, tensor in enumerate(response.outputs):
            raw = response.raw_output_contents[i]
            if tensor.name == "output_ids" and raw:
                record.token_s.append(now)
                record.token_counts.append(len(raw) // 4)
            elif tensor.name == "stage_times" and len(raw) > 4:
                times = json.loads(raw[4:])
                record.stages = {stage: float(times.get(f"{stage}_s", 0.0)) for stage in STAGES}

    def _request(self, job: Job) -> Any:
        request = service_pb2.ModelInferRequest(model_name=self._model)
        sampling = {"max_tokens": job.output_tokens, "ignore_eos": True, "temperature": 0.0}
        _add(request, "input_ids", "INT32", len(job.prompt), np.asarray(job.prompt, np.int32).tobytes())
        _add(request, "sampling_parameters", "BYTES", 1, _string(json.dumps(sampling)))
        _add(request, "stream", "BOOL", 1, b"\x01")
        names = ["output_ids", "stage_times", *(["text_output"] if self._text else [])]
        request.outputs.extend(
            service_pb2.ModelInferRequest.InferRequestedOutputTensor(name=n) for n in names
        )
        return request


def _add(request: Any, name: str, dtype: str, size: int, raw: bytes) -> None:
    request.inputs.append(
        service_pb2.ModelInferRequest.InferInputTensor(name=name, datatype=dtype, shape=[size])
    )
    request.raw_input_contents.append(raw)


def _string(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(4, "little") + data
