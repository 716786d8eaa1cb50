"""One request as the schedulers see it. The engine and the simulator use the same class."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Request:
    """Counts of tokens, all non-negative.

    Known tokens are the prompt and what was generated; `computed` of them have their KV in the cache.
    While a request is in a `DecodeSet`, `generated`, `computed` and `num_blocks` are brought up to date
    by `DecodeSet.sync` only.
    """

    id: str
    prompt_len: int
    max_tokens: int
    arrival_s: float = 0.0
    stop_after: int = (
        0  # generated tokens after which it ends; default max_tokens. The simulator knows better
    )
    priority: int = 0  # a lower value goes first
    due_s: float = math.inf  # of the same clock as `arrival_s`: when its first token is due
    generated: int = 0
    computed: int = 0
    num_blocks: int = 0
    blocks: list[int] = field(default_factory=list)  # block ids; stays empty under CountingBlocks
    tokens: list[int] | None = None  # ids of all known tokens; None in the simulator
    preemptions: int = 0
    joined_step: int = 0
    finish_step: int = 0

    def __post_init__(self) -> None:
        if not self.stop_after:
            self.stop_after = self.max_tokens

    @property
    def known(self) -> int:
        return self.prompt_len + self.generated
