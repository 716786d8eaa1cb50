"""Small random checkpoints of every supported family, made with transformers, and the logits it computes
for them.

Weights are scaled so that logits spread over several units: greedy tokens are then decided by clear gaps,
and an error in any layer shows. Everything is deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>", "<|user|>", "<|assistant|>", "<|end|>")
VOCAB = len(SPECIALS) + 256  # 263, a prime: no split over ranks is even
CONTEXT = 256

_LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 151,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_OPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "ffn_dim": 150,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "word_embed_proj_dim": 64,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": CONTEXT,
    "bos_token_id": 2,
    "eos_token_id": 2,
}


def _configs() -> dict[str, transformers.PretrainedConfig]:
    t = transformers
    gqa = {**_LLAMA, "num_attention_heads": 8, "num_key_value_heads": 2}
    return {
        "llama": t.LlamaConfig(**_LLAMA),
        "llama-gqa-tied": t.LlamaConfig(**{**gqa, "tie_word_embeddings": True}),
        "llama-biased": t.LlamaConfig(**_LLAMA, attention_bias=True, mlp_bias=True),
        "llama3-rope": t.LlamaConfig(**gqa, rope_parameters=_LLAMA3_ROPE),
        "llama-linear-rope": t.LlamaConfig(
            **_LLAMA, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
        ),
        "qwen2": t.Qwen2Config(**gqa),
        "qwen2-window": t.Qwen2Config(**gqa, use_sliding_window=True, sliding_window=8, max_window_layers=1),
        "qwen3": t.Qwen3Config(**gqa, head_dim=24),
        "mistral": t.MistralConfig(**gqa, sliding_window=8),
        "opt": t.OPTConfig(**_OPT),
        "opt-350m": t.OPTConfig(**{**_OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
        "gpt2": t.GPT2Config(**_GPT2),
    }


NAMES: tuple[str, ...] = tuple(_configs())


@dataclass(frozen=True)
class ZooModel:
    """A checkpoint folder and transformers' own model of it (fp32, eval)."""

    name: str
    folder: Path
    reference: PreTrainedModel

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """What transformers computes at every position: fp32 [len(tokens), VOCAB]."""
        out: torch.Tensor = self.reference(torch.tensor([tokens])).logits[0]
        return out.float()

    @torch.inference_mode()
    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The next `count` greedy tokens by transformers, end tokens not minded."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


class Zoo:
    """Makes a model when it is first asked for, and keeps it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[str, ZooModel] = {}

    def __call__(self, name: str) -> ZooModel:
        if name not in self._models:
            self._models[name] = make_checkpoint(self._folder / name, name)
        return self._models[name]


def make_checkpoint(
    folder: Path, name: str, max_shard_size: str = "5GB", overrides: Mapping[str, Any] | None = None
) -> ZooModel:
    """A random checkpoint of the zoo's model `name`, with config values replaced by `overrides`."""
    config = _configs()[name]
    for key, value in (overrides or {}).items():
        setattr(config, key, value)
    torch.manual_seed(sum(map(ord, name)))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    _randomise(model)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    _save_tokenizer(folder)
    return ZooModel(name, folder, model)


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    """Fresh weights, norms and biases included: transformers' own start leaves these at 0 and 1."""
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.normal_(1.0 if "norm" in name or "ln_" in name else 0.0, 0.1)
            if name.endswith("bias"):
                weight.normal_(0.0, 0.1)
        elif "embed" in name or "wte" in name or "wpe" in name:  # 0.15: a tied head then repeats no tokens
            weight.normal_(0.0, 0.15)
        else:
            weight.normal_(0.0, 1.2 / weight.shape[-1 if "gpt2" not in model.config.model_type else 0] ** 0.5)


def _save_tokenizer(folder: Path) -> None:
    """One token per byte after the special ones, with a chat template."""
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    fast.add_special_tokens({"additional_special_tokens": list(SPECIALS[4:])})
    fast.save_pretrained(folder)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids without the zoo's special ones."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(len(SPECIALS), VOCAB, (length,), generator=generator).tolist()
