"""`distserve profile`: what the sweep asks of an executor, and a profile of a tiny real model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from distserve.core.config import EngineConfig
from distserve.core.model_config import ModelConfig
from distserve.core.parsing import ConfigError
from distserve.worker.executor import Executor, LocalExecutor
from distserve.worker.step import LAST_SAMPLED, StepInput, StepItem, StepOutput
from distserve_planner.models_catalog import model_dimensions
from distserve_planner.profile_file import Profile
from distserve_tools import profile_engine
from distserve_tools.engine_sweep import EngineSweep, SweepPlan
from distserve_tools.transfer_sweep import TransferPeers, fit_link, measure_transfer

PLAN = SweepPlan(
    lengths=(4, 20), prompts=(1, 3), max_prefill_tokens=40, batches=(1, 5), contexts=(3, 33), repeats=2
)


class RecordingExecutor:
    """Keeps the steps and checks that every sequence joins before it runs and leaves once."""

    num_blocks = 32
    lag = 0

    def __init__(self) -> None:
        self.steps: list[StepInput] = []
        self.present: set[str] = set()

    def execute(self, step: StepInput) -> StepOutput:
        self.present |= {j.key for j in step.joining}
        assert {item.key for item in step.items} <= self.present
        assert set(step.leaving) <= self.present
        self.present -= set(step.leaving)
        if step.items:
            self.steps.append(step)
        return StepOutput([0] * len(step.items), [None] * len(step.items))

    def close(self) -> None:
        self.steps.clear()


def sweep(executor: RecordingExecutor, plan: SweepPlan = PLAN, block_size: int = 8) -> EngineSweep:
    model: ModelConfig = model_dimensions("opt-125m")
    return EngineSweep(cast(Executor, executor), model, plan, block_size)


def test_points_fit_context_and_pool() -> None:
    assert PLAN.prefill_points(2048, 256) == [(4, 1), (4, 3), (20, 1)]
    assert PLAN.prefill_points(10, 256) == [(4, 1), (4, 3)]
    assert PLAN.decode_points(2048, 256) == [(1, 3), (1, 33), (5, 3), (5, 33)]
    assert PLAN.decode_points(2048, 100) == [(1, 3), (1, 33), (5, 3)]


def test_prefill_steps_compute_whole_prompts_on_blocks_of_their_own() -> None:
    executor, ticks = RecordingExecutor(), []
    points = sweep(executor).prefill([(4, 3), (20, 1)], lambda: ticks.append(1))
    assert [(p.tokens, p.sum_sq, p.requests) for p in points] == [(12, 48, 3), (20, 400, 1)]
    assert all(p.seconds > 0 for p in points)
    assert len(ticks) == 2
    assert len(executor.steps) == 2 * 3  # one that is not counted, then the repeats
    assert not executor.present
    for step in executor.steps:
        used = [block for item in step.items for block in item.block_table]
        assert len(used) == len(set(used))
        assert all(item.start == 0 and item.sample for item in step.items)
        assert all(len(item.block_table) * 8 >= len(item.tokens) for item in step.items)


def test_pieces_compute_behind_what_lies_before_them_with_and_without_a_token() -> None:
    executor, ticks = RecordingExecutor(), []
    plan = SweepPlan(pieces=(8, 16), before=(24, 100), repeats=2)
    assert plan.piece_points(2048, 120) == [(8, 24), (8, 100), (16, 24), (16, 100)]
    assert plan.piece_points(112, 200) == [(8, 24), (8, 100), (16, 24)]
    points = sweep(executor, plan).pieces([(8, 24)], lambda: ticks.append(1))
    assert [(p.tokens, p.sum_sq) for p in points] == [(8, 32**2 - 24**2)]
    assert len(ticks) == 1
    assert not executor.present
    items = [item for step in executor.steps for item in step.items]
    assert [item.sample for item in items] == [True, False] * 3
    assert {(item.start, len(item.tokens), len(item.block_table)) for item in items} == {(24, 8, 4)}


def test_decode_steps_compute_the_last_token_of_their_context() -> None:
    executor = RecordingExecutor()
    points = sweep(executor).decode([(5, 33)], lambda: None)
    assert [(p.batch, p.context_tokens) for p in points] == [(5, 165)]
    for item in executor.steps[0].items:
        assert (item.start, len(item.tokens), len(item.block_table)) == (32, 1, 5)


def test_larger_steps_are_not_tried_once_they_are_too_slow() -> None:
    executor, ticks = RecordingExecutor(), []
    strict = SweepPlan(repeats=1, step_limit_s=1e-12)
    points = sweep(executor, strict).prefill([(4, 2), (8, 1), (8, 2), (16, 1)], lambda: ticks.append(1))
    assert [(p.tokens, p.requests) for p in points] == [(8, 2), (8, 1)]
    assert len(ticks) == 4


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_an_executor_that_runs_ahead_is_timed_running_ahead(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode steps in a row, up to the context, each begun before the one before is read."""
    values = {"instance": "t", "role": "unified", "model": str(tiny_model), "decode_graphs": True}
    model = ModelConfig.load(tiny_model)
    executor = LocalExecutor(EngineConfig.load({**values, "num_blocks": 32, "max_batch_size": 5}), model)
    assert executor.lag == 1
    items: list[StepItem] = []
    submit = LocalExecutor.submit

    def note(self: LocalExecutor, step: StepInput) -> None:
        assert len(self._running) <= 1
        items.extend(step.items)
        submit(self, step)

    monkeypatch.setattr(LocalExecutor, "submit", note)
    (point,) = EngineSweep(executor, model, PLAN, 16).decode([(5, 33)], lambda: None)
    assert (point.batch, point.context_tokens) == (5, 165)
    assert point.seconds > 0
    assert [item.start for item in items[::5]] == list(range(14, 33))
    assert [item.tokens for item in items[5:]] == [[LAST_SAMPLED]] * (len(items) - 5)
    assert not executor._running
    executor.close()


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    profile_engine.add_arguments(parser)
    return parser.parse_args(list(words))


