"""What goes into one engine step and what comes out: plain data, so that it can be sent to worker ranks.

Torch-free. A sequence is known to the workers by its key; `StepInput.joining` introduces it (and again
after a preemption, if `leaving` had dropped it), `StepInput.leaving` lets its sampling state go.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from distserve.core.parsing import ConfigError

LAST_SAMPLED = -1
"""In place of a token id: the one that the step before has sampled for this sequence, not yet told."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen. Defaults: greedy, no penalties, no log-probabilities.

    Same seed, same tokens, whatever the batch and the instance: random numbers depend on (seed, position)
    only.
    """

    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    min_tokens: int = 0  # until then end_ids can't be sampled
    end_ids: tuple[int, ...] = ()  # the ids that end the request: EOS (unless ignored) and stop token ids
    logprobs: int | None = None  # report the chosen token's and this many most likely ones' log-probabilities

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, self.temperature >= 0, "0 (greedy) or more")
        _check("top_k", self.top_k, self.top_k >= 0, "0 (off) or more")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        _check("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "above 0")
        _check("presence_penalty", self.presence_penalty, -2 <= self.presence_penalty <= 2, "in [-2, 2]")
        _check("frequency_penalty", self.frequency_penalty, -2 <= self.frequency_penalty <= 2, "in [-2, 2]")
        _check("min_tokens", self.min_tokens, self.min_tokens >= 0, "0 or more")
        _check("seed", self.seed, -(2**63) <= self.seed < 2**64, "64 bits")
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, 0 <= self.logprobs <= 20, "in [0, 20]")

    @property
    def penalised(self) -> bool:
        """Do the choices depend on the tokens so far?"""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def plain_greedy(self) -> bool:
        """Is the arg max of the raw logits the answer at every step?"""
        return (
            self.temperature == 0.0
            and not self.penalised
            and self.logprobs is None
            and not (self.min_tokens and self.end_ids)
        )


def _check(name: str, value: float, allowed: bool, range_: str) -> None:
    if not allowed:
        raise ConfigError(f"{name}={value}: must be {range_}")


@dataclass(frozen=True, slots=True)
class Joining:
    """A sequence that the workers have not seen: its parameters and the ids known so far (prompt, then
    output).
    """

    key: str
    params: SamplingParams
    prompt_len: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class StepItem:
    """Computes positions [start, start + len(tokens)) of one sequence.

    `block_table` covers at least these positions. With `sample` the next token is chosen from the last
    one's logits. The only token of an item may be `LAST_SAMPLED` (executors with `lag`).
    """

    key: str
    tokens: list[int]
    start: int
    block_table: list[int]
    sample: bool = True


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step: any mix of prompts, prompt chunks and single decode tokens, each sequence at most once."""

    items: list[StepItem]
    joining: list[Joining] = field(default_factory=list)
    leaving: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms under the model's own distribution: before penalties, temperature and truncation."""

    chosen: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Entry i belongs to the i-th item with `sample`, in the order of `StepInput.items`."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
