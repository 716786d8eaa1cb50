"""A small LLaMA with random weights and a byte tokenizer, and transformers' greedy choices for it.

Weights are scaled so that logits spread over several units: greedy tokens are then decided by clear gaps, and
KV of another request, block or position shows at once.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<pad>", "<s>", "</s>")
VOCAB = len(SPECIALS) + 256
_TIE = 1e-4  # top-2 logits closer than this may change places by rounding


@dataclass(frozen=True)
class ModelSize:
    """Of the tiny model, unless something else is said."""

    hidden: int = 64
    ffn: int = 152
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    context: int = 512

    def config(self) -> dict[str, Any]:
        """`config.json` of the checkpoint."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "vocab_size": VOCAB,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "float32",
        }


TINY = ModelSize()


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint folder, and transformers' own computation of it."""

    folder: Path

    @cached_property
    def _reference(self) -> Any:
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype="float32")

    def greedy_mismatch(self, prompt: Sequence[int], tokens: Sequence[int]) -> int | None:
        """The first position of `tokens` at which transformers' greedy choice is another one by more than
        rounding; `None` if there is none. One pass over prompt and output.
        """
        import torch

        with torch.inference_mode():
            logits = self._reference(torch.tensor([[*prompt, *tokens]])).logits[0].float()
        logits = logits[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(list(tokens)).unsqueeze(1)).squeeze(1)
        gaps = (logits.max(dim=-1).values - chosen).tolist()
        return next((i for i, gap in enumerate(gaps) if gap >= _TIE), None)


def tiny_model(folder: Path, size: ModelSize = TINY, seed: int = 0) -> TinyModel:
    """Writes a model to `folder`."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, mean: float = 0.0, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale + mean

    hidden, ffn, kv = size.hidden, size.ffn, size.kv_heads * size.hidden // size.heads
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    tensors = {"model.embed_tokens.weight": normal(VOCAB, hidden, scale=0.15)}
    for layer in range(size.layers):
        at = f"model.layers.{layer}"
        for name, shape in shapes.items():
            tensors[f"{at}.{name}.weight"] = normal(*shape, scale=1.2 / shape[1] ** 0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = normal(hidden, mean=1.0, scale=0.1)
    tensors["model.norm.weight"] = normal(hidden, mean=1.0, scale=0.1)
    tensors["lm_head.weight"] = normal(VOCAB, hidden, scale=1.2 / hidden**0.5)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(size.config(), indent=2))
    _write_tokenizer(folder)
    return TinyModel(folder)


def random_prompt(length: int, rng: random.Random) -> list[int]:
    """Token ids without the special ones."""
    return [rng.randrange(len(SPECIALS), VOCAB) for _ in range(length)]


def _write_tokenizer(folder: Path) -> None:
    """One token per byte after the special ones."""
    tokens = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIALS[0],
        "bos_token": SPECIALS[1],
        "eos_token": SPECIALS[2],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
