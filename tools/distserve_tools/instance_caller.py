"""Speaks the instance protocol to one instance over its server's gRPC, in the orchestrator's place."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from distserve.serving.access import Access
from distserve.serving.schema import STAGE_INPUTS, STAGE_OUTPUTS, decode_reply, encode

CALL_S = 10.0


class InstanceCaller:
    """One owner at one instance; a context manager. Calls raise `ServingError`, or `grpc.RpcError`."""

    def __init__(self, url: str, instance: str, owner: str, access: Access) -> None:
        self._channel = grpc.insecure_channel(url, [("grpc.use_local_subchannel_pool", 1)])
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._instance, self._access = instance, access
        self._identity = {"owner": owner, "epoch": time.time_ns()}
        self._ack = 0

    def __enter__(self) -> InstanceCaller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def call(self, op: str, **fields: Any) -> dict[str, Any]:
        return decode_reply(self.raw(encode({"op": op, **self._identity, **fields})))

    def raw(self, message: bytes) -> bytes:
        """Any bytes as a message, signed; the reply's bytes."""
        return self.unsigned(self._access.sign(message))

    def unsigned(self, message: bytes) -> bytes:
        """Any bytes, as they are."""
        request = service_pb2.ModelInferRequest(model_name=self._instance)
        tensor = service_pb2.ModelInferRequest.InferInputTensor(
            name=STAGE_INPUTS[0].name, datatype="BYTES", shape=[1]
        )
        request.inputs.append(tensor)
        request.raw_input_contents.append(len(message).to_bytes(4, "little") + message)
        output = service_pb2.ModelInferRequest.InferRequestedOutputTensor(name=STAGE_OUTPUTS[0].name)
        request.outputs.append(output)
        response = self._stub.ModelInfer(request, timeout=CALL_S)
        return bytes(response.raw_output_contents[0][4:])

    def submit(self, entry: dict[str, Any]) -> dict[str, Any] | None:
        """The error that the entry is refused with, or `None`."""
        (result,) = self.call("submit", requests=[entry])["results"]
        error: dict[str, Any] | None = None if result["ok"] else result["error"]
        return error

    def events(self, request_id: str, last: tuple[str, ...], timeout_s: float = 30.0) -> list[dict[str, Any]]:
        """The request's events up to one of the types in `last`. Raises `TimeoutError`."""
        found: list[dict[str, Any]] = []
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            for event in self.call("poll", ack=self._ack)["events"]:
                if event["seq"] > self._ack:
                    self._ack = event["seq"]
                    if event["id"] == request_id:
                        found.append(event)
            if found and found[-1]["type"] in last:
                return found
        raise TimeoutError(f"{request_id}: no {' or '.join(last)} within {timeout_s:g} s")
