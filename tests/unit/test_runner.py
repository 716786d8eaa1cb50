"""The runner over the paged cache against transformers: token for token, in any batch, whole or in chunks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from distserve.core.config import EngineConfig
from distserve.core.model_config import ModelConfig
from distserve.core.parsing import ConfigError
from distserve.worker.device import bind_device, parse_device
from distserve.worker.executor import Executor, LocalExecutor, make_executor
from distserve.worker.kv_cache import pool_blocks
from distserve.worker.step import Joining, SamplingParams, StepInput, StepItem
from model_zoo import Zoo, ZooModel, prompt

BLOCK = 16
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1, 70]
OUTPUT = 20


def config(model: ZooModel, **changes: object) -> EngineConfig:
    values = {"instance": "test", "role": "unified", "model": str(model.folder), "num_blocks": 100, **changes}
    return EngineConfig.load(values)


def executor(model: ZooModel, **changes: object) -> Executor:
    return make_executor(config(model, **changes), ModelConfig.load(model.folder))


class Sequences:
    """Drives an executor as the engine does, with blocks handed out in random order."""

    def __init__(self, executor: Executor, prompts: list[list[int]], params: list[SamplingParams]) -> None:
        self.executor = executor
        self.tokens = [list(p) for p in prompts]
        self.prompt_lens = [len(p) for p in prompts]
        self.computed = [0] * len(prompts)
        free = list(range(executor.num_blocks))
        random.Random(0).shuffle(free)
        self.blocks = [[free.pop() for _ in range(math.ceil((len(p) + OUTPUT + 1) / BLOCK))] for p in prompts]
        self.joining = [
            Joining(str(i), s, len(p), list(p)) for i, (p, s) in enumerate(zip(prompts, params, strict=True))
        ]

    def step(self, counts: dict[int, int]) -> None:
        """Computes so many further tokens of each of these sequences, in the order given."""
        items = []
        for i, n in counts.items():
            start = self.computed[i]
            new = self.tokens[i][start : start + n]
            items.append(StepItem(str(i), new, start, self.blocks[i], start + n == len(self.tokens[i])))
        joining, self.joining = self.joining, []
        sampled = iter(self.executor.execute(StepInput(items, joining)).tokens)
        for i, n in counts.items():
            self.computed[i] += n
            if self.computed[i] == len(self.tokens[i]):
                self.tokens[i].append(next(sampled))
        assert next(sampled, None) is None

    def decode(self, until: int) -> None:
        while any(self.produced(i) < until for i in range(len(self.tokens))):
            self.step({i: 1 for i in range(len(self.tokens)) if self.produced(i) < until})

    def produced(self, i: int) -> int:
        return len(self.tokens[i]) - self.prompt_lens[i]

    def output(self, i: int) -> list[int]:
        return self.tokens[i][self.prompt_lens[i] :]


def check_greedy(model: ZooModel, start: list[int], output: list[int]) -> None:
    """`output` is what transformers chooses; a step whose two best logits are within 1e-4 is excused."""
    logits = model.logits([*start, *output])[len(start) - 1 : -1]
    best = logits.topk(2).values
    for step, token in enumerate(output):
        if best[step, 0] - best[step, 1] > 1e-4:
            assert token == int(logits[step].argmax()), f"prompt of {len(start)}, output token {step}"


@pytest.fixture(scope="module")
def model(zoo: Zoo) -> ZooModel:
    return zoo("llama-gqa-tied")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", [None, "sdpa", "reference"])
def test_batch_of_eight_equals_transformers(model: ZooModel, backend: str | None) -> None:
    prompts = [prompt(n, seed=1) for n in LENGTHS]
    sequences = Sequences(executor(model, attention_backend=backend), prompts, [SamplingParams()] * 8)
    sequences.step({i: len(p) for i, p in enumerate(prompts)})
    sequences.decode(OUTPUT)
    for i, start in enumerate(prompts):
        check_greedy(model, start, sequences.output(i))


@pytest.mark.parametrize("length", LENGTHS)
def test_alone_equals_transformers(model: ZooModel, length: int) -> None:
    start = prompt(length, seed=1)
    sequences = Sequences(executor(model), [start], [SamplingParams()])
    sequences.step({0: length})
    sequences.decode(OUTPUT)
    check_greedy(model, start, sequences.output(0))


@pytest.mark.parametrize("graphs", [False, True])
def test_warming_up_leaves_nothing_behind(model: ZooModel, graphs: bool) -> None:
    warm = LocalExecutor(config(model, decode_graphs=graphs), ModelConfig.load(model.folder))
    warm._runner.warm_up()
    assert len(warm._runner._sampler) == 0
    start = prompt(40, seed=1)
    sequences = Sequences(warm, [start], [SamplingParams()])
    sequences.step({0: len(start)})
    sequences.decode(OUTPUT)
    check_greedy(model, start, sequences.output(0))


@pytest.mark.parametrize("name", ["mistral", "qwen3", "opt", "gpt2"])
def test_other_families(zoo: Zoo, name: str) -> None:
    """Sliding window, norms on q and k, learned positions."""
    other = zoo(name)
    prompts = [prompt(n, seed=2) for n in (5, 40)]
    sequences = Sequences(executor(other), prompts, [SamplingParams()] * 2)
    sequences.step({0: 5, 1: 40})
    sequences.decode(OUTPUT)
    for i, start in enumerate(prompts):
        check_greedy(other, start, sequences.output(i))


@pytest.mark.parametrize("chunk", [1, 7, BLOCK, 50])
def test_chunks_equal_whole_prompts(model: ZooModel, chunk: int) -> None:
    """Chunks of one prompt run while another decodes; both texts are those of whole prompts."""
    prompts = [prompt(70, seed=3), prompt(33, seed=3)]
    params = [SamplingParams(), SamplingParams(temperature=1.0, seed=3)]
    whole = Sequences(executor(model), prompts, params)
    whole.step({0: 70, 1: 33})
    whole.decode(OUTPUT)
    parts = Sequences(executor(model), prompts, params)
    parts.step({1: 33})
    while parts.computed[0] < 70 and parts.produced(1) < OUTPUT:
        parts.step({0: min(chunk, 70 - parts.computed[0]), 1: 1})
    while parts.computed[0] < 70:
        parts.step({0: min(chunk, 70 - parts.computed[0])})
    parts.decode(OUTPUT)
    assert [parts.output(i)[:OUTPUT] for i in (0, 1)] == [whole.output(i)[:OUTPUT] for i in (0, 1)]


def test_sampled_text_does_not_depend_on_the_batch(model: ZooModel) -> None:
    prompts = [prompt(n, seed=4) for n in LENGTHS]
    params = [
        SamplingParams(temperature=0.5 + 0.1 * i, seed=i, top_p=0.9 if i % 2 else 1.0, repetition_penalty=1.1)
        for i in range(8)
    ]
    together = Sequences(executor(model), prompts, params)
    together.step({i: n for i, n in enumerate(LENGTHS)})
    together.decode(OUTPUT)
    for i in (0, 3, 7):
        alone = Sequences(executor(model), [prompts[i]], [params[i]])
        alone.step({0: LENGTHS[i]})
        alone.decode(OUTPUT)
        assert alone.output(0) == together.output(i)


def test_order_of_items_and_partial_sampling(model: ZooModel) -> None:
    """Outputs come in the caller's order, for the items that sample only."""
    prompts = [prompt(9, seed=5), prompt(20, seed=5), prompt(30, seed=5)]
    sequences = Sequences(executor(model), prompts, [SamplingParams()] * 3)
    sequences.step({2: 10, 0: 9})  # a chunk that does not sample, before one that does
    sequences.step({1: 20, 0: 1, 2: 20})
    sequences.decode(OUTPUT)
    for i, start in enumerate(prompts):
        check_greedy(model, start, sequences.output(i))
    assert sequences.executor.execute(StepInput([])).tokens == []


