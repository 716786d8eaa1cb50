"""What every model offers to the runner."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from distserve.core.model_config import ModelConfig
from distserve.models.attention import AttentionContext
from distserve.models.layers import HeadSplit


class Model(Protocol):
    """One rank's part of a model: a tensor-parallel slice of a contiguous range of layers (a pipeline stage).

    The first stage has the embeddings, the last one the final norm and the head.
    """

    config: ModelConfig
    layers: range
    heads: HeadSplit  # of this rank: len(heads.kv) is what its KV cache holds per layer
    dtype: torch.dtype
    device: torch.device

    def forward(
        self, inputs: Tensor, positions: Tensor, attn: AttentionContext, rows: Tensor | None = None
    ) -> Tensor:
        """Runs this stage's layers on a batch of tokens, of any sequences, one row each.

        `inputs`: token ids int64 [T] on the first stage, else the previous stage's hidden states [T,
        hidden_size], which are **overwritten**. `positions` int64 [T]: index of each token in its sequence,
        below `max_context`. Returns hidden states [T, hidden_size] (before the final norm) for `logits` or
        for the next stage; with `rows` (int64 [N], the last stage only) those of these rows, [N,
        hidden_size]: the last layer stores the KV of all tokens but computes no more than that, which saves
        a prompt most of one layer.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head on chosen rows [N, hidden_size] of the last stage: fp32 [N, vocab_size] on
        every rank.

        Raises `ValueError` on a stage without the head.
        """
        ...


class Stage:
    """Which layers a rank holds, and what follows from it."""

    def __init__(self, config: ModelConfig, layers: range) -> None:
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= config.num_layers:
            raise ValueError(f"layers={layers}: must be a non-empty part of range(0, {config.num_layers})")
        self.layers = layers
        self.is_first = layers.start == 0
        self.is_last = layers.stop == config.num_layers

    def require_last(self) -> None:
        if not self.is_last:
            raise ValueError(f"layers {self.layers.start} to {self.layers.stop - 1} hold no head")
