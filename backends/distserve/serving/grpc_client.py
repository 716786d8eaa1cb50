"""The way to an instance in another server: its gRPC endpoint."""

from __future__ import annotations

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from distserve.serving.schema import MAX_MESSAGE_BYTES, STAGE_INPUTS, STAGE_OUTPUTS, ServingError

_MESSAGE, _REPLY = STAGE_INPUTS[0].name, STAGE_OUTPUTS[0].name
_KEEPALIVE_MS = 10_000


class GrpcClient:
    """`InstanceClient` over gRPC to ``address`` (host:port). Made and used on one event loop."""

    def __init__(self, model: str, address: str) -> None:
        self._model = model
        options = [
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES + 4096),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES + 4096),
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        self._client = triton.InferenceServerClient(address, channel_args=options)

    @property
    def hung_calls(self) -> int:
        return 0  # a call that is given up is cancelled

    async def call(self, message: bytes, deadline_s: float) -> bytes:
        tensor = triton.InferInput(_MESSAGE, [1], "BYTES")
        tensor.set_data_from_numpy(np.array([message], dtype=np.object_))
        outputs = [triton.InferRequestedOutput(_REPLY)]
        try:
            result = await self._client.infer(
                self._model, [tensor], outputs=outputs, client_timeout=deadline_s
            )
        except InferenceServerException as error:
            late = "DEADLINE_EXCEEDED" in str(error.status())
            raise ServingError(
                "DEADLINE_EXCEEDED" if late else "UNAVAILABLE", error.message() or str(error)
            ) from None
        return bytes(result.as_numpy(_REPLY).flat[0])

    async def close(self) -> None:
        await self._client.close()
