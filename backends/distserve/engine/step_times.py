"""How long an engine's steps take by what they compute, to be held against a profile's step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from distserve.core.batch import Item

EXACT_DECODES, DECODES_STEP = 16, 8  # more decoding requests are counted by eights


@dataclass(frozen=True, slots=True)
class StepShape:
    """What one step computes."""

    prompt_tokens: int
    prompt_squares: int  # sum of end^2 - start^2: the pieces of a prompt sum to its length squared
    prompts: int
    decodes: int
    context_tokens: int  # of the decoding requests, with the token that the step computes

    @classmethod
    def of(cls, prefill: Sequence[Item], decode: Sequence[Item]) -> StepShape:
        ends = [(item.start, item.start + item.num_tokens) for item in prefill]
        return cls(
            sum(end - start for start, end in ends),
            sum(end * end - start * start for start, end in ends),
            len(prefill),
            len(decode),
            sum(item.start + 1 for item in decode),
        )


@dataclass(frozen=True, slots=True)
class StepSums:
    """Totals over the steps of one class."""

    steps: int = 0
    prompt_tokens: int = 0
    prompt_squares: int = 0
    prompts: int = 0
    decodes: int = 0
    context_tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = (
        0.0  # of the thread that runs the steps: on a GPU, or with worker ranks, not the step's own
    )

    def plus(self, other: StepSums) -> StepSums:
        return StepSums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def minus(self, other: StepSums) -> StepSums:
        return StepSums(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


class StepTimes:
    """Sums by class of step: prompt tokens up to a power of two, number of decoding requests.

    Written by the loop's thread, read by others: a class's sums are replaced as a whole.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], StepSums] = {}

    def add(self, shape: StepShape, wall_s: float, cpu_s: float) -> None:
        key = step_class(shape.prompt_tokens, shape.decodes)
        one = StepSums(
            1,
            shape.prompt_tokens,
            shape.prompt_squares,
            shape.prompts,
            shape.decodes,
            shape.context_tokens,
            wall_s,
            cpu_s,
        )
        self._sums[key] = self._sums.get(key, StepSums()).plus(one)

    def to_wire(self) -> list[dict[str, Any]]:
        """One entry a class, for the status."""
        return [
            {"prompt_tokens_to": tokens, "decodes_to": decodes, **asdict(sums)}
            for (tokens, decodes), sums in sorted(list(self._sums.items()))
        ]


def step_class(prompt_tokens: int, decodes: int) -> tuple[int, int]:
    """The largest prompt tokens and the largest number of decoding requests of a step's class."""
    if decodes > EXACT_DECODES:
        decodes = -(-decodes // DECODES_STEP) * DECODES_STEP
    return 1 << (prompt_tokens - 1).bit_length() if prompt_tokens else 0, decodes
