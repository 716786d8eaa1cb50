"""What engines count about themselves, asked of each instance's model directly, past the orchestrator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from distserve.serving.schema import STAGE_INPUTS, STAGE_OUTPUTS, decode_reply, encode

TIMEOUT_S = 10.0
KEYS = ("steps", "execute_s", "loop_s", "transfers", "transfer_bytes", "transfer_wait_s", "transfer_wire_s")

Counters = Mapping[str, Mapping[str, float]]
"""By instance, then by key."""


def engine_counters(url: str, instances: Sequence[str]) -> Counters:
    """Totals since each engine's start. Raises `grpc.RpcError`, `ServingError`."""
    with grpc.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        replies = {name: _status(stub, name) for name in instances}
    return {name: {key: float(reply[key]) for key in KEYS} for name, reply in replies.items()}


def counted_since(now: Counters, before: Counters) -> dict[str, dict[str, float]]:
    return {name: {key: now[name][key] - before[name][key] for key in KEYS} for name in now}


def loop_share(counted: Mapping[str, float]) -> float:
    """Of an engine's busy time, what it spends outside the model: scheduling, bookkeeping, messages."""
    busy = counted["execute_s"] + counted["loop_s"]
    return counted["loop_s"] / busy if busy > 0 else 0.0


def _status(stub: Any, model: str) -> dict[str, Any]:
    message = encode({"op": "status", "owner": "testbed", "epoch": 0})
    request = service_pb2.ModelInferRequest(model_name=model)
    request.inputs.append(
        service_pb2.ModelInferRequest.InferInputTensor(name=STAGE_INPUTS[0].name, datatype="BYTES", shape=[1])
    )
    request.raw_input_contents.append(len(message).to_bytes(4, "little") + message)
    request.outputs.append(
        service_pb2.ModelInferRequest.InferRequestedOutputTensor(name=STAGE_OUTPUTS[0].name)
    )
    response = stub.ModelInfer(request, timeout=TIMEOUT_S)
    return decode_reply(response.raw_output_contents[0][4:])