def test_bf16_stays_close(model: ZooModel) -> None:
    """Most greedy tokens of a short output agree; bf16 may flip near ties."""
    start = prompt(40, seed=6)
    sequences = Sequences(executor(model, dtype="bf16"), [start], [SamplingParams(logprobs=1)])
    sequences.step({0: 40})
    sequences.decode(OUTPUT)
    logits = model.logits([*start, *sequences.output(0)])[len(start) - 1 : -1]
    gaps = logits.amax(-1) - logits[torch.arange(OUTPUT), sequences.output(0)]
    assert float(gaps.max()) < 0.2


@pytest.mark.parametrize("name", ["cpu:0", "cpu:0-1", "cpu:1,0", "cuda:3"])
def test_device_names(name: str) -> None:
    device = parse_device(name)
    want = {"cpu:0": (0,), "cpu:0-1": (0, 1), "cpu:1,0": (0, 1), "cuda:3": ()}[name]
    assert device.cores == want
    assert device.torch_device == torch.device("cuda:3" if name == "cuda:3" else "cpu")


@pytest.mark.parametrize("name", ["cpu", "cpu:", "cpu:1-0", "cpu:x", "cuda:0-1", "tpu:0", "cpu:-1"])
def test_device_names_that_are_none(name: str) -> None:
    with pytest.raises(ConfigError, match="must be 'cpu:N'"):
        parse_device(name)


def test_a_core_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no core 4095"):
        bind_device(parse_device("cpu:4095"))


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [({"num_blocks": 7}, 7), ({"kv_bytes": 1050}, 10), ({}, 50), ({"max_batch_size": 2}, 8)],
)
def test_pool_sizes(sizes: dict[str, int], blocks: int, tmp_path: Path) -> None:
    values = {"instance": "i", "role": "decode", "model": str(tmp_path), **sizes}
    assert pool_blocks(EngineConfig.load(values), 100, 64, torch.device("cpu"), free=10_000) == blocks


@pytest.mark.parametrize("sizes", [{"num_blocks": 101}, {"kv_bytes": 99}, {"kv_bytes": 20_000}])
def test_pools_that_do_not_fit(sizes: dict[str, int], tmp_path: Path) -> None:
    values = {"instance": "i", "role": "decode", "model": str(tmp_path), **sizes}
    with pytest.raises(
        ConfigError, match=r"num_blocks=101: needs|kv_bytes=99: not one|kv_bytes=20000: needs"
    ):
        pool_blocks(EngineConfig.load(values), 100, 64, torch.device("cpu"), free=10_000)
