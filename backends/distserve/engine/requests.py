"""One request inside the engine: what it wants, who owns it, and its clocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distserve.core.request import Request
from distserve.transfer.handle import Handle
from distserve.worker.step import SamplingParams


class Owner(NamedTuple):
    """A caller, and which of its starts."""

    name: str
    epoch: int


@dataclass(slots=True, eq=False)
class EngineRequest:
    """`request.id` is the engine's own key, `id` the owner's word for it. Times are of the engine's clock."""

    id: str
    owner: Owner
    request: Request
    params: SamplingParams
    arrival_s: float
    deadline_s: float | None = None
    handle: Handle | None = None
    to_end: bool = False  # a prefill instance is to decode it, too
    scheduled_s: float | None = None  # its prefill began here
    admitted_s: float | None = None  # decode reserved blocks; its pull began
    started_s: float | None = None  # its first token is known here, or its KV has arrived: decoding begins
    announced: bool = False  # `prefilled` or `started` was sent
    handed_out: bool = False  # prefill: it lives on as a lease
    end_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.end_ids = frozenset(self.params.end_ids)

    @property
    def key(self) -> str:
        return self.request.id

    @property
    def work_tokens(self) -> int:
        """Tokens that are to be prefilled here."""
        return self.request.known - self.request.computed

    @property
    def tokens(self) -> list[int]:
        """Ids of all known tokens, prompt and output."""
        assert self.request.tokens is not None
        return self.request.tokens

    def take_token(self, token: int) -> str | None:
        """Appends a sampled token; returns the finish reason if it is the last one."""
        tokens = self.tokens
        tokens.append(token)
        produced = len(tokens) - self.request.prompt_len
        if token in self.end_ids and produced >= self.params.min_tokens:
            return "stop"
        return "length" if produced >= self.request.max_tokens else None


class Event(NamedTuple):
    """Something that the owner of a request is to learn. After `last` there is none for this id."""

    owner: Owner
    id: str
    fields: dict[str, Any]
    last: bool
