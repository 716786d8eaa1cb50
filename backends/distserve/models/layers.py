"""Tensor-parallel layers. Each rank builds its slice straight from the checkpoint (Megatron-LM, arXiv
1909.08053).

Column-parallel layers split the output (no communication), row-parallel ones the input (one all-reduce),
embedding and head the vocabulary. With one rank all of it is the plain layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from distserve.core.model_config import ModelConfig
from distserve.core.shapes import head_range, query_head_range, split_range
from distserve.models.linear import Linear, LinearPlan
from distserve.models.weights import WeightSource
from distserve.worker.parallel import ParallelGroup
from distserve_kernels import memory, ops
from distserve_kernels.linear import PackedLinear


@dataclass(frozen=True)
class Rows:
    """Rows (outputs) of one matrix of the checkpoint: part of a merged column-parallel layer."""

    module: str  # "model.layers.0.self_attn.q_proj"
    total: int  # rows of the whole matrix
    kept: range


@dataclass(frozen=True)
class Builder:
    """What a layer needs to build itself. `transposed`: linear weights are stored as [in, out] (GPT-2's
    Conv1D).
    """

    weights: WeightSource
    group: ParallelGroup
    dtype: torch.dtype
    device: torch.device
    plan: LinearPlan
    transposed: bool = False

    def tensor(self, name: str, shape: Sequence[int], rows: range | None = None) -> Tensor:
        """A tensor, or rows of it, in the model's dtype on its device."""
        read = self.weights.read(name, shape, rows)
        return torch.empty(read.shape, dtype=self.dtype, device=self.device).copy_(read)

    def matrix(self, outputs: int, inputs: int) -> Tensor:
        """Room for a weight that goes into a `Linear`.

        One that is to be packed is soon given back: in pages of its own all of it returns to the system,
        while malloc would keep up to 64 MB of such holes.
        """
        if self.plan.packed:
            return memory.zeros((outputs, inputs), self.dtype)
        return torch.empty((outputs, inputs), dtype=self.dtype, device=self.device)

    def column(self, parts: Sequence[Rows], inputs: int, bias: bool) -> Linear:
        """y = x W^T + b, W the rows of `parts` below one another: one product for q, k, v or for gate and
        up.
        """
        outputs = sum(len(p.kept) for p in parts)
        weight = self.matrix(outputs, inputs)
        vector = torch.empty(outputs, dtype=self.dtype, device=self.device) if bias else None
        at = 0
        for part in parts:
            into = slice(at, at + len(part.kept))
            weight[into].copy_(self._matrix(part.module, part.total, inputs, rows=part.kept))
            if vector is not None:
                vector[into].copy_(self.weights.read(f"{part.module}.bias", (part.total,), part.kept))
            at = into.stop
        return Linear(weight, vector, self.plan)

    def row(self, module: str, outputs: int, inputs: int, kept: range, bias: bool) -> RowParallelLinear:
        """The layer that takes this rank's `kept` of the inputs and sums over the ranks; rank 0 adds the
        bias.
        """
        weight = self.matrix(outputs, len(kept))
        weight.copy_(self._matrix(module, outputs, inputs, cols=kept))
        adds = bias and self.group.rank == 0
        vector = self.tensor(f"{module}.bias", (outputs,)) if adds else None
        return RowParallelLinear(Linear(weight, vector, self.plan), self.group)

    def linear(self, module: str, outputs: int, inputs: int) -> Linear:
        """A small layer that every rank holds as a whole."""
        return self.column([Rows(module, outputs, range(outputs))], inputs, bias=False)

    def _matrix(
        self, module: str, outputs: int, inputs: int, rows: range | None = None, cols: range | None = None
    ) -> Tensor:
        name = f"{module}.weight"
        if self.transposed:
            return self.weights.read(name, (inputs, outputs), cols, rows).t()
        return self.weights.read(name, (outputs, inputs), rows, cols)


@dataclass(frozen=True)
class HeadSplit:
    """Attention heads of one rank."""

    query: range
    kv: range
    head_dim: int

    @classmethod
    def of(cls, config: ModelConfig, group: ParallelGroup) -> HeadSplit:
        """Raises `ConfigError`, naming the allowed degrees, if the heads can't be split over the group."""
        return cls(
            query_head_range(config.num_heads, config.num_kv_heads, group.size, group.rank),
            head_range(config.num_kv_heads, group.size, group.rank),
            config.head_dim,
        )

    @property
    def total(self) -> int:
        """Heads in a merged qkv tensor."""
        return len(self.query) + 2 * len(self.kv)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return len(self.query), len(self.kv), len(self.kv)

    def columns(self, heads: range) -> range:
        """The channels of some heads."""
        return range(heads.start * self.head_dim, heads.stop * self.head_dim)


class RowParallelLinear:
    """y = sum over ranks of x_rank W_rank^T, + b; x [T, inputs of this rank] -> [T, outputs], on every
    rank.
    """

    __slots__ = ("_group", "_linear")

    def __init__(self, linear: Linear, group: ParallelGroup) -> None:
        self._linear = linear
        self._group = group

    @property
    def packed(self) -> PackedLinear | None:
        """See `Linear.packed`; None where there is something to sum."""
        return self._linear.packed if self._group.size == 1 else None

    def __call__(self, x: Tensor) -> Tensor:
        return self._group.all_reduce(self._linear(x))


class VocabParallelEmbedding:
    """Token ids int64 [T] -> rows [T, width] of a table whose rows are split over the ranks."""

    def __init__(self, build: Builder, name: str, vocab_size: int, width: int) -> None:
        self._group = build.group
        self._rows = split_range(vocab_size, build.group.size, build.group.rank)
        self.table = build.tensor(name, (vocab_size, width), self._rows)

    def __call__(self, ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return functional.embedding(ids, self.table)
        local = ids - self._rows.start
        foreign = (local < 0) | (local >= len(self._rows))
        found = functional.embedding(local.masked_fill_(foreign, 0), self.table)
        return self._group.all_reduce(found.masked_fill_(foreign.unsqueeze(-1), 0))


class ParallelLMHead:
    """Hidden states [N, width] -> logits of the whole vocabulary [N, vocab_size], fp32, on every rank."""

    def __init__(
        self, build: Builder, name: str, vocab_size: int, width: int, table: Tensor | None = None
    ) -> None:
        """`table`: this rank's rows of the embedding, to share instead of reading tensor `name` again.

        A packed head needs its own copy beside the table, also when they are tied.
        """
        ranks = range(build.group.size)
        self._group = build.group
        self._widths = [len(split_range(vocab_size, build.group.size, r)) for r in ranks]
        rows = split_range(vocab_size, build.group.size, build.group.rank)
        if table is None:
            table = build.matrix(len(rows), width).copy_(build.weights.read(name, (vocab_size, width), rows))
        self._linear = Linear(table, None, build.plan)

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._group.all_gather(self._linear(hidden), self._widths).float()


class LayerNorm:
    """(x - mean) / std * weight + bias over the last axis."""

    __slots__ = ("_bias", "_eps", "_weight")

    def __init__(self, build: Builder, module: str, size: int, eps: float) -> None:
        self._weight = build.tensor(f"{module}.weight", (size,))
        self._bias = build.tensor(f"{module}.bias", (size,))
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self._weight, self._bias, self._eps)

    def of_sum(self, x: Tensor, residual: Tensor) -> Tensor:
        """The norm of `residual + x`, which `residual` is afterwards."""
        return ops.add_layer_norm(x, residual, self._weight, self._bias, self._eps)[0]
