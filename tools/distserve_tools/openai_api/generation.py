"""Runs the choices of one API call: together, streamed or collected, and stopped when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from distserve_tools.openai_api.errors import ApiError
from distserve_tools.openai_api.protocol import GenerationRequest, Prompt
from distserve_tools.openai_api.responses import Choice, ResponseFormat
from distserve_tools.openai_api.triton_backend import Chunk, TritonBackend

_LAST_READ_S = 5.0  # from the last response of a stream to its end


def jobs(request: GenerationRequest) -> list[tuple[Prompt, dict[str, Any]]]:
    """(prompt, sampling) of every choice, prompts first; seeded choices of a prompt differ by their seed."""
    out = []
    for prompt in request.prompts:
        for i in range(request.n):
            sampling = dict(request.sampling)
            if "seed" in sampling:
                sampling["seed"] += i
            out.append((prompt, sampling))
    return out


async def collect(backend: TritonBackend, request: GenerationRequest, form: ResponseFormat) -> dict[str, Any]:
    """The whole body. One failed choice fails the call and cancels the others."""

    async def one(prompt: Prompt, sampling: dict[str, Any]) -> Choice:
        choice = Choice()
        async with aclosing(backend.generate(prompt, sampling, request.logprobs)) as chunks:
            async for chunk in chunks:
                choice.add(chunk)
        return choice

    tasks = [asyncio.create_task(one(*job)) for job in jobs(request)]
    try:
        choices = await asyncio.gather(*tasks)
    finally:
        await _end(tasks)
    return form.whole(choices, _prompt_tokens(request, choices))


async def stream(
    backend: TritonBackend, request: GenerationRequest, form: ResponseFormat
) -> AsyncGenerator[bytes, None]:
    """Server-sent events, all choices interleaved, closed by `[DONE]`.

    The first chunk is awaited by the caller, so that an early refusal still gets its HTTP status.
    """
    work = jobs(request)
    choices = [Choice() for _ in work]
    chunks: asyncio.Queue[tuple[int, Chunk | ApiError]] = asyncio.Queue()

    async def pump(index: int, prompt: Prompt, sampling: dict[str, Any]) -> None:
        try:
            async with aclosing(backend.generate(prompt, sampling, request.logprobs)) as source:
                async for chunk in source:
                    chunks.put_nowait((index, chunk))
        except ApiError as error:
            chunks.put_nowait((index, error))
        except Exception as error:  # a mistake of ours: the client must not wait for ever
            chunks.put_nowait((index, ApiError(500, repr(error), "server_error")))

    tasks = [asyncio.create_task(pump(i, *job)) for i, job in enumerate(work)]
    try:
        opened: set[int] = set()
        while any(choice.finish_reason is None for choice in choices):
            index, chunk = await chunks.get()
            if isinstance(chunk, ApiError):
                if not opened:
                    raise chunk
                yield _event(chunk.body())
                return
            if index not in opened and (head := form.first(index)):
                yield _event(head)
            opened.add(index)
            choices[index].add(chunk)
            yield _event(form.part(index, chunk))
        await asyncio.wait(tasks, timeout=_LAST_READ_S)
        if request.include_usage:
            yield _event(form.usage_part(choices, _prompt_tokens(request, choices)))
        yield b"data: [DONE]\n\n"
    finally:
        await _end(tasks)


async def _end(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _prompt_tokens(request: GenerationRequest, choices: list[Choice]) -> int:
    return sum(choice.prompt_tokens for choice in choices[:: request.n])


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"
