"""Chooses the next token of every sequence of a step.

The usual case, every row greedy and without extras, is one arg max. Everything else is batched over the
rows that need it. Random numbers come from (seed, position), so neither batch nor instance changes a
result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from distserve.worker.rng import uniform
from distserve.worker.step import Joining, SamplingParams, TokenLogprobs
from distserve_kernels.sampling import argmax, draw
from distserve_kernels.sampling_reference import Truncation
from distserve_kernels.transit import upload


class TokenCounts:
    """The distinct tokens of prompt and output, and how often each is in the output: what penalties depend
    on.
    """

    def __init__(self, tokens: Sequence[int], prompt_len: int, device: torch.device) -> None:
        self._place: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        self._device = device
        for i, token in enumerate(tokens):
            self.add(token, 1 if i >= prompt_len else 0)

    def add(self, token: int, times: int = 1) -> None:
        """Notes a token; `times` 0: one of the prompt."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        self._counts[place] += times

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Ids int64 [m] and counts fp32 [m]. Valid until the next `add`."""
        m = len(self._place)
        return upload(self._ids[:m], self._device), upload(self._counts[:m], self._device)


@dataclass(frozen=True, slots=True)
class SequenceState:
    """What the choices of one sequence depend on; `seen` exists only where penalties ask for it."""

    params: SamplingParams
    prompt_len: int
    seen: TokenCounts | None


@dataclass(frozen=True, slots=True)
class Reported:
    """Log-probabilities of rows that ask for them, still on the device.

    `rows`: (row, how many of the largest ones); `values`: of each row the chosen token's, then the largest
    ones; `ids`: of the largest ones.
    """

    rows: Sequence[tuple[int, int]] = ()
    values: Tensor = field(default_factory=lambda: torch.empty(0))
    ids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class Choice:
    """The tokens of a step, still on the device: int64 [n], one for each of `states`."""

    states: Sequence[SequenceState]
    tokens: Tensor
    reported: Reported = field(default_factory=Reported)


class Sampler:
    """Keeps the sampling state of the sequences of one instance."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._states: dict[str, SequenceState] = {}
        self._truncation: tuple[tuple[str, ...], Truncation] | None = None

    def __len__(self) -> int:
        return len(self._states)

    def join(self, joining: Joining) -> None:
        """Makes a sequence known; one of that key that is known already is replaced."""
        params, length = joining.params, joining.prompt_len
        seen = TokenCounts(joining.tokens, length, self._device) if params.penalised else None
        self._states[joining.key] = SequenceState(params, length, seen)
        self._truncation = None

    def leave(self, key: str) -> None:
        """Forgets a sequence; an unknown key is no error."""
        self._states.pop(key, None)

    def sample(
        self, logits: Tensor, keys: Sequence[str], positions: Sequence[int]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """One token per row of logits [n, V], which may be overwritten.

        `positions[i]` is the place of the new token of sequence `keys[i]`. Raises `KeyError` for a sequence
        that has not joined.
        """
        choice = self.choose(logits, keys, positions)
        reported = choice.reported
        return self.settle(choice, choice.tokens.tolist(), reported.values.tolist(), reported.ids.tolist())

    def counts_tokens(self, keys: Sequence[str]) -> bool:
        """Do the choices for any of these sequences depend on its tokens so far?"""
        return any(self._states[key].seen is not None for key in keys)

    def choose(self, logits: Tensor, keys: Sequence[str], positions: Sequence[int]) -> Choice:
        """The first half of `sample`, which waits for no device."""
        states = [self._states[key] for key in keys]
        if all(state.params.plain_greedy for state in states):
            return Choice(states, argmax(logits))
        logits = logits.float()
        tables = {
            i: log_softmax(logits[i], -1) for i, s in enumerate(states) if s.params.logprobs is not None
        }
        self._adjust(logits, states, positions)
        chosen = argmax(logits)
        random = [i for i, state in enumerate(states) if state.params.temperature > 0]
        if random:
            rows = upload(np.array(random, dtype=np.int64), self._device)
            how = self._parameters(tuple(keys[i] for i in random))
            draws = [uniform(states[i].params.seed, positions[i]) for i in random]
            uniforms = upload(np.array(draws, dtype=np.float64), self._device)
            part = logits if len(random) == len(states) else logits[rows]
            chosen[rows] = draw(part, how, uniforms)
        return Choice(states, chosen, _reported(tables, states, chosen))

    def settle(
        self, choice: Choice, tokens: list[int], values: list[float], ids: list[int]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """The second half: takes note of the tokens, which are the choice's, read back as `values` and `ids`
        are of what it reports.
        """
        for state, token in zip(choice.states, tokens, strict=True):
            if state.seen is not None:
                state.seen.add(token)
        logprobs: list[TokenLogprobs | None] = [None] * len(tokens)
        value, largest = iter(values), iter(ids)
        for row, count in choice.reported.rows:
            chosen = next(value)
            logprobs[row] = TokenLogprobs(chosen, tuple(islice(largest, count)), tuple(islice(value, count)))
        return tokens, logprobs

    def _adjust(self, logits: Tensor, states: Sequence[SequenceState], positions: Sequence[int]) -> None:
        """Penalties and min_tokens, in place."""
        for row, state, position in zip(logits, states, positions, strict=True):
            params = state.params
            if state.seen is not None:
                penalise(row, params, *state.seen.tensors())
            if params.end_ids and position - state.prompt_len < params.min_tokens:
                ends = np.array([t for t in params.end_ids if t < self._vocab_size], dtype=np.int64)
                row.index_fill_(0, upload(ends, self._device), -torch.inf)

    def _parameters(self, keys: tuple[str, ...]) -> Truncation:
        """Tensors of the rows' parameters, kept from step to step while the batch stays the same."""
        if self._truncation is None or self._truncation[0] != keys:
            params = [self._states[key].params for key in keys]
            limits = Truncation(
                torch.tensor([p.temperature for p in params], dtype=torch.float32),
                torch.tensor([p.top_k for p in params], dtype=torch.int64),
                torch.tensor([p.top_p for p in params], dtype=torch.float32),
                torch.tensor([p.min_p for p in params], dtype=torch.float32),
            )
            self._truncation = (keys, limits.moved(lambda values: upload(values, self._device)))
        return self._truncation[1]


def penalise(row: Tensor, params: SamplingParams, ids: Tensor, counts: Tensor) -> None:
    """Applies the penalties to one row [V] in place; `ids` [m] are the tokens so far, `counts` [m] those of
    the output.

    Repetition (CTRL, arXiv 1909.05858): logits of tokens in prompt or output are divided by it if positive,
    multiplied if negative. Frequency and presence (OpenAI): subtracted per occurrence, and once, for tokens
    of the output.
    """
    values = row[ids]
    if params.repetition_penalty != 1.0:
        factor = params.repetition_penalty
        values = torch.where(values > 0, values / factor, values * factor)
    values -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    row[ids] = values


def _reported(tables: Mapping[int, Tensor], states: Sequence[SequenceState], chosen: Tensor) -> Reported:
    """`tables`: of each row that asks the log-probabilities as the model gave them."""
    if not tables:
        return Reported()
    rows: list[tuple[int, int]] = []
    values: list[Tensor] = []
    ids: list[Tensor] = []
    for row, table in tables.items():
        count = states[row].params.logprobs or 0
        largest = table.topk(count)
        rows.append((row, count))
        values += [table.gather(0, chosen[row : row + 1]), largest.values]
        ids.append(largest.indices)
    return Reported(rows, torch.cat(values), torch.cat(ids))
