"""What the orchestrator knows about one instance: its last status and the work it has there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from distserve.serving.pace import DecodePace, PrefillPace
from distserve.serving.schema import LOAD_KEYS
from distserve.transfer.handle import Layout

LinkPhase = Literal["connecting", "up", "down"]


@dataclass(frozen=True)
class InstanceStatus:
    """The fixed part of a ``status`` reply; counts are of blocks and tokens."""

    instance: str
    role: str
    epoch: int
    model_hash: str
    layout: Layout
    max_context: int
    block_size: int
    blocks_total: int
    max_batch_size: int
    max_batch_tokens: int
    pieces_above: int | None = (
        None  # longer prompts are computed in pieces, and overtaken; None: they are not
    )
    attention: str = ""  # name of its implementation

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
            layout=Layout.from_wire(reply["layout"]),
            max_context=int(reply["max_context"]),
            block_size=int(reply["block_size"]),
            blocks_total=int(reply["blocks_total"]),
            max_batch_size=int(reply["max_batch_size"]),
            max_batch_tokens=int(reply["max_batch_tokens"]),
            pieces_above=None if reply.get("pieces_above") is None else int(reply["pieces_above"]),
            attention=str(reply.get("attention", "")),
        )


class Work(NamedTuple):
    """What a submitted prompt is to an instance, in tokens."""

    tokens: int
    charge: int  # of those, what a prompt behind it has to wait for: none if it can be overtaken

    @property
    def long(self) -> bool:
        return self.charge < self.tokens


@dataclass
class Load:
    """Figures that the instance reports, and what this orchestrator has given it since.

    ``credits`` is kept up to date locally: a submitted prompt takes its tokens, a finished one gives them
    back, and every report replaces the figure, less what the instance can't have seen yet.
    """

    reported: dict[str, int] = field(default_factory=dict)
    credits: int = 0
    outstanding_tokens: int = 0  # of prompts submitted from here and not prefilled yet
    outstanding_charge: int = 0
    unsent_tokens: int = 0  # of those, still on their way to the instance
    unsent_charge: int = 0
    longs: int = 0  # outstanding prompts that can be overtaken
    pace: PrefillPace = field(default_factory=PrefillPace)
    decode_pace: DecodePace = field(default_factory=DecodePace)

    def report(self, values: Mapping[str, Any]) -> None:
        """Take over a reported load."""
        before = tuple(self.reported.get(key) for key in _PACE_KEYS)
        for key in LOAD_KEYS:
            value = values.get(key)
            if isinstance(value, int):
                self.reported[key] = value
        if isinstance(values.get("credits"), int):
            self.credits = int(values["credits"]) - self.unsent_charge
        after = tuple(self.reported.get(key) for key in _PACE_KEYS)
        if None not in before and None not in after:
            steps, tokens, micros = (b - a for a, b in zip(before, after, strict=True))  # type: ignore[operator]
            self.pace.note(steps, tokens, micros / 1e6)

    def submitted(self, work: Work) -> None:
        self.credits -= work.charge
        self.outstanding_tokens += work.tokens
        self.outstanding_charge += work.charge
        self.unsent_tokens += work.tokens
        self.unsent_charge += work.charge
        self.longs += work.long

    def arrived(self, work: Work) -> None:
        """The instance has answered the submit call."""
        self.unsent_tokens -= work.tokens
        self.unsent_charge -= work.charge

    def done(self, work: Work) -> None:
        """Prefilled, refused, cancelled or lost."""
        self.credits += work.charge
        self.outstanding_tokens -= work.tokens
        self.outstanding_charge -= work.charge
        self.longs -= work.long

    @property
    def waiting_tokens(self) -> int:
        """Tokens of work before a new prompt: the larger of our own account and the instance's."""
        return max(self.outstanding_tokens, self.reported.get("queued_tokens", 0) + self.unsent_tokens)


_PACE_KEYS = ("prefill_steps", "prefill_tokens", "prefill_us")
