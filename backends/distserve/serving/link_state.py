"""What the orchestrator knows about one instance: its last status and the work it has there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from distserve.serving.schema import LOAD_KEYS

LinkPhase = Literal["connecting", "up", "down"]


@dataclass(frozen=True)
class InstanceStatus:
    """The fixed part of a ``status`` reply; counts are of blocks and tokens."""

    instance: str
    role: str
    epoch: int
    model_hash: str
    max_context: int
    block_size: int
    blocks_total: int
    max_batch_size: int

    @property
    def pool_tokens(self) -> int:
        """Tokens whose KV fits into the whole pool."""
        return self.blocks_total * self.block_size

    @staticmethod
    def from_wire(reply: Mapping[str, Any]) -> InstanceStatus:
        """Read a reply; a missing or misshapen entry raises `ValueError`, `KeyError` or `TypeError`."""
        return InstanceStatus(
            instance=str(reply["instance"]),
            role=str(reply["role"]),
            epoch=int(reply["epoch"]),
            model_hash=str(reply["model_hash"]),
            max_context=int(reply["max_context"]),
            block_size=int(reply["block_size"]),
            blocks_total=int(reply["blocks_total"]),
            max_batch_size=int(reply["max_batch_size"]),
        )


@dataclass
class Load:
    """Figures that the instance reports, and what this orchestrator has given it since.

    ``credits`` is kept up to date locally: a submitted prompt takes its tokens, a finished one gives them
    back, and every report replaces the figure, less what the instance can't have seen yet.
    """

    reported: dict[str, int] = field(default_factory=dict)
    credits: int = 0
    outstanding_tokens: int = 0  # of prompts submitted from here and not prefilled yet
    unsent_tokens: int = 0  # of those, still on their way to the instance

    def report(self, values: Mapping[str, Any]) -> None:
        """Take over a reported load."""
        for key in LOAD_KEYS:
            value = values.get(key)
            if isinstance(value, int):
                self.reported[key] = value
        if isinstance(values.get("credits"), int):
            self.credits = int(values["credits"]) - self.unsent_tokens

    def submitted(self, tokens: int) -> None:
        self.credits -= tokens
        self.outstanding_tokens += tokens
        self.unsent_tokens += tokens

    def arrived(self, tokens: int) -> None:
        """The instance has answered the submit call."""
        self.unsent_tokens -= tokens

    def done(self, tokens: int) -> None:
        """Prefilled, refused, cancelled or lost."""
        self.credits += tokens
        self.outstanding_tokens -= tokens

    @property
    def waiting_tokens(self) -> int:
        """Tokens of work before a new prompt: the larger of our own account and the instance's."""
        return max(self.outstanding_tokens, self.reported.get("queued_tokens", 0) + self.unsent_tokens)