@pytest.fixture
def unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ties its process to the device; a test must not do that to pytest's."""
    monkeypatch.setattr("distserve.worker.device.bind_device", lambda device: None)


@pytest.mark.usefixtures("unbound")
def test_profile_of_a_real_engine(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "profile.yaml"
    words = ("--model", str(tiny_model), "--quick", "--repeats", "1", "--kv-bytes", str(1 << 24))
    words += ("--no-transfer",)
    assert profile_engine.run(parse(*words, "--name", "here", "--out", str(out), "--json")) == 0
    profile = Profile.load(out)
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["device"] == profile.device == "here"
    assert [r.phase for r in profile.residuals] == ["prefill", "decode"]
    assert 16 <= (profile.lm_tokens or 0) <= 256
    instance = profile.latency_model().instance(1)
    assert 0 < instance.prefill_stage_s(16, 256, 1) <= instance.prefill_stage_s(256, 65536, 1) < 5
    head = profile.degrees[0].head.base_s
    assert 0 <= head < instance.prefill_stage_s(16, 256, 1)
    inner = instance.prefill_stage_s(16, 256, 1, ends=0)
    assert instance.prefill_stage_s(16, 256, 1) - inner == pytest.approx(head)
    assert 0 < instance.decode_stage_s(1, 32) <= instance.decode_stage_s(8, 8 * 200) < 5


def test_transfer_between_two_processes() -> None:
    config = EngineConfig(instance="profile", role="unified", model="none")
    ticks: list[int] = []
    peers = TransferPeers(config, model_dimensions("smollm2-135m"), "cpu:0", tokens=(16, 1024), repeats=2)
    link, _ = measure_transfer(peers, lambda: ticks.append(1))
    assert 1e7 < link.bandwidth_bytes_s < 1e11
    assert 0 <= link.latency_s < 1
    assert len(ticks) == 2


def test_source_that_cannot_start_is_reported() -> None:
    config = EngineConfig(instance="profile", role="unified", model="none")
    peers = TransferPeers(config, model_dimensions("smollm2-135m"), "cpu:9999", tokens=(16,), repeats=1)
    with pytest.raises(ConfigError, match="source process on cpu:9999 died"):
        measure_transfer(peers, lambda: None)


def test_link_is_fitted_to_sizes_and_times() -> None:
    link, error = fit_link([(n, 2e-3 + n / 3e9) for n in (10_000, 1_000_000, 50_000_000)])
    assert link.bandwidth_bytes_s == pytest.approx(3e9)
    assert link.latency_s == pytest.approx(2e-3)
    assert error.p95 < 1e-6
    with pytest.raises(ConfigError, match="larger transfers took no longer"):
        fit_link([(1000, 0.2), (2000, 0.1)])


@pytest.mark.usefixtures("unbound")
def test_impossible_options_are_refused(tiny_model: Path) -> None:
    for words, message in (
        (("--tp", "2"), "--tp=2: from 1 to the number of devices"),
        (("--repeats", "0"), "--repeats=0"),
        (("--kv-bytes", "10"), "kv_bytes=10"),
        (("--device", "tpu:0"), "device='tpu:0'"),
    ):
        with pytest.raises(ConfigError, match=message):
            profile_engine.run(parse("--model", str(tiny_model), *words))
