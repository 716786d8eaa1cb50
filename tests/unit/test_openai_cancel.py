"""How the front end parts from a stream that its client has left: by the request's key, by gRPC at last."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from distserve_tools.openai_api import triton_backend
from distserve_tools.openai_api.errors import ApiError
from distserve_tools.openai_api.triton_backend import TritonBackend
from distserve_tools.processes import free_ports

KEY = "k" * 32


class Stream:
    """Messages until it is ended by its key, or cancelled."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.cancelled = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Any:
        if self.over.is_set():
            raise StopAsyncIteration
        await asyncio.sleep(0.001)
        return None, None

    def cancel(self) -> None:
        self.cancelled = True
        self.over.set()


class Backend(TritonBackend):
    """Its control operations reach the stream, or nobody, or are too early at first."""

    def __init__(self, stream: Stream, deaf: bool, early: int) -> None:
        super().__init__("127.0.0.1:9", 60.0)
        self.stream, self.deaf, self.early, self.calls = stream, deaf, early, 0

    async def _control(self, call: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        assert call == {"op": "cancel", "cancel_key": KEY}
        self.calls += 1
        if self.deaf:
            raise ApiError(503, "nobody")
        if self.calls > self.early:
            self.stream.over.set()
        return {}


async def left(deaf: bool = False, early: int = 0) -> tuple[Backend, Stream]:
    stream = Stream()
    backend = Backend(stream, deaf, early)
    try:
        await asyncio.wait_for(backend._end(stream, asyncio.ensure_future(anext(stream)), KEY), 20)
    finally:
        await backend.close()
    return backend, stream


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "_AGAIN_S", 0.01)


def test_a_stream_is_ended_by_its_key_and_read_to_its_end() -> None:
    backend, stream = asyncio.run(left())
    assert (backend.calls, stream.cancelled) == (1, False)


def test_a_request_that_is_not_admitted_yet_is_asked_for_again() -> None:
    backend, stream = asyncio.run(left(early=3))
    assert (backend.calls, stream.cancelled) == (4, False)


def test_the_last_resort_is_to_cancel_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "_END_S", 0.1)
    _, stream = asyncio.run(left(deaf=True))
    assert stream.cancelled


def test_a_server_that_is_gone_is_unavailable() -> None:
    async def ask() -> None:
        backend = TritonBackend(f"127.0.0.1:{free_ports(1)[0]}", 60.0)
        try:
            await backend.status()
        finally:
            await backend.close()

    with pytest.raises(ApiError) as caught:
        asyncio.run(ask())
    assert caught.value.status == 503
