"""The models that are measured: LLaMA shapes with random weights. Speeds are real, texts are not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from distserve.core.model_config import ModelConfig

_COMMON: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _shape(
    hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int, context: int, tied: bool
) -> dict[str, Any]:
    return {
        **_COMMON,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
    }


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": _shape(128, 384, 2, 4, 2, 512, 512, tied=False),
    "llama-1b": _shape(2048, 8192, 16, 32, 8, 128256, 40960, tied=True),  # Llama 3.2 1B
    "llama-8b": _shape(4096, 14336, 32, 32, 8, 128256, 40960, tied=False),  # Llama 3.1 8B
}


@dataclass(frozen=True)
class Load:
    """What is run on a model: decode batches, their contexts, and prompts, in tokens."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]


LOADS: Mapping[str, Load] = {
    "device": Load((1, 8, 64, 256), (512, 4096, 32768), (512, 2048, 8192)),
    "small": Load((1, 4), (32, 128), (64, 128)),
}
MODELS: Mapping[str, tuple[str, ...]] = {"device": ("llama-1b", "llama-8b"), "small": ("tiny",)}
ON_DISK: Mapping[str, str] = {"device": "llama-1b", "small": "tiny"}  # for what starts from a folder


class RandomWeights:
    """A `WeightSource` that makes tensors where they are wanted, without a file."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        torch.manual_seed(0)

    def has(self, name: str) -> bool:
        return name.startswith("model.")

    def read(
        self, name: str, shape: Sequence[int], rows: range | None = None, cols: range | None = None
    ) -> Tensor:
        """See `WeightSource.read`."""
        kept = [len(part) if part is not None else size for size, part in zip(shape, (rows, cols))]  # noqa: B905
        if "norm" in name:
            return torch.ones(kept, dtype=self._dtype, device=self._device)
        return torch.empty(kept, dtype=self._dtype, device=self._device).normal_(0.0, 0.02)


def model_config(name: str) -> ModelConfig:
    return ModelConfig.from_hf(SHAPES[name], name)


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of weights that a decode step reads: all but a token embedding that is not the head as well."""
    table = config.vocab_size * config.hidden_size
    return (config.param_count() - (0 if config.tie_embeddings else table)) * itemsize


def prefill_flops(config: ModelConfig, tokens: int) -> float:
    """Of a prompt: two per weight of the layers and token, the causal half of attention, and one row of
    logits.
    """
    layers = config.param_count() - config.embedding_params()
    attention = 2.0 * config.num_layers * config.q_size * tokens**2
    behind_attention = config.hidden_size * (config.q_size + 3 * config.ffn_size)  # output, gate, up, down
    skipped = 2.0 * behind_attention * (tokens - 1)  # in the last layer, where only the last token counts
    return 2.0 * layers * tokens + attention - skipped + 2.0 * config.vocab_size * config.hidden_size


def write_checkpoint(name: str, folder: Path, dtype: torch.dtype, device: torch.device) -> Path:
    """A Hugging Face folder of that shape: config.json, model.safetensors, a tokenizer of single bytes."""
    from safetensors.torch import save_file

    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config, weights = model_config(name), RandomWeights(device, dtype)
    tensors = {key: weights.read(key, shape).cpu() for key, shape in _tensors(config).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(dict(SHAPES[name]), indent=2))
    return folder


def _tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, ffn = config.hidden_size, config.ffn_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (config.q_size, hidden),
            f"{at}.self_attn.k_proj.weight": (config.kv_size, hidden),
            f"{at}.self_attn.v_proj.weight": (config.kv_size, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, config.q_size),
            f"{at}.mlp.gate_proj.weight": (ffn, hidden),
            f"{at}.mlp.up_proj.weight": (ffn, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, ffn),
            f"{at}.input_layernorm.weight": (hidden,),
            f"{at}.post_attention_layernorm.weight": (hidden,),
        }
    return shapes


def _save_tokenizer(folder: Path) -> None:
    """One token per byte, after the special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    make: Any = PreTrainedTokenizerFast  # untyped in transformers
    tokens = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = make(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder)
