"""CTranslate2 in `worker.py`."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

PATIENCE_S = 600.0


class NoTokenizer:
    """What CTranslate2's converter asks of a tokenizer, for a model that has none: tokens are numbers."""

    bos_token, eos_token, unk_token = "1", "2", "0"

    def __init__(self, size: int) -> None:
        self._size = size

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(self._size)}


class Engine:
    """`Generator.generate_batch` on one thread of execution, held between steps: its callback waits there.

    Sequences are of one length, so that the batch is never padded.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        import ctranslate2  # type: ignore[import-not-found,unused-ignore]

        class Converter(ctranslate2.converters.TransformersConverter):  # type: ignore[misc,unused-ignore]
            def load_tokenizer(self, *args: Any, **options: Any) -> NoTokenizer:
                return NoTokenizer(spec["vocab"])

        self._version = ctranslate2.__version__
        compute = {"fp32": "float32", "bf16": "bfloat16"}[spec["dtype"]]
        with tempfile.TemporaryDirectory() as folder:
            made = Converter(spec["model"]).convert(str(Path(folder) / "model"), quantization=compute)
            self._generator = ctranslate2.Generator(
                made, device="cpu", compute_type=compute, inter_threads=1, intra_threads=len(spec["cores"])
            )
        self._room = int(spec["room"])
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def describe(self) -> str:
        return f"CTranslate2 {self._version}, {self._generator.compute_type}"

    def prefill(self, prompt: list[int]) -> None:
        self._generate([prompt], 1, None)

    def start(self, prompts: list[list[int]]) -> None:
        self._stopping = False
        last = len(prompts) - 1

        def callback(result: Any) -> bool:
            if result.batch_id == last:
                self._done.release()
                self._go.acquire(timeout=PATIENCE_S)
            return self._stopping

        def run() -> None:
            try:
                self._generate(prompts, self._room, callback)
            except BaseException as error:
                self._error = error
                self._done.release()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        self._wait()

    def step(self) -> None:
        self._go.release()
        self._wait()

    def stop(self) -> None:
        self._stopping = True
        self._go.release()
        if self._thread is not None:
            self._thread.join(PATIENCE_S)
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)

    def _generate(self, prompts: list[list[int]], count: int, callback: Any) -> None:
        self._generator.generate_batch(
            [[str(token) for token in prompt] for prompt in prompts],
            max_length=count,
            min_length=count,
            include_prompt_in_result=False,
            max_batch_size=len(prompts),
            callback=callback,
        )

    def _wait(self) -> None:
        if not self._done.acquire(timeout=PATIENCE_S) or self._error is not None:
            raise RuntimeError(f"no step: {self._error!r}")
