"""The LLaMA family: Llama 2 and 3, Mistral, Qwen2 (qkv bias), Qwen3 (norms on q and k), SmolLM."""

from __future__ import annotations

import torch
from torch import Tensor

from distserve.core.model_config import ModelConfig
from distserve.core.shapes import split_range
from distserve.models.attention import AttentionContext
from distserve.models.base import Stage
from distserve.models.layers import Builder, HeadSplit, ParallelLMHead, Rows, VocabParallelEmbedding
from distserve.models.rotary import RotaryTable
from distserve_kernels import ops
from distserve_kernels.decoder import Decoder, DecoderShape, LayerWeights, decoder


class LlamaAttention:
    """Grouped-query attention with rotary positions. `index` counts this rank's layers, `layer` the
    model's.
    """

    def __init__(
        self, build: Builder, config: ModelConfig, heads: HeadSplit, module: str, index: int, layer: int
    ) -> None:
        self._heads, self._index = heads, index
        self._scale = config.head_dim**-0.5
        self._eps = config.norm_eps
        self.window = config.window_of(layer)
        query, kv = heads.columns(heads.query), heads.columns(heads.kv)
        parts = [
            Rows(f"{module}.q_proj", config.q_size, query),
            Rows(f"{module}.k_proj", config.kv_size, kv),
            Rows(f"{module}.v_proj", config.kv_size, kv),
        ]
        self.qkv = build.column(parts, config.hidden_size, config.qkv_bias)
        self.out = build.row(f"{module}.o_proj", config.hidden_size, config.q_size, query, config.o_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = build.tensor(f"{module}.q_norm.weight", (config.head_dim,))
            self.k_norm = build.tensor(f"{module}.k_norm.weight", (config.head_dim,))

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, attn: AttentionContext, rows: Tensor | None
    ) -> Tensor:
        tokens, heads = x.shape[0], self._heads
        q, k, v = self.qkv(x).view(tokens, heads.total, heads.head_dim).split_with_sizes(heads.sizes, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = ops.rms_norm(q, self.q_norm, self._eps), ops.rms_norm(k, self.k_norm, self._eps)
        attended = attn.run(self._index, q, k, v, self._scale, self.window, (cos, sin))
        attended = attended.view(tokens, -1)
        return self.out(attended if rows is None else attended[rows])


class LlamaMLP:
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, build: Builder, config: ModelConfig, module: str) -> None:
        size = config.ffn_size
        kept = split_range(size, build.group.size, build.group.rank)
        parts = [Rows(f"{module}.gate_proj", size, kept), Rows(f"{module}.up_proj", size, kept)]
        self.gate_up = build.column(parts, config.hidden_size, config.mlp_bias)
        self.down = build.row(f"{module}.down_proj", config.hidden_size, size, kept, config.mlp_bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(ops.silu_mul(self.gate_up(x)))


class LlamaLayer:
    """Pre-norm attention and MLP. The residual stream is one tensor that every layer adds to in place."""

    def __init__(
        self, build: Builder, config: ModelConfig, heads: HeadSplit, module: str, index: int, layer: int
    ) -> None:
        size = (config.hidden_size,)
        self._eps = config.norm_eps
        self._attention_norm = build.tensor(f"{module}.input_layernorm.weight", size)
        self._attention = LlamaAttention(build, config, heads, f"{module}.self_attn", index, layer)
        self._mlp_norm = build.tensor(f"{module}.post_attention_layernorm.weight", size)
        self._mlp = LlamaMLP(build, config, f"{module}.mlp")

    def __call__(
        self,
        delta: Tensor | None,
        residual: Tensor,
        cos: Tensor,
        sin: Tensor,
        attn: AttentionContext,
        rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Adds `delta`, the previous layer's output, to `residual`; returns its own, not yet added, and the
        residual.

        Both have `rows` only, if that is given.
        """
        if delta is None:
            x = ops.rms_norm(residual, self._attention_norm, self._eps)
        else:
            x, _ = ops.add_rms_norm(delta, residual, self._attention_norm, self._eps)
        delta = self._attention(x, cos, sin, attn, rows)
        if rows is not None:
            residual = residual[rows]
        x, _ = ops.add_rms_norm(delta, residual, self._mlp_norm, self._eps)
        return self._mlp(x), residual

    def weights(self) -> LayerWeights | None:
        """For `decoder`; None if a product is not packed or its ranks have something to sum."""
        attention, mlp = self._attention, self._mlp
        qkv, out, gate_up, down = (
            layer.packed for layer in (attention.qkv, attention.out, mlp.gate_up, mlp.down)
        )
        if qkv is None or out is None or gate_up is None or down is None:
            return None
        return LayerWeights(
            self._attention_norm,
            self._mlp_norm,
            attention.q_norm,
            attention.k_norm,
            qkv,
            out,
            gate_up,
            down,
            attention.window,
        )


class LlamaModel:
    """See `Model`."""

    def __init__(self, config: ModelConfig, build: Builder, layers: range) -> None:
        assert config.rope is not None
        self.config, self.dtype, self.device = config, build.dtype, build.device
        self._stage = stage = Stage(config, layers)
        self.layers = layers
        self.heads = heads = HeadSplit.of(config, build.group)
        prefix = "" if build.weights.has("layers.0.input_layernorm.weight") else "model."
        vocab, size = config.vocab_size, config.hidden_size
        table_name = f"{prefix}embed_tokens.weight"
        self._embed = VocabParallelEmbedding(build, table_name, vocab, size) if stage.is_first else None
        self._rotary = RotaryTable(config.rope, config.head_dim, config.max_context, build.device)
        self._blocks = [
            LlamaLayer(build, config, heads, f"{prefix}layers.{layer}", index, layer)
            for index, layer in enumerate(layers)
        ]
        self._decoder = self._compiled()
        self._norm: Tensor | None = None
        self._head: ParallelLMHead | None = None
        if stage.is_last:
            self._norm = build.tensor(f"{prefix}norm.weight", (size,))
            tied = config.tie_embeddings
            shared = self._embed.table if tied and self._embed is not None else None
            self._head = ParallelLMHead(build, table_name if tied else "lm_head.weight", vocab, size, shared)

    @property
    def whole_layers(self) -> bool:
        """Are decode steps one call for all layers?"""
        return self._decoder is not None

    def _compiled(self) -> Decoder | None:
        """All blocks as one call, where that can be."""
        weights = [block.weights() for block in self._blocks]
        known = [layer for layer in weights if layer is not None]
        if len(known) < len(weights):
            return None
        heads = self.heads
        return decoder(
            known, DecoderShape(len(heads.query), len(heads.kv), heads.head_dim, self.config.norm_eps)
        )

    @torch.inference_mode()
    def forward(
        self, inputs: Tensor, positions: Tensor, attn: AttentionContext, rows: Tensor | None = None
    ) -> Tensor:
        """See `Model.forward`."""
        residual = inputs if self._embed is None else self._embed(inputs)
        cos, sin = self._rotary(positions)
        if self._decoder is not None and rows is None:
            step = attn.decode_rows()
            if step is not None:
                return self._decoder(residual, cos, sin, step)
        delta: Tensor | None = None
        last = self._blocks[-1]
        for block in self._blocks:
            delta, residual = block(delta, residual, cos, sin, attn, rows if block is last else None)
        assert delta is not None
        return residual.add_(delta)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See `Model.logits`."""
        self._stage.require_last()
        assert self._norm is not None
        assert self._head is not None
        return self._head(ops.rms_norm(hidden, self._norm, self.config.norm_eps))
