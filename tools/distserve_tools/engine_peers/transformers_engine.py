"""Hugging Face transformers in `worker.py`."""

from __future__ import annotations

from typing import Any


class Engine:
    """Hugging Face transformers as `generate` runs it: SDPA attention, DynamicCache, arg max."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import torch
        import transformers

        self._torch, self._version = torch, transformers.__version__
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[spec["dtype"]]
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model: Any = load(spec["model"], dtype=dtype, attn_implementation="sdpa")
        self._model.train(False)
        torch.set_grad_enabled(False)
        self._cache: Any = None
        self._ids: Any = None

    def describe(self) -> str:
        return f"transformers {self._version}, sdpa, DynamicCache"

    def _forward(self, ids: Any, cache: Any) -> tuple[Any, Any]:
        with self._torch.inference_mode():
            out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values

    def prefill(self, prompt: list[int]) -> None:
        self._forward(self._torch.tensor([prompt]), None)

    def start(self, prompts: list[list[int]]) -> None:
        self._ids, self._cache = self._forward(self._torch.tensor(prompts), None)

    def step(self) -> None:
        self._ids, self._cache = self._forward(self._ids, self._cache)
        self._ids.tolist()

    def stop(self) -> None:
        self._cache = self._ids = None
