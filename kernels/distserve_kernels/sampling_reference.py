"""From logits to one token: temperature, top-k, top-p, min-p, and the draw. Batched; rows are independent.

Order as in Hugging Face's `generate`: temperature, top_k, top_p (over what top_k left), min_p. The draw
inverts the cumulative distribution in the order of token ids, not of probabilities, so that a near tie
between two tokens whose order differs in the last bit from batch to batch does not move any other token's
interval.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

COLDEST = 1e-6  # a lower temperature leaves the arg max anyway, and would overflow
CANDIDATES = 256  # top-p looks at this many tokens first, and at all only where they are not enough


@dataclass(frozen=True)
class Truncation:
    """Parameters of n rows, one entry each; `top_k` 0, `top_p` 1 and `min_p` 0 switch the row's limit off."""

    temperature: Tensor  # fp32, above 0
    top_k: Tensor  # int64
    top_p: Tensor  # fp32
    min_p: Tensor  # fp32
    # what the host has to know, found out once: a draw on a GPU waits for nothing
    ranked: bool = field(init=False)  # does any row need its tokens in order of probability?
    bare: bool = field(init=False)  # no row has any limit
    widest_k: int = field(init=False)
    nucleus: bool = field(init=False)  # does any row have top_p alone, without top_k?

    def __post_init__(self) -> None:
        limited, nucleus = self.top_k > 0, self.top_p < 1
        ranked = bool((limited | nucleus).any())
        flags = {
            "ranked": ranked,
            "bare": not ranked and not bool((self.min_p > 0).any()),
            "widest_k": int(self.top_k.max()) if len(self.top_k) else 0,
            "nucleus": bool((nucleus & ~limited).any()),
        }
        for name, value in flags.items():
            object.__setattr__(self, name, value)

    def moved(self, move: Callable[[Tensor], Tensor]) -> Truncation:
        """With every tensor moved, to another device; nothing is read back from there."""
        other = copy.copy(self)
        for name in ("temperature", "top_k", "top_p", "min_p"):
            object.__setattr__(other, name, move(getattr(self, name)))
        return other


def draw(logits: Tensor, how: Truncation, uniforms: Tensor) -> Tensor:
    """Token ids [n] from logits [n, V] (fp32) and uniforms [n] (fp64) in [0, 1)."""
    scores = logits / how.temperature.clamp(min=COLDEST).unsqueeze(1)
    if not how.ranked:
        if not how.bare:
            scores = _apply_min_p(scores, scores.amax(1, keepdim=True), how.min_p)
        return _invert(scores, uniforms)
    values, ids = _candidates(scores, how)
    if values.shape == scores.shape:
        return _invert(torch.empty_like(scores).scatter_(1, ids, values), uniforms)
    order = ids.argsort(1)
    picked = _invert(values.gather(1, order), uniforms)
    return ids.gather(1, order.gather(1, picked.unsqueeze(1))).squeeze(1)


def _candidates(scores: Tensor, how: Truncation) -> tuple[Tensor, Tensor]:
    """Scores [n, m] and their ids, most likely first; what the limits drop has the score -inf."""
    vocabulary = scores.shape[1]
    width = min(vocabulary, max(CANDIDATES, how.widest_k))
    normaliser = scores.logsumexp(1, keepdim=True)
    if how.nucleus and width < vocabulary and not scores.is_cpu:
        # whether the candidates are enough is known on the device only, and waiting costs more than sorting
        values, ids = scores.sort(dim=1, descending=True)
    else:
        values, ids = scores.topk(width, dim=1)
        if how.nucleus and width < vocabulary:
            mass = (values - normaliser).exp().sum(1)
            if bool(((how.top_k == 0) & (mass < how.top_p)).any()):
                values, ids = scores.sort(dim=1, descending=True)
    top_k = torch.where(how.top_k > 0, how.top_k, vocabulary).unsqueeze(1)
    values = values.masked_fill(torch.arange(values.shape[1], device=scores.device) >= top_k, -torch.inf)
    normaliser = torch.where(how.top_k.unsqueeze(1) > 0, values.logsumexp(1, keepdim=True), normaliser)
    probabilities = (values - normaliser).exp()
    before = probabilities.cumsum(1) - probabilities
    dropped = (before >= how.top_p.unsqueeze(1)) & (how.top_p < 1).unsqueeze(1)
    dropped[:, 0] = False
    values = values.masked_fill(dropped, -torch.inf)
    return _apply_min_p(values, values[:, :1], how.min_p), ids


def _apply_min_p(scores: Tensor, best: Tensor, min_p: Tensor) -> Tensor:
    """Drops what is less likely than min_p times the most likely token."""
    return scores.masked_fill(scores < best + min_p.log().unsqueeze(1), -torch.inf)


def _invert(scores: Tensor, uniforms: Tensor) -> Tensor:
    """Index [n] where the cumulative distribution of softmax(scores) passes the uniform; never one of
    probability 0.
    """
    weights = (scores - scores.amax(1, keepdim=True)).double().exp_()
    cumulative = weights.cumsum(1)
    target = (uniforms * cumulative[:, -1]).unsqueeze(1)
    picked = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    last = (weights > 0).long().mul_(torch.arange(1, scores.shape[1] + 1, device=scores.device)).amax(1) - 1
    return torch.minimum(picked, last)
