"""Calls to instances of the same server, whose stub may be dead: such a call never returns."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from distserve.serving.schema import ServingError


class Server:
    """Calls hang until `release` is set, except those that begin with "quick"."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.calls = 0

    def exec(self, message: bytes) -> bytes:
        self.calls += 1
        if not message.startswith(b"quick"):
            self.release.wait(20.0)
        return b"reply to " + message


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Triton's module, as far as a call needs it."""
    server = Server()
    module: Any = types.ModuleType("triton_python_backend_utils")

    class Tensor:
        def __init__(self, name: str, value: Any) -> None:
            self.value = value

        def as_numpy(self) -> Any:
            return self.value

    class Response:
        def __init__(self, payload: bytes) -> None:
            self.payload = payload

        def has_error(self) -> bool:
            return False

    class InferenceRequest:
        def __init__(self, model_name: str, requested_output_names: list[str], inputs: list[Tensor]) -> None:
            self.message = inputs[0].value[0]

        def exec(self) -> Response:
            return Response(server.exec(self.message))

    module.Tensor, module.InferenceRequest = Tensor, InferenceRequest
    module.get_output_tensor_by_name = lambda response, name: Tensor(
        name, np.array([response.payload], object)
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)
    monkeypatch.delitem(sys.modules, "distserve.serving.bls_client", raising=False)
    yield server
    server.release.set()
    sys.modules.pop("distserve.serving.bls_client", None)


def test_hung_calls_are_counted_bounded_and_forgotten_when_they_return(server: Server) -> None:
    from distserve.serving.bls_client import MAX_THREADS, BlsClient

    async def main() -> None:
        client = BlsClient("decode_0")
        assert await client.call(b"quick", 5.0) == b"reply to quick"
        assert client.hung_calls == 0
        for count in range(1, MAX_THREADS + 1):
            with pytest.raises(ServingError, match=r"no reply within 0\.01 s"):
                await client.call(b"hang", 0.01)
            assert client.hung_calls == count
        with pytest.raises(ServingError, match=f"{MAX_THREADS} calls of model decode_0 hang") as refused:
            await client.call(b"quick", 5.0)
        assert refused.value.code == "UNAVAILABLE"
        assert server.calls == MAX_THREADS + 1
        server.release.set()
        for _ in range(500):
            if not client.hung_calls:
                break
            await asyncio.sleep(0.01)
        assert client.hung_calls == 0
        assert await client.call(b"quick", 5.0) == b"reply to quick"
        await client.close()

    asyncio.run(main())
