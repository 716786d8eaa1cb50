"""One call for all layers of a decode step gives what the layers give one by one, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import model_zoo
from distserve.models.llama import LlamaModel
from distserve.models.registry import load_model
from distserve.worker.kv_cache import CacheShape, KVCache
from distserve.worker.parallel import ParallelGroup
from distserve.worker.runner import DecodeMeta, PagedAttention
from distserve_kernels import compiled
from distserve_kernels.backend import PrefillMeta, choose_backend
from distserve_kernels.cpu import CpuBackend
from distserve_kernels.decoder import DecodeRows
from model_zoo import Zoo

LLAMAS = [name for name in model_zoo.NAMES if not name.startswith(("opt", "gpt2"))]
BLOCK, BLOCKS, WIDTH = 16, 48, 4
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(compiled.library() is None, reason="no C compiler")


class LayerByLayer(CpuBackend):
    whole_layers = False


class Watched(PagedAttention):
    """Knows whether the batch was handed out as a whole."""

    taken = False

    def decode_rows(self) -> DecodeRows | None:
        found = super().decode_rows()
        self.taken = found is not None
        return found


def model_of(zoo: Zoo, name: str, dtype: torch.dtype = torch.float32) -> LlamaModel:
    model = load_model(zoo(name).folder, ParallelGroup(), None, dtype, "cpu")
    assert isinstance(model, LlamaModel)
    return model


def caches(model: LlamaModel, seed: int = 0) -> tuple[KVCache, KVCache]:
    """Two of the same random content: blocks are as full as a test wants them."""
    shape = CacheShape(len(model.layers), len(model.heads.kv), model.heads.head_dim, BLOCK, model.dtype)
    backend = choose_backend(CPU, model.dtype, model.heads.head_dim, BLOCK)
    pair = KVCache(backend, shape, BLOCKS, CPU), KVCache(backend, shape, BLOCKS, CPU)
    torch.manual_seed(seed)
    for page, copy in zip(pages(pair[0]), pages(pair[1]), strict=True):
        copy.copy_(page.normal_())
    return pair


def pages(cache: KVCache) -> list[torch.Tensor]:
    return [page for layer in range(cache.num_layers) for page in cache.pages(layer)]


def same(one: KVCache, other: KVCache) -> bool:
    return all(torch.equal(page, copy) for page, copy in zip(pages(one), pages(other), strict=True))


def step(
    model: LlamaModel, cache: KVCache, lengths: Sequence[int], whole: bool, empty: bool = False
) -> torch.Tensor:
    """Hidden states of a decode step of sequences of `lengths` tokens; with `empty` a row more, of none."""
    library = compiled.library()
    assert library is not None
    backend = (CpuBackend if whole else LayerByLayer)(library)
    lens = torch.tensor(lengths, dtype=torch.int32)
    tables = torch.arange(BLOCKS, dtype=torch.int32).view(-1, WIDTH)[: len(lengths)]
    positions = lens.long() - 1
    slots = tables.gather(1, (positions // BLOCK)[:, None])[:, 0].long() * BLOCK + positions % BLOCK
    ids = torch.arange(7, 7 + len(lengths))
    if empty:
        lens, tables = torch.cat((lens, lens.new_zeros(1))), torch.cat((tables, tables.new_zeros(1, WIDTH)))
        slots, positions = (torch.cat((slots, slots.new_tensor([-1]))), torch.cat((positions, ids[:1] * 0)))
        ids = torch.cat((ids, ids.new_zeros(1)))
    attention = Watched(backend, cache, slots, DecodeMeta(tables, lens), None)
    hidden = model.forward(ids, positions, attention)
    assert attention.taken == whole
    return hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LLAMAS)
def test_whole_layers_give_the_bits_of_single_ones(zoo: Zoo, name: str, dtype: torch.dtype) -> None:
    model = model_of(zoo, name, dtype)
    if not model.whole_layers:
        pytest.skip("the products of this CPU are not in C")
    ours, theirs = caches(model)
    # batches of every kind: one row, tiles of rows, scratch that grows and is larger than the step
    for lengths in ((5,), (64, 1, 17), (3, 33, 16, 48, 2, 9, 31, 64, 1, 20, 63, 12), (40, 6), (7,)):
        found, expected = step(model, ours, lengths, True), step(model, theirs, lengths, False)
        assert expected.float().std() > 0
        assert torch.equal(found, expected), lengths
    assert same(ours, theirs)


def test_rows_without_a_sequence_change_nothing(zoo: Zoo) -> None:
    model = model_of(zoo, "qwen3")
    if not model.whole_layers:
        pytest.skip("the products of this CPU are not in C")
    ours, theirs = caches(model)
    found = step(model, ours, (9, 30), True, empty=True)
    assert torch.equal(found, step(model, theirs, (9, 30), False, empty=True))
    assert torch.equal(found[:2], step(model, theirs, (9, 30), False))
    assert same(ours, theirs)


def test_another_pool_is_noticed(zoo: Zoo) -> None:
    model = model_of(zoo, "llama")
    if not model.whole_layers:
        pytest.skip("the products of this CPU are not in C")
    first, second = caches(model, 1), caches(model, 2)
    for ours, theirs in (first, second, first):
        assert torch.equal(step(model, ours, (20,), True), step(model, theirs, (20,), False))


def test_prompts_are_no_decode_rows() -> None:
    library = compiled.library()
    assert library is not None
    backend = CpuBackend(library)
    cache = KVCache(backend, CacheShape(1, 1, 16, BLOCK, torch.float32), 2, CPU)
    prompt = PrefillMeta.build([2], [0], [[0]], CPU)
    decode = DecodeMeta(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    for meta in (None, decode):
        assert PagedAttention(backend, cache, torch.zeros(2), meta, prompt).decode_rows() is None


class FirstOfTwo:
    """`Collectives` that nobody calls."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def allreduce(self, tensors: list[torch.Tensor]) -> object:
        raise AssertionError

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> object:
        raise AssertionError


def test_ranks_that_have_something_to_sum_go_layer_by_layer(zoo: Zoo) -> None:
    model = load_model(zoo("llama").folder, ParallelGroup(FirstOfTwo()), None, torch.float32, "cpu")
    assert isinstance(model, LlamaModel)
    assert not model.whole_layers
