"""`distserve device-check`: its parts on a CPU with small shapes, its report, and what failures cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from distserve.core.model_config import ModelConfig
from distserve_tools.cli import main
from distserve_tools.device_check import engine, gpu_tests, parts
from distserve_tools.device_check.command import SCHEMA, _run
from distserve_tools.device_check.parts import Part
from distserve_tools.device_check.report import markdown
from distserve_tools.device_check.settings import Settings
from distserve_tools.device_check.shapes import (
    SHAPES,
    model_config,
    prefill_flops,
    weight_bytes,
    write_checkpoint,
)

ABOUT = {
    "device": "cuda:0", "device_name": "H", "date": "today", "dtype": "bf16", "torch": "2", "cuda": "13",
    "triton": "3", "flash_attn": None, "python": "3",
}  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings("cpu:0", "fp32", "small", str(tmp_path))


@pytest.fixture
def settings_file(settings: Settings, tmp_path: Path) -> Path:
    settings.save(tmp_path / "settings.json")
    return tmp_path / "settings.json"


def test_kernels_and_engine_are_measured_and_reported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Two parts in processes of their own, from the command line to the files."""
    command = ["device-check", "--device", "cpu:0", "--only", "kernels,engine tiny", "--out", str(tmp_path)]
    assert main(command) == 0
    document = json.loads((tmp_path / "device-check.json").read_text())
    assert document["schema"] == SCHEMA
    assert list(document["parts"]) == ["ceilings", "kernels", "engine tiny"]
    assert {part["state"] for part in document["parts"].values()} == {"done"}
    kernels = {row["kernel"]: row for row in document["parts"]["kernels"]["rows"]}
    assert {"RMSNorm", "KV store", "decode attention, 2 x 64", "prefill attention, 64"} <= kernels.keys()
    assert all(row["floor_s"] > 0 and 0 < row["seconds"] < 10 for row in kernels.values())
    steps = {(r["what"], r["batch"], r["context"]): r for r in document["parts"]["engine tiny"]["rows"]}
    assert len(steps) == 6
    assert steps["decode", 4, 128]["tokens_s"] == pytest.approx(4 / steps["decode", 4, 128]["step_s"])
    assert steps["decode", 1, 32]["without_graphs_s"] > 0
    table = (tmp_path / "device-check.md").read_text()
    assert table == capsys.readouterr().out
    assert table.count("| engine tiny | ") == 6
    assert "below" not in table  # aims are for GPUs


def test_a_part_that_fails_hangs_or_dies_costs_itself_only(settings_file: Path) -> None:
    quiet = Console(quiet=True)
    failed = _run(Part("engine", "engine", 60.0, ("no such model",)), settings_file, 60.0, quiet)
    assert (failed["state"], failed["why"]) == ("failed", "KeyError: 'no such model'")
    assert "Traceback" in failed["log"]
    late = _run(Part("profile", "profiling", 60.0), settings_file, 0.3, quiet)
    assert late["state"] == "failed"
    assert "not done within" in late["why"]
    unknown = _run(Part("x", "no_such_part", 60.0), settings_file, 60.0, quiet)
    assert "No module named" in unknown["why"]
    assert _run(Part("x", "engine", 60.0), settings_file, -1.0, quiet)["state"] == "skipped"
    no_gpu = _run(Part("gpu tests", "gpu_tests", 60.0), settings_file, 60.0, quiet)
    assert (no_gpu["state"], no_gpu["why"]) == ("skipped", "the tests marked gpu need a GPU")


def test_the_limits_of_all_parts_stay_below_nine_minutes() -> None:
    for scale in ("device", "small"):
        every = parts.parts(scale)  # type: ignore[arg-type]
        assert sum(part.limit_s for part in every) < 9 * 60
        assert len({part.name for part in every}) == len(every)


def test_what_is_refused_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["device-check", "--device", "cpu:0", "--only", "kernel"]) != 0
    assert "did you mean 'kernels'" in capsys.readouterr().err
    if not torch.cuda.is_available():
        assert main(["device-check"]) != 0
        assert "this host has 0 CUDA devices" in capsys.readouterr().err


