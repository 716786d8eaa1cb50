"""Response bodies and stream chunks of the two generating endpoints."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distserve_tools.openai_api.triton_backend import Chunk

TokenText = Callable[[int], str]


@dataclass
class Choice:
    """One generated text as it grows."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, chunk: Chunk) -> None:
        self.text.append(chunk.text)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        if chunk.finish_reason:
            self.finish_reason = chunk.finish_reason
            self.prompt_tokens = chunk.prompt_tokens
            self.completion_tokens = chunk.completion_tokens


class ResponseFormat:
    """What differs between the endpoints: names, and where text and logprobs go."""

    def __init__(self, chat: bool, model: str, with_logprobs: bool, token_text: TokenText) -> None:
        self.chat = chat
        self._logprobs = with_logprobs
        self._token_text = token_text
        self._head = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
        """The body of a call that does not stream. `prompt_tokens`: every prompt counted once."""
        entries = []
        for index, choice in enumerate(choices):
            text = "".join(choice.text)
            content: dict[str, Any] = (
                {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            )
            logprobs = self._format_logprobs(choice.token_ids, choice.logprobs)
            entries.append(
                {"index": index, **content, "logprobs": logprobs, "finish_reason": choice.finish_reason}
            )
        return {
            **self._head,
            "object": "chat.completion" if self.chat else "text_completion",
            "choices": entries,
            "usage": usage(choices, prompt_tokens),
        }

    def first(self, index: int) -> dict[str, Any] | None:
        """The chunk that opens a chat choice."""
        if not self.chat:
            return None
        delta = {"role": "assistant", "content": ""}
        return self._stream([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def part(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """One chunk of a stream."""
        content: dict[str, Any] = (
            {"delta": {"content": chunk.text} if chunk.text else {}} if self.chat else {"text": chunk.text}
        )
        logprobs = self._format_logprobs(chunk.token_ids, chunk.logprobs)
        return self._stream(
            [{"index": index, **content, "logprobs": logprobs, "finish_reason": chunk.finish_reason}]
        )

    def usage_part(self, choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
        """The chunk after the last one, for `stream_options.include_usage`."""
        return {**self._stream([]), "usage": usage(choices, prompt_tokens)}

    def _stream(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}

    def _format_logprobs(self, ids: Sequence[int], entries: Sequence[Any]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        tokens = [self._token(token, entry) for token, entry in zip(ids, entries, strict=False)]
        if self.chat:
            return {"content": tokens, "refusal": None}
        return {
            "tokens": [t["token"] for t in tokens],
            "token_logprobs": [t["logprob"] for t in tokens],
            "top_logprobs": [{a["token"]: a["logprob"] for a in t["top_logprobs"]} for t in tokens],
            "text_offset": [],
        }

    def _token(self, token: int, entry: Mapping[str, Any]) -> dict[str, Any]:
        """`entry`: as vLLM has it, token id -> logprob and text, the chosen token among them."""

        def describe(token_id: str) -> dict[str, Any]:
            text = self._token_text(int(token_id))
            return {"token": text, "logprob": entry[token_id]["logprob"], "bytes": list(text.encode())}

        ranked = [token_id for token_id, value in entry.items() if value["rank"] is not None]
        return {**describe(str(token)), "top_logprobs": [describe(token_id) for token_id in ranked]}


def usage(choices: Sequence[Choice], prompt_tokens: int) -> dict[str, int]:
    completion = sum(choice.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
    }
