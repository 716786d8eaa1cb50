"""GPT-2. Its linear weights lie transposed in the checkpoint (Conv1D: [inputs, outputs])."""

from __future__ import annotations

import dataclasses

from distserve.core.model_config import ModelConfig
from distserve.models.layers import Builder
from distserve.models.learned_positions import BlockNames, LearnedPositionModel, ModelNames

_BLOCK = BlockNames(
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    up="mlp.c_fc",
    down="mlp.c_proj",
)


def build_gpt2(config: ModelConfig, build: Builder, layers: range) -> LearnedPositionModel:
    """Some layers of a GPT-2 checkpoint (saved with or without its head)."""
    prefix = "" if build.weights.has("wte.weight") else "transformer."
    names = ModelNames(
        tokens=f"{prefix}wte.weight",
        positions=f"{prefix}wpe.weight",
        block=f"{prefix}h",
        names=_BLOCK,
        final_norm=f"{prefix}ln_f",
    )
    return LearnedPositionModel(config, dataclasses.replace(build, transposed=True), layers, names)
