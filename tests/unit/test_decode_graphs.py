"""Decode steps in padded batches over static buffers give the tokens of steps of just their size."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

from distserve.core.config import EngineConfig
from distserve.core.model_config import ModelConfig
from distserve.worker.decode_graphs import DecodeGraphs
from distserve.worker.executor import Executor, make_executor
from distserve.worker.step import LAST_SAMPLED, Joining, SamplingParams, StepInput, StepItem
from model_zoo import ZooModel, make_checkpoint, prompt

BLOCK = 16
OUTPUT = 12
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=3, top_p=0.9, logprobs=2),
    SamplingParams(temperature=1.1, seed=4, top_k=20, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingParams(min_tokens=4, end_ids=(9, 40)),
    SamplingParams(logprobs=1),
]
DEVICES = ["cpu:0", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def executor(model: ZooModel, **changes: object) -> Executor:
    values = {"instance": "t", "role": "unified", "model": str(model.folder), "num_blocks": 200, **changes}
    return make_executor(EngineConfig.load(values), ModelConfig.load(model.folder))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


Models = Callable[[str], ZooModel]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The zoo's models with heads of 16 channels, the smallest that the GPU's kernels take."""

    @cache
    def make(name: str) -> ZooModel:
        changes = {} if name == "opt" else {"head_dim": 16}
        return make_checkpoint(tmp_path_factory.mktemp("heads") / name, name, overrides=changes)

    return make


