"""What the generator sends requests to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from distserve_tools.load.record import Record


@dataclass(frozen=True)
class Job:
    """One request to send: token ids of the prompt and the exact number of tokens to ask for."""

    prompt: Sequence[int]
    output_tokens: int


class Target(Protocol):
    """A server. `send` fills the record's token times, stages and error; it raises nothing."""

    async def send(self, job: Job, record: Record) -> None: ...

    async def close(self) -> None: ...
