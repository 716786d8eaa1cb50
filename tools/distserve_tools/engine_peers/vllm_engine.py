"""vLLM in `worker.py`."""

from __future__ import annotations

import os
from typing import Any


class Engine:
    """vLLM's engine stepped in this process: continuous batching, compiled model, its own defaults."""

    def __init__(self, spec: dict[str, Any]) -> None:
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_OMP_THREADS_BIND=",".join(map(str, spec["cores"])),
            VLLM_CPU_KVCACHE_SPACE="2",
            VLLM_NO_USAGE_STATS="1",
            VLLM_LOGGING_LEVEL="WARNING",
        )
        import vllm  # type: ignore[import-not-found,unused-ignore]

        self._vllm = vllm
        self._engine = vllm.LLM(
            spec["model"],
            dtype={"fp32": "float32", "bf16": "bfloat16"}[spec["dtype"]],
            skip_tokenizer_init=True,
            max_model_len=spec["context"] + spec["room"],
            max_num_batched_tokens=max(2048, spec["context"]),
            max_num_seqs=64,
            enable_prefix_caching=False,
        ).llm_engine
        self._room = int(spec["room"])
        self._names = 0
        self._running: list[str] = []

    def describe(self) -> str:
        return f"vLLM {self._vllm.__version__}, prefix caching off, else its defaults"

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        self._names += 1
        name = f"r{self._names}"
        params = self._vllm.SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def prefill(self, prompt: list[int]) -> None:
        self._add(prompt, 1)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def start(self, prompts: list[list[int]]) -> None:
        self._running = [self._add(prompt, self._room - 1) for prompt in prompts]
        produced: set[str] = set()
        while len(produced) < len(prompts):
            produced |= {out.request_id for out in self._engine.step() if out.outputs[0].token_ids}

    def step(self) -> None:
        self._engine.step()

    def stop(self) -> None:
        self._engine.abort_request(self._running)
        while self._engine.has_unfinished_requests():
            self._engine.step()
