"""The ASGI application: routes, authentication, and what ties a request to its client."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from distserve_tools.openai_api import generation
from distserve_tools.openai_api.errors import ApiError
from distserve_tools.openai_api.protocol import GenerationRequest, parse_chat, parse_completion
from distserve_tools.openai_api.responses import ResponseFormat
from distserve_tools.openai_api.tokenizer import ChatTokenizer
from distserve_tools.openai_api.triton_backend import TritonBackend

MAX_BODY_BYTES = 8 << 20
_EVENT_STREAM = "text/event-stream; charset=utf-8"


@dataclass(frozen=True)
class FrontEndConfig:
    """What the front end serves, and for whom."""

    grpc_url: str
    metrics_url: str
    model_name: str
    max_context: int
    api_key: str | None = None
    request_timeout_s: float = 600.0


class FrontEnd:
    """Handlers of all routes over one Triton server."""

    def __init__(self, config: FrontEndConfig, tokenizer: ChatTokenizer) -> None:
        self.config = config
        self._tokenizer = tokenizer
        self._backend: TritonBackend | None = None

    def app(self) -> Starlette:
        routes = [
            Route("/v1/models", self._guard(self.models), methods=["GET"]),
            Route("/v1/models/{model:path}", self._guard(self.model), methods=["GET"]),
            Route("/v1/completions", self._guard(self.completions), methods=["POST"]),
            Route("/v1/chat/completions", self._guard(self.chat), methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._backend = TritonBackend(self.config.grpc_url, self.config.request_timeout_s)
        try:
            yield
        finally:
            await self._backend.close()

    @property
    def backend(self) -> TritonBackend:
        if self._backend is None:
            raise RuntimeError("the application has not started")
        return self._backend

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_entry()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return JSONResponse(self._model_entry())

    async def completions(self, request: Request) -> Response:
        parsed = parse_completion(await _body(request))
        return await self._generate(request, parsed, chat=False)

    async def chat(self, request: Request) -> Response:
        parsed = parse_chat(await _body(request), self._tokenizer.render, self.config.max_context)
        return await self._generate(request, parsed, chat=True)

    async def health(self, _: Request) -> Response:
        """200 if a prefill-capable and a decode-capable instance live, else 503 with the reason."""
        try:
            status = await self.backend.status()
        except ApiError as error:
            return JSONResponse({"ready": False, "reason": error.message}, 503)
        ready = bool(status.get("ready"))
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def metrics(self, _: Request) -> Response:
        """Triton's metrics page, this server's own families included."""
        try:
            async with httpx.AsyncClient(timeout=5.0) as client:
                page = await client.get(self.config.metrics_url)
        except httpx.HTTPError as error:
            return JSONResponse(ApiError(503, f"no metrics from Triton: {error}").body(), 503)
        return Response(page.content, page.status_code, media_type="text/plain; version=0.0.4")

    async def _generate(self, request: Request, parsed: GenerationRequest, chat: bool) -> Response:
        self._check_model(parsed.model)
        form = ResponseFormat(
            chat, self.config.model_name, parsed.logprobs is not None, self._tokenizer.token_text
        )
        if not parsed.stream:
            body = await _unless_disconnected(request, generation.collect(self.backend, parsed, form))
            return JSONResponse(body)
        events = generation.stream(self.backend, parsed, form)
        first = await _unless_disconnected(request, anext(events))
        return StreamingResponse(_rejoin(first, events), media_type=_EVENT_STREAM)

    def _model_entry(self) -> dict[str, Any]:
        return {
            "id": self.config.model_name,
            "object": "model",
            "owned_by": "distserve",
            "max_model_len": self.config.max_context,
        }

    def _check_model(self, name: str) -> None:
        if name != self.config.model_name:
            raise ApiError(
                404,
                f"model={name!r}: not served here; available is {self.config.model_name!r}",
                param="model",
            )

    def _guard(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[..., Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                self._authorise(request)
                return await handler(request)
            except ApiError as error:
                return JSONResponse(error.body(), error.status)

        return guarded

    def _authorise(self, request: Request) -> None:
        if self.config.api_key is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.config.api_key}".encode()):
            raise ApiError(401, "missing or wrong API key", "authentication_error")


async def _body(request: Request) -> object:
    size = 0
    parts = []
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        parts.append(part)
    try:
        return json.loads(b"".join(parts))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None


async def _unless_disconnected(request: Request, work: Any) -> Any:
    """The result of `work`, which is cancelled as soon as the client goes away."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client closed the connection", "cancelled")
        return task.result()
    finally:
        for future in (task, watch):
            future.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _rejoin(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    try:
        yield first
        async for event in rest:
            yield event
    finally:
        await rest.aclose()
