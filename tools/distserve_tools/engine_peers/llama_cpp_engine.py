"""llama.cpp in `worker.py`, through the C interface of llama-cpp-python."""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path
from typing import Any

UBATCH = 512  # prompt tokens of one computation, llama.cpp's default


class Engine:
    """Greedy decoding of several sequences in one unified KV cache, FlashAttention on.

    Weights in the dtype that is asked for; the KV cache in fp32 beside fp32 weights, else in fp16, which is
    llama.cpp's own.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        import llama_cpp  # type: ignore[import-not-found,unused-ignore]
        import numpy
        from llama_gguf import write_gguf  # type: ignore[import-not-found,unused-ignore]  # beside worker.py

        self._lib, self._numpy, self._dtype = llama_cpp, numpy, spec["dtype"]
        self._vocab = int(spec["vocab"])
        self._silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(Path(spec["model"]), path, spec["dtype"])
            options = llama_cpp.llama_model_default_params()
            options.use_mmap = False
            self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        if not self._model:
            raise RuntimeError("llama.cpp does not load the model")
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = spec["sequences"] + 1  # one to prefill into
        params.n_ctx = (spec["sequences"] + 1) * (spec["context"] + spec["room"])
        params.n_batch = max(UBATCH, spec["context"])
        params.n_ubatch = UBATCH
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = len(spec["cores"])
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        kind = llama_cpp.GGML_TYPE_F32 if spec["dtype"] == "fp32" else llama_cpp.GGML_TYPE_F16
        params.type_k = params.type_v = kind
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp makes no context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self._tokens: list[int] = []
        self._length = 0

    def describe(self) -> str:
        weights = f"{self._dtype} weights, KV in {'fp32' if self._dtype == 'fp32' else 'fp16'}"
        info = self._lib.llama_print_system_info().decode()
        return f"llama.cpp of llama-cpp-python {self._lib.__version__}, {weights}, FlashAttention; {info}"

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """entries: (token, position, sequence, logits wanted)."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
        status = self._lib.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def _next(self, index: int) -> int:
        """The most probable token by the logits of entry `index` of the last batch."""
        row = self._lib.llama_get_logits_ith(self._context, index)
        return int(self._numpy.ctypeslib.as_array(row, shape=(self._vocab,)).argmax())

    def _fill(self, prompt: list[int], sequence: int) -> int:
        last = len(prompt) - 1
        self._decode([(token, i, sequence, i == last) for i, token in enumerate(prompt)])
        return self._next(last)

    def prefill(self, prompt: list[int]) -> None:
        sequence = self._lib.llama_n_seq_max(self._context) - 1
        self._fill(prompt, sequence)
        self._lib.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def start(self, prompts: list[list[int]]) -> None:
        self._tokens = [self._fill(prompt, i) for i, prompt in enumerate(prompts)]
        self._length = len(prompts[0])

    def step(self) -> None:
        self._decode([(token, self._length, i, True) for i, token in enumerate(self._tokens)])
        self._tokens = [self._next(i) for i in range(len(self._tokens))]
        self._length += 1

    def stop(self) -> None:
        self._lib.llama_memory_clear(self._memory, True)