def test_shapes_are_those_of_the_models_they_are_named_after(tmp_path: Path) -> None:
    assert model_config("llama-8b").param_count() == pytest.approx(8.03e9, rel=0.001)
    assert model_config("llama-1b").param_count() == pytest.approx(1.236e9, rel=0.001)
    eight = model_config("llama-8b")
    assert weight_bytes(eight, 2) == pytest.approx(15.0e9, rel=0.01)  # without the token embedding
    assert prefill_flops(eight, 1) == pytest.approx(15.0e9, rel=0.01)
    last = 2 * 4096 * (4096 + 3 * 14336)  # what the last layer does not compute of all tokens but one
    expected = 2 * 6.98e9 + 2 * 32 * 4096 * 8192 - last
    assert prefill_flops(eight, 8192) / 8192 == pytest.approx(expected, rel=0.01)
    folder = write_checkpoint("tiny", tmp_path / "tiny", torch.float32, torch.device("cpu"))
    config = ModelConfig.load(folder)
    assert config == model_config("tiny")
    assert sum(t.numel() for t in load_file(folder / "model.safetensors").values()) == pytest.approx(
        config.param_count(), rel=0.01
    )
    assert SHAPES["tiny"]["tie_word_embeddings"] is False


def test_steps_that_run_ahead_compute_what_others_do(settings: Settings) -> None:
    """Both ways of timing decode the same tokens of the same pages."""
    from distserve_tools.device_check.shapes import LOADS

    runner, blocks = engine._runner(settings, "tiny", model_config("tiny"), LOADS["small"])
    bench = engine.RunnerBench(runner, model_config("tiny"), blocks)
    found = []
    pages = [[page.clone() for page in runner.kv_cache.pages(layer)] for layer in range(2)]
    for ahead in (True, False):
        for layer, kept in enumerate(pages):
            for page, before in zip(runner.kv_cache.pages(layer), kept, strict=True):
                page.copy_(before)
        runner.graphs_enabled = ahead
        with engine._Sequences(bench, 3, 40) as sequences:
            tokens = []
            for _ in range(5):
                sequences.step(ahead)
            sequences.settle()
            tokens.append(sequences._tokens)
        found.append(tokens)
    assert found[0] == found[1]


def test_reports_of_tests_are_counted(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    assert gpu_tests.counts(report, "no tests ran")["failures"] == ["no tests ran"]
    report.write_text(
        "<testsuites><testsuite><testcase name='a'/><testcase name='b'><failure message='wrong | bits'/>"
        "</testcase><testcase name='c'><skipped/></testcase></testsuite></testsuites>"
    )
    counts = gpu_tests.counts(report, "")
    assert (counts["passed"], counts["failed"], counts["skipped"]) == (1, 1, 1)
    assert counts["failures"] == ["b: wrong | bits"]


def test_a_report_of_a_gpu_says_what_is_below_its_aim() -> None:
    kernel = {"kernel": "RMSNorm", "seconds": 2e-5, "floor_s": 1e-5, "bound": "memory", "share": 0.5}
    step: dict[str, Any] = {"what": "decode", "batch": 8, "context": 512, "step_s": 0.01, "tokens_s": 800.0}
    step |= {"share": 0.83, "without_graphs_s": 0.02, "outside_kernels": 0.04}
    test = {"file": "f", "passed": 3, "failed": 1, "skipped": 0, "failures": ["t: a | b"]}
    found = {
        "kernels": {"state": "done", "rows": [kernel]},
        "engine llama-8b": {"state": "done", "rows": [step], "left_out": ["decode of 256"]},
        "serving": {"state": "failed", "why": "a\nb"},
        "gpu tests": {"state": "done", "rows": [test]},
    }
    text = markdown({"schema": SCHEMA, "about": ABOUT, "seconds": 1.0, "parts": found})
    assert "| kernels | RMSNorm (memory) | 20.0 us |  | 50% (below 85%) |" in text
    assert "decode 8 x 512; without graphs 20.00 ms; outside kernels 4.0% | 10.00 ms" in text
    assert "83% (met 80%)" in text
    assert "**failed**: a b" in text
    assert "**t: a / b**" in text


@pytest.mark.slow
def test_the_whole_check_on_a_cpu(tmp_path: Path) -> None:
    """With a real tritonserver, prefill and decode on one core, and tokens as from one engine alone."""
    assert main(["device-check", "--device", "cpu:0", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "device-check.json").read_text())["parts"]
    states = {name: part["state"] for name, part in found.items()}
    assert states.pop("gpu tests") == "skipped"
    assert set(states.values()) == {"done"}
    serving = found["serving"]
    assert serving["requests"] == 3
    assert serving["tokens_like_one_engine"] == serving["tokens_compared"] == 12
    assert serving["attention"] == ["c"]
    assert {row["channel"] for row in found["transfers"]["rows"]} == {"memory", "gloo"}
    assert found["profile"]["profile"]["lm_tokens"] > 0
