"""What one engine step computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from distserve.core.decode_set import DecodeSet
from distserve.core.request import Request


@dataclass(frozen=True, slots=True)
class Item:
    """Computes the KV of tokens [start, start + num_tokens) of a request.

    A token is sampled if and only if that reaches the end of the known tokens (`samples`).
    """

    request: Request
    start: int
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.start + self.num_tokens == self.request.known


class PromptWork(NamedTuple):
    """What the prompts, or pieces of prompts, of one step cost."""

    tokens: int
    squares: int  # sum of end^2 - start^2: the pieces of a prompt sum to its length squared
    prompts: int
    ends: int  # of them those that are complete with it: a token is sampled for each

    @classmethod
    def of(cls, items: Iterable[Item]) -> PromptWork:
        tokens = squares = prompts = ends = 0
        for item in items:
            length = item.num_tokens
            tokens += length
            squares += length * (2 * item.start + length)
            prompts += 1
            ends += item.samples
        return cls(tokens, squares, prompts, ends)


@dataclass(slots=True)
class Batch:
    """Prefill items and, if `decode` is given, one token of every request in that set."""

    prefill: list[Item] = field(default_factory=list)
    decode: DecodeSet | None = None

    @property
    def prefill_tokens(self) -> int:
        return sum(item.num_tokens for item in self.prefill)

    @property
    def num_decodes(self) -> int:
        return len(self.decode) if self.decode is not None else 0

    @property
    def context_tokens(self) -> int:
        """Tokens in the cache of the decoding requests, summed."""
        return self.decode.context if self.decode is not None else 0

    def decode_items(self) -> list[Item]:
        """The decoding requests, brought up to date (O(batch); the simulator does not need it)."""
        if self.decode is None:
            return []
        return [Item(request, request.computed, 1) for request in self.decode.synced()]