class Sequences:
    """Prompts whose tokens are known late: `lag` steps later than they are sampled."""

    def __init__(self, executor: Executor, count: int, greedy: bool) -> None:
        self.executor = executor
        self.tokens = [prompt(5 + 7 * i, seed=i) for i in range(count)]
        self.lens = [len(tokens) for tokens in self.tokens]
        self.computed = [0] * count
        free = list(range(executor.num_blocks))
        random.Random(1).shuffle(free)
        self.blocks = [[free.pop() for _ in range(8)] for _ in range(count)]
        self.params = [SamplingParams() if greedy else PARAMS[i % len(PARAMS)] for i in range(count)]
        self.logprobs: dict[tuple[int, int], object] = {}
        self.begun: list[list[int]] = []

    def prefill(self, which: list[int]) -> None:
        self.settle(0)
        items = [StepItem(str(i), self.tokens[i], 0, self.blocks[i]) for i in which]
        joining = [Joining(str(i), self.params[i], self.lens[i], list(self.tokens[i])) for i in which]
        for i in which:
            self.computed[i] = self.lens[i]
        self._submit(StepInput(items, joining), which)
        self.settle(0)

    def decode(self, which: list[int]) -> None:
        items = []
        for i in which:
            place = self.computed[i]
            token = self.tokens[i][place] if place < len(self.tokens[i]) else LAST_SAMPLED
            table = self.blocks[i][: -(-(place + 1) // BLOCK)]
            items.append(StepItem(str(i), [token], place, table))
            self.computed[i] += 1
        self._submit(StepInput(items), which)
        self.settle(self.executor.lag)

    def _submit(self, step: StepInput, which: list[int]) -> None:
        self.executor.submit(step)
        self.begun.append(list(which))

    def settle(self, most: int) -> None:
        while len(self.begun) > most:
            output = self.executor.collect(60.0)
            assert output is not None
            for i, token, logprobs in zip(self.begun.pop(0), output.tokens, output.logprobs, strict=True):
                self.tokens[i].append(token)
                self.logprobs[i, len(self.tokens[i])] = logprobs and (logprobs.top_ids, logprobs.chosen)


def run(sequences: Sequences) -> list[list[int]]:
    """Sequences join, leave and change places; the first has the longest output."""
    rng, count = random.Random(5), len(sequences.tokens)
    for first in range(0, count, 3):
        sequences.prefill(list(range(first, min(first + 3, count))))
        for _ in range(3):
            present = list(range(min(first + 3, count)))
            rng.shuffle(present)
            sequences.decode(present)
    left = list(range(count))
    for _ in range(OUTPUT):
        sequences.decode(left)
        if len(left) > 1:
            left.remove(rng.choice(left[1:]))
    sequences.settle(0)
    return sequences.tokens


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", ["llama-gqa-tied", "mistral", "opt"])
def test_padded_and_late_equals_just_its_size(models: Models, name: str, greedy: bool, device: str) -> None:
    """GQA, a sliding window, learned positions."""
    if device != "cpu:0" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model = models(name)
    plain = executor(model, decode_graphs=False, devices=[device])
    recorded = executor(model, decode_graphs=True, devices=[device], max_batch_size=11)
    assert (plain.lag, recorded.lag) == (0, 1)
    expected, actual = Sequences(plain, 11, greedy), Sequences(recorded, 11, greedy)
    assert run(actual) == run(expected)
    assert len(expected.tokens[0]) == 5 + 1 + 12 + OUTPUT
    assert actual.logprobs.keys() == expected.logprobs.keys()
    for place, want in expected.logprobs.items():
        got = actual.logprobs[place]
        assert (got is None) == (want is None)
        if isinstance(got, tuple) and isinstance(want, tuple):
            assert got[0] == want[0]
            assert got[1] == pytest.approx(want[1], abs=1e-4)


def test_attention_gets_tables_as_wide_as_the_longest_context_needs() -> None:
    seen: list[tuple[int, list[int]]] = []

    def body(
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        tables: torch.Tensor,
        lens: torch.Tensor,
    ) -> torch.Tensor:
        seen.append((tables.shape[1], slots.tolist()))
        for row, length in enumerate(lens.tolist()):
            assert tables[row, : -(-length // 4)].tolist() == table[: -(-length // 4)]
        return ids[:, None].float().expand(-1, 2)

    table, device = [7, 3, 9, 1, 8, 2, 6, 5], torch.device("cpu")
    graphs = DecodeGraphs(body, 3, 8, 4, 2, torch.float32, device, contexts=(8, 16))
    graphs.record()
    assert [(width, slots) for width, slots in seen if any(slot >= 0 for slot in slots)] == []
    assert {width for width, _ in seen} == {2, 4, 8}
    for place, width in ((0, 2), (7, 2), (8, 4), (15, 4), (16, 8), (31, 8)):
        seen.clear()
        hidden = graphs.run([StepItem("a", [place + 100], place, table), StepItem("b", [5], 0, table)])
        assert hidden.tolist() == [[place + 100.0] * 2, [5.0] * 2]
        ((found, slots),) = seen
        assert found == width
        assert slots == [table[place // 4] * 4 + place % 4, 28]


@pytest.mark.gpu2
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_ranks_record_their_collectives(models: Models) -> None:
    """Tensor-parallel steps are recorded with their sums; their tokens are read at once."""
    model = models("llama-gqa-tied")
    plain = executor(model, decode_graphs=False, devices=["cuda:0"])
    ranks = executor(model, decode_graphs=True, devices=["cuda:0", "cuda:1"], tp=2, max_batch_size=11)
    try:
        assert ranks.lag == 0
        assert run(Sequences(ranks, 11, greedy=True)) == run(Sequences(plain, 11, greedy=True))
    finally:
        ranks.close()


def test_graphs_are_the_default_on_gpus_alone_and_not_for_pipelines() -> None:
    from distserve.worker.runner import wants_graphs

    def wanted(device: str, **changes: object) -> bool:
        values = {"instance": "t", "role": "decode", "model": "m", **changes}
        return wants_graphs(EngineConfig.load(values), torch.device(device))

    assert wanted("cuda")
    assert not wanted("cpu")
    assert wanted("cpu", decode_graphs=True)
    assert not wanted("cuda", decode_graphs=False)
    assert not wanted("cuda", role="prefill")
    assert not wanted("cuda", pp=2, devices=["cuda:0", "cuda:1"])
    assert wanted("cuda", tp=2, devices=["cuda:0", "cuda:1"])


def test_one_token_of_a_prompt_that_goes_on_samples_nothing(models: Models) -> None:
    """A piece that chunked prefill has cut so short looks like a decode step."""
    for graphs in (False, True):
        recorded = executor(models("llama"), decode_graphs=graphs, devices=["cpu:0"], max_batch_size=4)
        tokens = prompt(3)
        join = [Joining("a", SamplingParams(), 3, tokens)]
        piece = StepInput([StepItem("a", tokens[:1], 0, [0], sample=False)], join)
        assert recorded.execute(piece).tokens == []
        assert len(recorded.execute(StepInput([StepItem("a", tokens[1:], 1, [0])])).tokens) == 1
        recorded.close()
