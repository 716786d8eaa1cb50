"""A LLaMA folder as a GGUF file without a vocabulary: what llama.cpp loads in `worker.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TENSORS = {  # of a layer: Hugging Face's name -> GGUF's
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, path: Path, dtype: str) -> None:
    """dtype: "fp32" or "bf16", of matrices; vectors stay in fp32. Raises `ValueError` for other families."""
    import gguf
    import torch
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"model_type={config['model_type']!r}: the llama.cpp peer takes 'llama'")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    width = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_rope_dimension_count(width)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_freq_base(_rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("none")
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(str(shard), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                tensor = tensors.get_tensor(name).to(torch.float32)
                ours = gguf_name(name)
                if ours.endswith(("attn_q.weight", "attn_k.weight")):
                    tensor = interleaved(tensor, heads if ours.endswith("attn_q.weight") else kv_heads)
                if tensor.ndim == 1 or dtype == "fp32":
                    writer.add_tensor(ours, tensor.numpy())
                else:
                    halves = tensor.to(torch.bfloat16).view(torch.uint8).numpy()
                    writer.add_tensor(ours, halves, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """Of one of Hugging Face's tensor names. Raises `ValueError` for one that a LLaMA does not have."""
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "output.weight",
        "model.norm.weight": "output_norm.weight",
    }
    if name in fixed:
        return fixed[name]
    parts = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    if len(parts) != 2 or parts[1] not in TENSORS:
        raise ValueError(f"tensor={name!r}: not one of a LLaMA")
    return f"blk.{parts[0]}.{TENSORS[parts[1]]}.weight"


def interleaved(weight: Any, heads: int) -> Any:
    """Rows of a head from [first halves, second halves] to pairs, as llama.cpp rotates them.

    weight: [heads * head_dim, hidden].
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2)
    return pairs.reshape(rows, columns).contiguous()


def _rope_theta(config: dict[str, Any]) -> float:
    rope = config.get("rope_parameters") or {}
    return float(config.get("rope_theta") or rope.get("rope_theta", 10000.0))
