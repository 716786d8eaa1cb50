"""The older decoder block of GPT-2 and OPT: LayerNorm, learned positions, two-layer MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from distserve.core.model_config import ModelConfig
from distserve.core.shapes import split_range
from distserve.models.attention import AttentionContext
from distserve.models.base import Stage
from distserve.models.layers import (
    Builder,
    HeadSplit,
    LayerNorm,
    ParallelLMHead,
    Rows,
    VocabParallelEmbedding,
)
from distserve.models.linear import Linear
from distserve.models.weights import ModelLoadError

Activation = Callable[[Tensor], Tensor]

_ACTIVATIONS: Mapping[str, Activation] = {
    "relu": torch.relu_,
    "gelu": functional.gelu,
    "gelu_new": partial(functional.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(functional.gelu, approximate="tanh"),
}


def activation_of(config: ModelConfig) -> Activation:
    """May work in place. Raises `ModelLoadError` for a name that is not known."""
    found = _ACTIVATIONS.get(config.activation)
    if found is None:
        raise ModelLoadError(
            f"activation {config.activation!r} is not supported for {config.model_type}; "
            f"one of {', '.join(_ACTIVATIONS)}"
        )
    return found


@dataclass(frozen=True)
class BlockNames:
    """Names of a block's modules below its own prefix; `qkv` is one module (merged) or three."""

    qkv: tuple[str, ...]
    out: str
    attention_norm: str
    mlp_norm: str
    up: str
    down: str


class Block:
    """Attention and MLP with a norm before each (`norm_first`) or after each residual sum (post-norm,
    OPT-350m).
    """

    def __init__(
        self,
        build: Builder,
        config: ModelConfig,
        heads: HeadSplit,
        module: str,
        names: BlockNames,
        index: int,
    ) -> None:
        self._heads, self._index = heads, index
        self._norm_first = config.norm_first
        self._scale = config.head_dim**-0.5
        size, ffn, eps = config.hidden_size, config.ffn_size, config.norm_eps
        query = heads.columns(heads.query)
        parts = _qkv_parts([f"{module}.{n}" for n in names.qkv], size, query)
        self._qkv = build.column(parts, size, config.qkv_bias)
        self._out = build.row(f"{module}.{names.out}", size, size, query, config.o_bias)
        kept = split_range(ffn, build.group.size, build.group.rank)
        self._up = build.column([Rows(f"{module}.{names.up}", ffn, kept)], size, config.mlp_bias)
        self._down = build.row(f"{module}.{names.down}", size, ffn, kept, config.mlp_bias)
        self._activation = activation_of(config)
        self._attention_norm = LayerNorm(build, f"{module}.{names.attention_norm}", size, eps)
        self._mlp_norm = LayerNorm(build, f"{module}.{names.mlp_norm}", size, eps)

    def __call__(self, x: Tensor, attn: AttentionContext, rows: Tensor | None) -> Tensor:
        """x [T, hidden_size], overwritten; returns the block's output, of `rows` only if that is given."""
        attended = self._attend(self._attention_norm(x) if self._norm_first else x, attn, rows)
        x = x if rows is None else x[rows]
        if self._norm_first:
            normed = self._mlp_norm.of_sum(attended, x)
            return x.add_(self._mlp(normed))
        x = self._attention_norm.of_sum(attended, x)
        return self._mlp_norm.of_sum(self._mlp(x), x)

    def _attend(self, x: Tensor, attn: AttentionContext, rows: Tensor | None) -> Tensor:
        tokens, heads = x.shape[0], self._heads
        q, k, v = self._qkv(x).view(tokens, heads.total, heads.head_dim).split_with_sizes(heads.sizes, dim=1)
        attended = attn.run(self._index, q, k, v, self._scale, None).view(tokens, -1)
        return self._out(attended if rows is None else attended[rows])

    def _mlp(self, x: Tensor) -> Tensor:
        return self._down(self._activation(self._up(x)))


def _qkv_parts(modules: Sequence[str], size: int, columns: range) -> list[Rows]:
    """Rows of q, k, v (all have the same heads here), from three matrices or from one that holds them in
    turn.
    """
    if len(modules) == 3:
        return [Rows(module, size, columns) for module in modules]
    starts = (0, size, 2 * size)
    return [Rows(modules[0], 3 * size, range(s + columns.start, s + columns.stop)) for s in starts]


@dataclass(frozen=True)
class ModelNames:
    """Names of a checkpoint's tensors and modules; `block` names block i as `block.i`."""

    tokens: str
    positions: str
    block: str
    names: BlockNames
    final_norm: str | None
    project_in: str | None = None  # OPT-350m: the embedding is narrower than the layers
    project_out: str | None = None


class LearnedPositionModel:
    """See `Model`. `offset`: rows of the position table before position 0."""

    def __init__(
        self, config: ModelConfig, build: Builder, layers: range, names: ModelNames, offset: int = 0
    ) -> None:
        self.config, self.dtype, self.device = config, build.dtype, build.device
        self._stage = stage = Stage(config, layers)
        self.layers, self._offset = layers, offset
        self.heads = HeadSplit.of(config, build.group)
        size, width = config.hidden_size, config.embed_dim or config.hidden_size
        self._embed: VocabParallelEmbedding | None = None
        self._project_in: Linear | None = None
        self._head: ParallelLMHead | None = None
        self._norm: LayerNorm | None = None
        self._project_out: Linear | None = None
        if stage.is_first:
            self._embed = VocabParallelEmbedding(build, names.tokens, config.vocab_size, width)
            self._positions = build.tensor(names.positions, (config.max_context + offset, size))
            if names.project_in:
                self._project_in = build.linear(names.project_in, size, width)
        self._blocks = [
            Block(build, config, self.heads, f"{names.block}.{layer}", names.names, index)
            for index, layer in enumerate(layers)
        ]
        if stage.is_last:
            if names.final_norm:
                self._norm = LayerNorm(build, names.final_norm, size, config.norm_eps)
            if names.project_out:
                self._project_out = build.linear(names.project_out, width, size)
            shared = self._embed.table if config.tie_embeddings and self._embed is not None else None
            head = names.tokens if config.tie_embeddings else "lm_head.weight"
            self._head = ParallelLMHead(build, head, config.vocab_size, width, shared)

    @torch.inference_mode()
    def forward(
        self, inputs: Tensor, positions: Tensor, attn: AttentionContext, rows: Tensor | None = None
    ) -> Tensor:
        """See `Model.forward`."""
        x = inputs
        if self._embed is not None:
            x = self._embed(inputs)
            if self._project_in is not None:
                x = self._project_in(x)
            x = x.add_(functional.embedding(positions + self._offset, self._positions))
        last = self._blocks[-1]
        for block in self._blocks:
            x = block(x, attn, rows if block is last else None)
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`."""
        self._stage.require_last()
        assert self._head is not None
        if self._norm is not None:
            hidden = self._norm(hidden)
        if self._project_out is not None:
            hidden = self._project_out(hidden)
        return self._head(hidden)
