"""Any OpenAI-compatible server, so that peers are measured with the same generator."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence

import httpx

from distserve_tools.load.record import Record
from distserve_tools.load.target import Job


class OpenAITarget:
    """Streams /v1/completions with token ids as prompt.

    With several base URLs a request goes to the one with the fewest outstanding ones (what a user's load
    balancer would do). One server-sent event with text counts as one token unless it carries `token_ids`.

    token_ids: asks for those, which vLLM can send: tokens that are no text yet count, too, and the server
    needs no tokenizer.
    """

    def __init__(
        self, urls: Sequence[str], model: str, start_s: float, timeout_s: float, token_ids: bool = False
    ) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(timeout_s), limits=limits)
        self._outstanding = dict.fromkeys(urls, 0)
        self._model = model
        self._options = {"return_token_ids": True} if token_ids else {}
        self._start_s = start_s

    async def close(self) -> None:
        await self._client.aclose()

    async def send(self, job: Job, record: Record) -> None:
        url = min(self._outstanding, key=self._outstanding.__getitem__)
        body = {
            "model": self._model,
            "prompt": list(job.prompt),
            "max_tokens": job.output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            **self._options,
        }
        self._outstanding[url] += 1
        try:
            record.sent_s = time.monotonic() - self._start_s
            async with self._client.stream("POST", f"{url}/v1/completions", json=body) as response:
                if response.status_code != 200:
                    record.error = f"HTTP {response.status_code}: {(await response.aread())[:300].decode()}"
                    return
                async for line in _lines(response):
                    if line.startswith(b"data: {"):
                        self._book(json.loads(line[6:]), record)
        except httpx.HTTPError as error:
            record.error = f"{type(error).__name__}: {error}"
        finally:
            self._outstanding[url] -= 1
            record.end_s = time.monotonic() - self._start_s

    def _book(self, event: dict[str, object], record: Record) -> None:
        if "error" in event:
            record.error = str(event["error"])
            return
        for choice in event.get("choices") or []:  # type: ignore[attr-defined]
            ids = choice.get("token_ids")
            if choice.get("text") or ids:
                record.token_s.append(time.monotonic() - self._start_s)
                record.token_counts.append(len(ids) if ids else 1)


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """As server-sent events end them; `aiter_lines` also breaks at U+0085, which JSON may hold."""
    rest = b""
    async for piece in response.aiter_bytes():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")
    if rest:
        yield rest
