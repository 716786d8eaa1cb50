"""The OpenAI target against a small server: events, errors, dispatch by outstanding requests."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from distserve_tools.load.openai_target import OpenAITarget
from distserve_tools.load.record import Record
from distserve_tools.load.target import Job
from distserve_tools.processes import free_ports

uvicorn = pytest.importorskip("uvicorn")


class Double:
    """An ASGI application that streams `tokens` events, or one error."""

    def __init__(self, *, status: int = 200, fail_at: int | None = None) -> None:
        self.status, self.fail_at = status, fail_at
        self.bodies: list[dict[str, Any]] = []
        self.release = threading.Event()
        self.release.set()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        raw = b""
        while True:
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        body = json.loads(raw)
        self.bodies.append(body)
        head = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": self.status, "headers": head})
        if self.status != 200:
            await send({"type": "http.response.body", "body": b"no such model"})
            return
        async for event in self._events(body["max_tokens"], body.get("return_token_ids", False)):
            data = f"data: {event}\n\n".encode()
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _events(self, tokens: int, ids: bool) -> AsyncIterator[str]:
        while not self.release.is_set():
            await asyncio.sleep(0.005)
        for i in range(tokens):
            if i == self.fail_at:
                yield json.dumps({"error": {"message": "engine died"}})
                return
            choice: dict[str, Any] = {"index": 0, "text": f"t{i}\u0085\u2028"}  # no ends of lines
            if ids:
                choice["token_ids"] = [i, i]
            yield json.dumps({"choices": [choice]}, ensure_ascii=False)
            await asyncio.sleep(0.01)
        yield json.dumps({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})


@contextmanager
def served(app: Double) -> Iterator[str]:
    (port,) = free_ports(1)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10.0
    while not server.started:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10.0)


def send(url: str, tokens: int = 4, token_ids: bool = False) -> Record:
    async def main() -> Record:
        start = time.monotonic()
        target = OpenAITarget([url], "model", start, 20.0, token_ids)
        one = Record(0, 0.0, 3)
        await target.send(Job([5, 6, 7], tokens), one)
        await target.close()
        return one

    return asyncio.run(main())


def test_every_event_with_text_is_one_token() -> None:
    app = Double()
    with served(app) as url:
        one = send(url)
    assert one.ok
    assert one.token_counts == [1, 1, 1, 1]
    assert 0 < one.sent_s < one.token_s[0] < one.token_s[-1] <= one.end_s
    assert one.tpot_s == pytest.approx(0.01, abs=0.05)
    body = app.bodies[0]
    assert (body["prompt"], body["max_tokens"], body["stream"]) == ([5, 6, 7], 4, True)
    assert (body["ignore_eos"], body["temperature"]) == (True, 0.0)


def test_token_ids_are_counted_where_they_are_told() -> None:
    with served(Double()) as url:
        assert send(url, token_ids=True).token_counts == [2, 2, 2, 2]


def test_refusals_and_errors_in_the_stream_are_failures() -> None:
    with served(Double(status=404)) as url:
        one = send(url)
        assert one.error == "HTTP 404: no such model"
    with served(Double(fail_at=2)) as url:
        one = send(url)
        assert not one.ok
        assert "engine died" in str(one.error)
        assert one.output_tokens == 2
    one = send(url)  # nobody listens there any more
    assert not one.ok
    assert "ConnectError" in str(one.error)


def test_requests_go_to_the_server_with_fewer_outstanding() -> None:
    busy, free = Double(), Double()
    busy.release.clear()

    async def main(urls: list[str]) -> None:
        target = OpenAITarget(urls, "model", time.monotonic(), 20.0)
        first = asyncio.create_task(target.send(Job([1], 2), Record(0, 0.0, 1)))
        await asyncio.sleep(0.1)
        for i in range(3):
            await target.send(Job([1], 2), Record(1 + i, 0.0, 1))
        busy.release.set()
        await first
        await target.close()

    with served(busy) as one, served(free) as other:
        asyncio.run(main([one, other]))
    assert (len(busy.bodies), len(free.bodies)) == (1, 3)
