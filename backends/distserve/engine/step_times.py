"""How long an engine's steps take by what they compute, to be held against a profile's step times."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from distserve.core.batch import Item, PromptWork

EXACT_DECODES, DECODES_STEP = 16, 8  # more decoding requests are counted by eights


class StepShape(NamedTuple):
    """What one step computes."""

    prompt_tokens: int
    prompt_squares: int  # sum of end^2 - start^2: the pieces of a prompt sum to its length squared
    prompts: int
    prompt_ends: int  # prompts that are complete with this step: each samples a token
    decodes: int
    context_tokens: int  # of the decoding requests, with the token that the step computes

    @classmethod
    def of(cls, prefill: Sequence[Item], decode: Sequence[Item]) -> StepShape:
        return cls(*PromptWork.of(prefill), len(decode), sum(item.start + 1 for item in decode))


class StepSums(NamedTuple):
    """Totals over the steps of one class: their number, the fields of `StepShape`, seconds."""

    steps: int = 0
    prompt_tokens: int = 0
    prompt_squares: int = 0
    prompts: int = 0
    prompt_ends: int = 0
    decodes: int = 0
    context_tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0  # of the engine's thread: on a GPU, or with worker ranks, not the step's own

    def plus(self, other: StepSums) -> StepSums:
        return StepSums(*map(operator.add, self, other))

    def minus(self, other: StepSums) -> StepSums:
        return StepSums(*map(operator.sub, self, other))


StepClasses = Mapping[tuple[int, int], StepSums]
"""Sums by `step_class`."""


class StepTimes:
    """Sums by class of step: prompt tokens up to a power of two, number of decoding requests.

    Written by the loop's thread, read by others: a class's sums are replaced as a whole.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], StepSums] = {}

    def add(self, shape: StepShape, wall_s: float, cpu_s: float) -> None:
        key = step_class(shape.prompt_tokens, shape.decodes)
        one = StepSums(1, *shape, wall_s, cpu_s)
        self._sums[key] = self._sums.get(key, StepSums()).plus(one)

    def to_wire(self) -> list[dict[str, Any]]:
        return to_wire(self._sums.copy())


def to_wire(sums: StepClasses) -> list[dict[str, Any]]:
    """One entry a class, as in the status."""
    return [
        {"prompt_tokens_to": tokens, "decodes_to": decodes, **one._asdict()}
        for (tokens, decodes), one in sorted(sums.items())
    ]


def from_wire(entries: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], StepSums]:
    """The inverse of `to_wire`."""
    return {
        (entry["prompt_tokens_to"], entry["decodes_to"]): StepSums(
            *(entry[name] for name in StepSums._fields)
        )
        for entry in entries
    }


def step_class(prompt_tokens: int, decodes: int) -> tuple[int, int]:
    """The largest prompt tokens and the largest number of decoding requests of a step's class."""
    if decodes > EXACT_DECODES:
        decodes = -(-decodes // DECODES_STEP) * DECODES_STEP
    return 1 << (prompt_tokens - 1).bit_length() if prompt_tokens else 0, decodes
