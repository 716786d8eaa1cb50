"""The model runner over the Triton-language kernels: their wiring, and padded decode steps with empty rows.

With a CUDA device compiled (`pytest -m gpu`), without one in the interpreter, like `test_triton_kernels`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from test_decode_graphs import Sequences, executor

from distserve.worker import runner
from distserve.worker.executor import Executor
from model_zoo import make_checkpoint

pytestmark = pytest.mark.gpu

COUNT = 3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Where the kernels run; in the interpreter they are made to serve a CPU."""
    if torch.cuda.is_available():
        return "cuda:0"
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")
    from distserve_kernels.triton_lang.backend import TritonBackend
    from distserve_kernels.triton_lang.tiles import Chip

    chosen = runner.choose_backend

    def choose(device: object, dtype: object, dim: int, size: int, force: str | None) -> object:
        if force != "triton":
            return chosen(device, dtype, dim, size, force)  # type: ignore[arg-type]
        return TritonBackend(Chip("interpreter", 80, 4), tmp_path)

    monkeypatch.setattr(runner, "choose_backend", choose)
    return "cpu:0"


def tokens(executor: Executor) -> list[list[int]]:
    """Prompts together, two steps of all three in a batch padded to four, and one of one."""
    sequences = Sequences(executor, COUNT, greedy=True)
    sequences.prefill(list(range(COUNT)))
    for which in ([0, 1, 2], [2, 0, 1], [2]):
        sequences.decode(which)
    sequences.settle(0)
    return sequences.tokens


@pytest.mark.parametrize(
    "name", ["llama-gqa-tied", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mistral", "opt"))]
)
def test_tokens_are_those_of_plain_torch(name: str, device: str, tmp_path: Path) -> None:
    """GQA with rotary and store in one pass, a sliding window, and stores alone."""
    changes = {"num_hidden_layers": 1} | ({} if name == "opt" else {"head_dim": 16})
    model = make_checkpoint(tmp_path / "model", name, overrides=changes)
    common = {"devices": [device], "num_blocks": 24, "max_batch_size": 4}
    kernels = executor(model, attention_backend="triton", decode_graphs=True, **common)
    assert (kernels.attention, kernels.lag) == ("triton", 1)
    plain = executor(model, attention_backend="reference", decode_graphs=False, **common)
    assert tokens(kernels) == tokens(plain)
