"""One message to a client, before it is made into tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from distserve.serving.schema import ServingError


@dataclass(frozen=True, slots=True)
class Final:
    """What only the last message carries; ``stage_times`` in seconds, see `StageTimes.summary`."""

    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    stage_times: dict[str, Any]


@dataclass(slots=True)
class Chunk:
    """What has come since the last message.

    ``text`` may lag behind ``ids`` (half a character, or what may become a stop string). ``logprobs`` has one
    protocol entry per id, if the request asked for them; ``cumulative_logprob`` is of the whole output .
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    prompt_tokens: int = 0
    final: Final | None = None

    def extend(self, later: Chunk) -> None:
        """Append the next message, for a client that is slower than the tokens."""
        self.text += later.text
        self.ids += later.ids
        self.logprobs += later.logprobs
        self.cumulative_logprob = later.cumulative_logprob
        self.final = later.final


class Sink(Protocol):
    """Takes the messages of one request; never blocks. Ends with one final chunk or one failure."""

    def send(self, chunk: Chunk) -> None: ...

    def fail(self, error: ServingError) -> None: ...
