"""`distserve bench engine`: its arithmetic, its refusals, and a worker of each kind of fate."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from distserve.core.model_config import ModelConfig
from distserve.core.parsing import ConfigError
from distserve_tools import bench_engine
from distserve_tools.bench_engine import OURS, Case, Ratio, compare
from distserve_tools.engine_peers.environments import PEERS, peer_python
from distserve_tools.engine_peers.process import EngineWorker, WorkerError, WorkerSpec
from distserve_tools.engine_peers.random_llama import CONFIG
from model_zoo import VOCAB, Zoo


def spec(model: Path, engine: str = OURS) -> WorkerSpec:
    return WorkerSpec(engine, str(model), "fp32", (0,), context=20, room=10, sequences=3, vocab=VOCAB)


@pytest.mark.parametrize("engine", [OURS, pytest.param("transformers", marks=pytest.mark.slow)])
def test_a_worker_prefills_and_decodes(zoo: Zoo, tmp_path: Path, engine: str) -> None:
    folder = zoo("llama").folder
    with EngineWorker(spec(folder, engine), sys.executable, tmp_path / "log", 120) as worker:
        assert engine in worker.about or "this engine" in worker.about
        (prefill,) = worker.ask(60, op="prefill")
        assert prefill["wall"] > 0
        assert prefill["cpu"] > 0
        assert worker.ask(60, op="start", batch=3) == []
        assert len(worker.ask(60, op="steps", count=4)) == 4
        assert worker.ask(60, op="stop") == []
        assert worker.ask(60, op="start", batch=1) == []


def test_a_worker_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"(?s)distserve has ended.*config\.json"):
        EngineWorker(spec(tmp_path), sys.executable, tmp_path / "log", 120)


def test_a_worker_that_hangs_is_ended(tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    with pytest.raises(WorkerError, match="did not answer within 0 s"):
        EngineWorker(spec(tmp_path), str(slow), tmp_path / "log", 0.2)


def test_ratios_are_taken_round_by_round() -> None:
    cases = [Case(0, 512), Case(1, 512), Case(8, 512), Case(32, 512)]
    ours, theirs = [1.0, 2.0, 1.0], [2.0, 3.0, 1.0]
    seconds = {OURS: [ours] * 4, "transformers": [theirs] * 4}
    row = compare(seconds, cases, bench_engine.BARS["fp32"])["transformers"]
    assert row[0] == Ratio(1.5, 1.0, 2.0, 1.0)
    assert [r.met for r in row] == [True, True, True, False]
    assert [r.met for r in compare(seconds, cases, {})["transformers"]] == [None] * 4


@pytest.mark.parametrize(
    ("ratio", "met"),
    [
        (Ratio(1.1, 1.0, 1.2, 1.1), True),
        (Ratio(1.05, 1.0, 1.2, 1.1), True),  # within the interval of the rounds
        (Ratio(1.05, 1.0, 1.08, 1.1), False),
        (Ratio(1.05, 1.0, 1.08, None), None),
    ],
)
def test_a_bar_is_met_within_the_noise(ratio: Ratio, met: bool | None) -> None:
    assert ratio.met is met


def test_the_random_model_has_the_size_it_says() -> None:
    assert ModelConfig.from_hf(CONFIG).param_count() == pytest.approx(125e6, rel=0.01)


def test_a_peer_runs_in_the_python_that_is_given(tmp_path: Path) -> None:
    assert peer_python("vllm", {"vllm": "/usr/bin/python"}, tmp_path, print) == "/usr/bin/python"
    assert peer_python("transformers", {}, tmp_path, print) == sys.executable
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--peers", "vlm"], "peers='vlm': not known; did you mean 'vllm'"),
        (["--peers", "vllm", "--peer-python", "vllm"], "peer-python='vllm': must be PEER=PATH"),
        (["--model", "/no/such/folder"], "model='/no/such/folder': no folder"),
    ],
)
def test_refusals(argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTSERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(bench_engine, "random_llama", lambda folder: folder)
    parser = argparse.ArgumentParser()
    bench_engine.add_arguments(parser)
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        bench_engine.run(parser.parse_args(argv))


def test_every_bar_is_of_a_peer_that_exists() -> None:
    for bars in bench_engine.BARS.values():
        assert set(bars) <= set(PEERS)
        assert all(len(row) == 1 + len(bench_engine.DECODE_BATCHES) for row in bars.values())
