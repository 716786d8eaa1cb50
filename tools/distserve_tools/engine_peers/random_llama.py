"""A LLaMA with random weights as a Hugging Face folder: speeds are real, texts are not."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

VOCAB = 32000

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def random_llama(folder: Path) -> Path:
    """The model of 125 million parameters at `folder`, made if it is not there. Returns `folder`."""
    if (folder / "config.json").exists():
        return folder
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    hidden, ffn, kv = 768, 2048, 4 * 64
    shapes = {"model.embed_tokens": (VOCAB, hidden), "lm_head": (VOCAB, hidden)}
    for layer in range(12):
        at = f"model.layers.{layer}"
        shapes |= {
            f"{at}.self_attn.q_proj": (hidden, hidden),
            f"{at}.self_attn.k_proj": (kv, hidden),
            f"{at}.self_attn.v_proj": (kv, hidden),
            f"{at}.self_attn.o_proj": (hidden, hidden),
            f"{at}.mlp.gate_proj": (ffn, hidden),
            f"{at}.mlp.up_proj": (ffn, hidden),
            f"{at}.mlp.down_proj": (hidden, ffn),
        }
    tensors = {f"{name}.weight": torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    norms = [f"model.layers.{i}.{n}_layernorm" for i in range(12) for n in ("input", "post_attention")]
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in [*norms, "model.norm"]}
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
        (made / "config.json").write_text(json.dumps(CONFIG, indent=2))
        os.replace(made, folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder
