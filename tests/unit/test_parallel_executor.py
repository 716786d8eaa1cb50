"""Executors over several processes: the tokens of one process, steps in flight, and lost or refused ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from distserve.core.config import EngineConfig
from distserve.core.model_config import ModelConfig
from distserve.core.parsing import ConfigError
from distserve.worker.executor import make_executor
from distserve.worker.parallel import RankLost
from distserve.worker.rank_executor import RankExecutor
from distserve.worker.step import Joining, SamplingParams, StepInput, StepItem, StepOutput
from model_zoo import Zoo, ZooModel, prompt

BLOCK = 16
GREEDY = SamplingParams()
ELABORATE = SamplingParams(
    temperature=0.8, top_p=0.9, seed=7, repetition_penalty=1.2, min_tokens=3, end_ids=(2, 9), logprobs=2
)


def config(model: ZooModel, **changes: Any) -> EngineConfig:
    ranks = changes.get("tp", 1) * changes.get("pp", 1)
    core = min(os.sched_getaffinity(0))
    values = {"instance": "t", "role": "unified", "model": str(model.folder), "num_blocks": 64}
    return EngineConfig.load({**values, "devices": [f"cpu:{core}"] * ranks, **changes})


def start(model: ZooModel, **changes: Any) -> RankExecutor:
    executor = make_executor(config(model, **changes), ModelConfig.load(model.folder))
    assert isinstance(executor, RankExecutor)
    return executor


class Sequence:
    """One sequence, with blocks of its own."""

    def __init__(self, key: str, length: int, params: SamplingParams, first_block: int) -> None:
        self.key, self.params = key, params
        self.tokens = prompt(length)
        self.computed = 0
        self.blocks = list(range(first_block, first_block + 8))

    def step(self) -> StepInput:
        new = self.tokens[self.computed :]
        joining = [Joining(self.key, self.params, len(new), list(new))] if not self.computed else []
        table = self.blocks[: -(-len(self.tokens) // BLOCK)]
        return StepInput([StepItem(self.key, new, self.computed, table)], joining)

    def take(self, output: StepOutput) -> StepOutput:
        self.computed = len(self.tokens)
        self.tokens += output.tokens
        return output


@pytest.fixture(scope="module")
def pipeline(zoo: Zoo) -> Iterator[RankExecutor]:
    """Two stages of the zoo's LLaMA; this process has the first."""
    executor = start(zoo("llama"), pp=2)
    yield executor
    executor.close()


def test_sampling_travels_to_the_rank_that_samples(zoo: Zoo, pipeline: RankExecutor) -> None:
    alone = make_executor(config(zoo("llama")), ModelConfig.load(zoo("llama").folder))
    outputs = []
    for executor in (alone, pipeline):
        sequence = Sequence("sampled", 21, ELABORATE, 0)
        outputs.append([sequence.take(executor.execute(sequence.step())) for _ in range(12)])
    for here, there in zip(*outputs, strict=True):
        assert here.tokens == there.tokens
        (mine,), (theirs,) = here.logprobs, there.logprobs
        assert mine is not None
        assert theirs is not None
        assert mine.top_ids == theirs.top_ids
        assert mine.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-4)
    pipeline.execute(StepInput([], leaving=["sampled"]))


def test_the_first_stage_goes_on_while_the_second_works(zoo: Zoo, pipeline: RankExecutor) -> None:
    news: list[float] = []
    pipeline.listen(lambda: news.append(time.monotonic()))
    a, b = Sequence("a", 40, GREEDY, 0), Sequence("b", 17, GREEDY, 8)
    assert pipeline.depth == 2
    rank = pipeline.ranks[0].process.pid
    os.kill(rank, signal.SIGSTOP)
    try:
        pipeline.submit(a.step())
        pipeline.submit(b.step())  # both stages have a step now
        assert pipeline.collect(0.1) is None
        assert not news
    finally:
        os.kill(rank, signal.SIGCONT)
    for _ in range(5):  # one collected, one submitted: two are always in flight
        for sequence in (a, b):
            output = pipeline.collect(20.0)
            assert output is not None
            sequence.take(output)
            pipeline.submit(sequence.step())
    for sequence in (a, b):
        output = pipeline.collect(20.0)
        assert output is not None
        sequence.take(output)
    assert pipeline.collect() is None
    assert len(news) == 12
    model = zoo("llama")
    for sequence, length in ((a, 40), (b, 17)):
        assert sequence.tokens[length:] == model.greedy(prompt(length), 6)
    pipeline.execute(StepInput([], leaving=["a", "b"]))


def test_the_smallest_rank_decides_the_size_of_the_pool(zoo: Zoo) -> None:
    model = zoo("llama")  # 3 layers: the first stage has two, so its blocks are twice as large
    executor = start(model, pp=2, num_blocks=None, kv_bytes=1 << 20)
    try:
        block_bytes = executor.kv_cache.shape.block_bytes
        assert executor.num_blocks == executor.kv_cache.num_blocks == (1 << 20) // block_bytes
        assert executor.kv_cache.num_layers == 2
    finally:
        executor.close()


def test_a_rank_that_dies_is_reported_and_all_end(zoo: Zoo) -> None:
    executor = start(zoo("llama-gqa-tied"), tp=2)
    try:
        sequence = Sequence("a", 20, GREEDY, 0)
        expected = zoo("llama-gqa-tied").greedy(prompt(20), 2)
        assert [sequence.take(executor.execute(sequence.step())).tokens[0] for _ in range(2)] == expected
        executor.ranks[0].process.kill()
        with pytest.raises(RankLost, match="rank 1 has ended with signal SIGKILL"):
            executor.execute(sequence.step())
        with pytest.raises(RankLost, match="rank 1 has ended with signal SIGKILL"):
            executor.collect()
    finally:
        executor.close()
    assert executor.ranks[0].process.returncode == -signal.SIGKILL


def test_a_step_that_fails_on_another_rank_says_why(zoo: Zoo) -> None:
    executor = start(zoo("llama"), pp=2)
    try:
        item = StepItem("unknown", prompt(5), 0, [0])  # has not joined: the sampling rank refuses
        with pytest.raises(RankLost, match="rank 1: KeyError: 'unknown'"):
            executor.execute(StepInput([item]))
    finally:
        executor.close()


def test_degrees_that_the_model_does_not_allow_are_refused_by_name(zoo: Zoo) -> None:
    for changes, message in (
        ({"tp": 3}, "tp=3: with 2 KV heads allowed are 1 to 2 and multiples of 2"),
        ({"pp": 4}, "pp=4: the model has 3 layers; allowed: 1 to 3"),
        ({"tp": 2, "devices": ["cpu:0", "cuda:0"]}, r"devices=\['cpu:0', 'cuda:0'\]: must be of one kind"),
    ):
        with pytest.raises(ConfigError, match=message):
            start(zoo("llama-gqa-tied"), **changes)


def test_what_another_rank_refuses_is_a_refusal(zoo: Zoo) -> None:
    core = min(os.sched_getaffinity(0))
    with pytest.raises(ConfigError, match=r"rank 1: .*no core 4096"):
        start(zoo("llama"), pp=2, devices=[f"cpu:{core}", "cpu:4096"])
