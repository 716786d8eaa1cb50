"""Chooses the next token of every sequence of a step.

The usual case, every row greedy and without extras, is one arg max. Everything else is batched over the
rows that need it. Random numbers come from (seed, position), so neither batch nor instance changes a
result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distserve.worker.rng import uniform
from distserve.worker.step import Joining, SamplingParams, TokenLogprobs
from distserve.worker.truncation import Truncation, draw


@dataclass(slots=True)
class SequenceState:
    """What the choices of one sequence depend on. The tensors exist only where penalties ask for them."""

    params: SamplingParams
    prompt_len: int
    seen: Tensor | None = None  # bool [V]: in prompt or output
    counts: Tensor | None = None  # fp32 [V]: times in the output


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
        state = SequenceState(joining.params, joining.prompt_len)
        if joining.params.penalised:
            tokens = torch.tensor(joining.tokens, dtype=torch.long, device=self._device)
            state.seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            state.seen[tokens] = True
            state.counts = torch.bincount(tokens[joining.prompt_len :], minlength=self._vocab_size).float()
        self._states[joining.key] = state
        self._truncation = None

    def leave(self, key: str) -> None:
        """Forgets a sequence; an unknown key is no error."""
        self._states.pop(key, None)

    def sample(
        self, logits: Tensor, keys: Sequence[str], positions: Sequence[int]
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """One token per row of logits [n, V]. `positions[i]` is the place of the new token of sequence
        `keys[i]`.

        Raises `KeyError` for a sequence that has not joined.
        """
        states = [self._states[key] for key in keys]
        if all(state.params.plain_greedy for state in states):
            tokens: list[int] = logits.argmax(-1).tolist()
            return tokens, [None] * len(tokens)
        logits = logits.float()
        adjusted = self._adjust(logits, states, positions)
        chosen = adjusted.argmax(-1)
        random = [i for i, state in enumerate(states) if state.params.temperature > 0]
        if random:
            rows = torch.tensor(random, device=self._device)
            how = self._parameters(tuple(keys[i] for i in random))
            draws = [uniform(states[i].params.seed, positions[i]) for i in random]
            uniforms = torch.tensor(draws, dtype=torch.float64, device=self._device)
            part = adjusted if len(random) == len(states) else adjusted[rows]
            chosen[rows] = draw(part, how, uniforms)
        tokens = chosen.tolist()
        for state, token in zip(states, tokens, strict=True):
            if state.seen is not None and state.counts is not None:
                state.seen[token] = True
                state.counts[token] += 1
        return tokens, _logprobs(logits, states, tokens)

    def _adjust(self, logits: Tensor, states: Sequence[SequenceState], positions: Sequence[int]) -> Tensor:
        """Logits after penalties and min_tokens; the rows given are left as they are."""
        adjusted = logits
        for i, (state, position) in enumerate(zip(states, positions, strict=True)):
            params = state.params
            early = position - state.prompt_len < params.min_tokens and bool(params.end_ids)
            if not early and state.seen is None:
                continue
            if adjusted is logits:
                adjusted = logits.clone()
            row = adjusted[i]
            if state.seen is not None and state.counts is not None:
                penalise(row, params, state.seen, state.counts)
            if early:
                row[[t for t in params.end_ids if t < self._vocab_size]] = -torch.inf
        return adjusted

    def _parameters(self, keys: tuple[str, ...]) -> Truncation:
        """Tensors of the rows' parameters, kept from step to step while the batch stays the same."""
        if self._truncation is None or self._truncation[0] != keys:
            params = [self._states[key].params for key in keys]
            tensors = Truncation(
                self._tensor([p.temperature for p in params], torch.float32),
                self._tensor([p.top_k for p in params], torch.int64),
                self._tensor([p.top_p for p in params], torch.float32),
                self._tensor([p.min_p for p in params], torch.float32),
            )
            self._truncation = (keys, tensors)
        return self._truncation[1]

    def _tensor(self, values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)


def penalise(row: Tensor, params: SamplingParams, seen: Tensor, counts: Tensor) -> None:
    """Applies the penalties to one row [V] in place.

    Repetition (CTRL, arXiv 1909.05858): logits of tokens in prompt or output are divided by it if positive,
    multiplied if negative. Frequency and presence (OpenAI): subtracted per occurrence, and once, for tokens
    of the output.
    """
    if params.repetition_penalty != 1.0:
        factor = params.repetition_penalty
        row.copy_(torch.where(seen, torch.where(row > 0, row / factor, row * factor), row))
    if params.frequency_penalty or params.presence_penalty:
        row -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)


def _logprobs(
    logits: Tensor, states: Sequence[SequenceState], tokens: Sequence[int]
) -> list[TokenLogprobs | None]:
    """For the rows that ask for them, of the logits as the model gave them."""
    out: list[TokenLogprobs | None] = [None] * len(tokens)
    rows = [i for i, state in enumerate(states) if state.params.logprobs is not None]
    if not rows:
        return out
    table = logits[rows].log_softmax(-1)
    width = max(states[i].params.logprobs or 0 for i in rows)
    top_values, top_ids = (t.tolist() for t in table.topk(width, dim=-1))
    for j, i in enumerate(rows):
        n = states[i].params.logprobs or 0
        chosen = float(table[j, tokens[i]])
        out[i] = TokenLogprobs(chosen, tuple(top_ids[j][:n]), tuple(top_values[j][:n]))
    return out
