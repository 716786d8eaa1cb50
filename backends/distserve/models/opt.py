"""OPT (arXiv 2205.01068), with the 350m variant: post-norm, a narrower embedding, no final norm."""

from __future__ import annotations

from distserve.core.model_config import ModelConfig
from distserve.models.layers import Builder
from distserve.models.learned_positions import BlockNames, LearnedPositionModel, ModelNames

_POSITION_OFFSET = 2  # the table's first rows were for padding

_BLOCK = BlockNames(
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.out_proj",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    up="fc1",
    down="fc2",
)


def build_opt(config: ModelConfig, build: Builder, layers: range) -> LearnedPositionModel:
    """Some layers of an OPT checkpoint (saved with or without its head)."""
    prefix = "decoder." if build.weights.has("decoder.embed_tokens.weight") else "model.decoder."
    projected = config.embed_dim is not None
    names = ModelNames(
        tokens=f"{prefix}embed_tokens.weight",
        positions=f"{prefix}embed_positions.weight",
        block=f"{prefix}layers",
        names=_BLOCK,
        final_norm=f"{prefix}final_layer_norm" if config.norm_first else None,
        project_in=f"{prefix}project_in" if projected else None,
        project_out=f"{prefix}project_out" if projected else None,
    )
    return LearnedPositionModel(config, build, layers, names, _POSITION_OFFSET)
