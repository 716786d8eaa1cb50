"""Incremental detokenisation: token ids in, text out as soon as it is certain.

The text of a request is by definition the concatenation of what its detokeniser gave out, streamed or
not. For a byte-level vocabulary (GPT-2, OPT, Llama 3, Qwen, SmolLM) that equals the tokenizer's decode of
all ids exactly. For the others (Llama 2, Mistral) it does for every valid UTF-8 text.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_CONTEXT_TOKENS = 5
_MAX_PENDING_TOKENS = 64


class Detokenizer(Protocol):
    """Of one request."""

    def push(self, ids: Sequence[int]) -> str:
        """Text that is certain after these further tokens."""

    def flush(self) -> str:
        """What was left uncertain, such as half a character, at the end."""


class ByteDetokenizer:
    """For byte-level vocabularies: tokens are bytes, and text is their UTF-8 with invalid bytes replaced."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._token_bytes, ids)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class OffsetDetokenizer:
    """For any tokenizer: decodes a short window twice per token and gives out the difference.

    The method of vLLM and text-generation-inference. The window begins with the end of the prompt, so that a
    leading space of the first token is kept. Text that ends in U+FFFD may be half a character and waits.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(prompt[-_CONTEXT_TOKENS:])  # the window
        self._read = len(self._ids)  # its first tokens whose text is out

    def push(self, ids: Sequence[int]) -> str:
        return "".join(map(self._push_one, ids))

    def _push_one(self, token: int) -> str:
        self._ids.append(token)
        before, after = self._decode(self._ids[: self._read]), self._decode(self._ids)
        uncertain = after.endswith("�") or len(after) <= len(before)
        # a window that never becomes certain must not grow for ever
        if uncertain and len(self._ids) - self._read < _MAX_PENDING_TOKENS:
            return ""
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        return after[len(before) :]

    def flush(self) -> str:
        before, after = self._decode(self._ids[: self._read]), self._decode(self._ids)
        self._ids, self._read = [], 0
        return after[len(before) :]


class NoDetokenizer:
    """For models without a tokenizer: token ids only."""

    def push(self, ids: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""
