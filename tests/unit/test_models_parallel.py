"""Tensor-parallel slices, joined by Gloo groups between threads, compute what the whole model computes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo

import model_zoo
from dense_attention import DenseAttention
from distserve.core.model_config import ModelConfig
from distserve.core.parsing import ConfigError
from distserve.models.loader import Checkpoint
from distserve.models.registry import build_model, load_model
from distserve.worker.parallel import ParallelGroup
from model_zoo import Zoo

T = TypeVar("T")
LENGTH = 40


def on_ranks(size: int, work: Callable[[ParallelGroup], T]) -> list[T]:
    """Runs `work` once per rank, each in a thread of its own; results by rank."""
    store = HashStore()

    def rank(index: int) -> T:
        return work(ParallelGroup(ProcessGroupGloo(store, index, size, timedelta(seconds=30))))

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank, index) for index in range(size)]
        return [f.result(timeout=60) for f in futures]


# uneven heads, FFN and vocabulary (3 ranks, 4 heads; a prime vocabulary); replicated KV heads (gqa on 4)
@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("llama", 2),
        ("llama-biased", 3),
        ("llama-gqa-tied", 2),
        ("llama-gqa-tied", 4),
        ("qwen3", 4),
        ("opt", 3),
        ("opt-350m", 2),
        ("gpt2", 2),
        ("gpt2", 4),
    ],
)
def test_every_rank_has_the_logits_of_one_process(zoo: Zoo, name: str, tp: int) -> None:
    checkpoint, tokens = zoo(name), model_zoo.prompt(LENGTH)

    def logits(group: ParallelGroup) -> torch.Tensor:
        model = load_model(checkpoint.folder, group, None, torch.float32, "cpu")
        hidden = model.forward(torch.tensor(tokens), torch.arange(LENGTH), DenseAttention())
        return model.logits(hidden)

    for found in on_ranks(tp, logits):
        torch.testing.assert_close(found, checkpoint.logits(tokens), atol=1e-4, rtol=0)


def test_tensor_and_pipeline_parallel_together(zoo: Zoo) -> None:
    checkpoint, tokens = zoo("llama-gqa-tied"), model_zoo.prompt(LENGTH)
    ids, positions = torch.tensor(tokens), torch.arange(LENGTH)

    def logits(group: ParallelGroup) -> torch.Tensor:
        first, last = (
            load_model(checkpoint.folder, group, layers, torch.float32, "cpu")
            for layers in (range(0, 2), range(2, 3))
        )
        hidden = first.forward(ids, positions, DenseAttention())
        return last.logits(last.forward(hidden, positions, DenseAttention()))

    for found in on_ranks(2, logits):
        torch.testing.assert_close(found, checkpoint.logits(tokens), atol=1e-4, rtol=0)


def test_bf16_is_summed_over_ranks(zoo: Zoo) -> None:
    checkpoint, tokens = zoo("llama"), model_zoo.prompt(LENGTH)

    def logits(group: ParallelGroup) -> torch.Tensor:
        model = load_model(checkpoint.folder, group, None, torch.bfloat16, "cpu")
        hidden = model.forward(torch.tensor(tokens), torch.arange(LENGTH), DenseAttention())
        return model.logits(hidden)

    one, other = on_ranks(2, logits)
    assert torch.equal(one, other)
    assert (one - checkpoint.logits(tokens)).abs().max() < 0.2


class CountingWeights:
    """A checkpoint that counts the values read from it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.has = checkpoint.has
        self.values = 0

    def read(
        self, name: str, shape: tuple[int, ...], rows: range | None = None, cols: range | None = None
    ) -> torch.Tensor:
        tensor = self._checkpoint.read(name, shape, rows, cols)
        self.values += tensor.numel()
        return tensor


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_rank_reads_its_slice_only(zoo: Zoo, name: str) -> None:
    folder = zoo(name).folder
    config = ModelConfig.load(folder)

    def count(group: ParallelGroup) -> int:
        with Checkpoint(folder) as checkpoint:
            weights = CountingWeights(checkpoint)
            build_model(config, group, None, torch.float32, "cpu", weights)
        return weights.values

    whole = count(ParallelGroup())
    parts = on_ranks(4, count)
    assert max(parts) < 0.36 * whole  # norms, biases and GPT-2's positions are on every rank
    assert sum(parts) < 1.4 * whole


def test_head_counts_that_can_not_be_split_are_refused_by_name(zoo: Zoo) -> None:
    folder = zoo("llama-gqa-tied").folder

    def refused(group: ParallelGroup) -> str:
        with pytest.raises(ConfigError) as error:
            load_model(folder, group, None, torch.float32, "cpu")
        return str(error.value)

    message = "tp=3: with 2 KV heads allowed are 1 to 2 and multiples of 2"
    assert on_ranks(3, refused) == [message] * 3


def test_group_of_one_passes_tensors_through() -> None:
    group, x = ParallelGroup(), torch.arange(6.0).reshape(2, 3)
    assert (group.rank, group.size) == (0, 1)
    assert group.all_reduce(x) is x
    assert group.all_gather(x, [3]) is x


def test_slices_of_different_widths_are_joined_in_order() -> None:
    widths = [3, 0, 2]

    def gather(group: ParallelGroup) -> torch.Tensor:
        mine = torch.full((2, widths[group.rank]), float(group.rank))
        return group.all_gather(mine, widths)

    for found in on_ranks(3, gather):
        assert found.tolist() == [[0.0, 0.0, 0.0, 2.0, 2.0]] * 2
