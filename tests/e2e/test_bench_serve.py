"""The load generator against a real server, and the orchestrator on load-only instances."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving import Deployment

from distserve.core.model_config import ModelConfig
from distserve_planner.coefficients import DecodePiece, Degree, PrefillPiece
from distserve_planner.profile_file import Profile
from distserve_planner.workload.readers import read_trace
from distserve_tools.cli import main
from distserve_tools.testbed.campaign import Campaign, begin_campaign, grid, measure, missing_turns
from distserve_tools.testbed.engine_counters import merged
from distserve_tools.testbed.plan import WORKLOADS, TestbedPlan
from distserve_tools.testbed.recorded import Recording, read_campaigns
from distserve_tools.testbed.report import report
from distserve_tools.testbed.systems import DISAGGREGATED, SYSTEMS, EngineLimits, serving
from model_zoo import Zoo


def bench(deployment: Deployment, folder: Path, *options: str) -> dict[str, object]:
    output = folder / "runs.json"
    arguments = ["bench", "serve", "--url", deployment.server.grpc_url]
    arguments += ["--model", str(deployment.model.folder), "--output", str(output), "--json"]
    # other work on the machine must not make the generator refuse
    assert main([*arguments, "--max-lag-ms", "5000", "--scale", "0.05", *options]) == 0
    result: dict[str, object] = json.loads(output.read_text())
    return result


def test_rates_are_measured_with_stages_and_a_log(
    deployment: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    options = ["--rate", "20,40", "--requests", "12", "--repeats", "2", "--log", str(log)]
    result = bench(deployment, tmp_path, *options, "--ttft-slo", "30", "--tpot-slo", "30")
    runs = result["runs"]
    assert isinstance(runs, list)
    assert [run["rate_rps"] for run in runs] == [20.0, 20.0, 40.0, 40.0]
    for run in runs:
        assert (run["requests"], run["failed"], run["errors"]) == (12, 0, {})
        assert run["attainment"] == 1.0
        assert run["stages_s"]["transfer"] > 0
        assert run["itl_s"]["p50"] > 0
        stages = sum(run["stages_s"].values())
        assert 0 < stages <= run["e2e_s"]["mean"] + 0.01
    assert json.loads(capsys.readouterr().out)["schema"] == "bench_serve/1"
    assert len(read_trace(log)) == 24


def test_a_log_can_be_replayed(deployment: Deployment, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    bench(deployment, tmp_path, "--rate", "30", "--requests", "8", "--log", str(log))
    before = read_trace(log)
    again = tmp_path / "again.jsonl"
    bench(deployment, tmp_path, "--trace", str(log), "--scale", "1", "--log", str(again))
    after = read_trace(again)
    assert after.output_tokens.tolist() == before.output_tokens.tolist()
    assert after.duration_s == pytest.approx(before.duration_s, abs=0.5)


def test_goodput_of_easy_objectives_is_bracketed(deployment: Deployment, tmp_path: Path) -> None:
    """TTFT of nothing at all: no rate passes, and the search ends."""
    options = ["--rate", "20", "--requests", "6", "--find-goodput", "--ttft-slo", "0.000001"]
    result = bench(deployment, tmp_path, *options)
    assert result["goodput_rps"] == 0.0


@pytest.mark.parametrize("orchestrators", [1, 2])
def test_orchestrators_on_load_only_instances(orchestrators: int, zoo: Zoo, tmp_path: Path) -> None:
    output = tmp_path / "orchestrator.json"
    arguments = ["bench", "orchestrator", "--model", str(zoo("llama").folder), "--output", str(output)]
    arguments += ["--streams", "8", "--tokens-per-s", "1000", "--seconds", "1"]
    assert main([*arguments, "--orchestrators", str(orchestrators)]) == 0
    lone, ids, text = json.loads(output.read_text())["runs"]
    assert lone["streams"] == 1
    assert lone["ttft_s"]["p50"] > 0
    for run in (ids, text):
        assert run["orchestrators"] == orchestrators
        assert run["tokens_per_s"] == pytest.approx(1000, rel=0.6)
        assert run["cpu_us_per_token"]["orchestrator"] > 0
        assert run["age_s"]["p50"] >= 0
    assert (ids["text"], text["text"]) == (False, True)


@pytest.mark.slow
def test_a_campaign_measures_and_predicts_all_systems(zoo: Zoo, tmp_path: Path) -> None:
    """Small: what it says of a model of a few kilobytes means nothing, but every table is filled.

    It breaks off after the first turn and is resumed from its file.
    """
    model = str(zoo("llama").folder)
    config = ModelConfig.load(Path(model))
    degree = Degree(1, (PrefillPiece(1e-3, 1e-5),), (DecodePiece(1e-3, 1e-8),))
    profile = Profile("core", model, config, "fp32", (degree,), lm_tokens=64)
    plan = TestbedPlan(run_s=1.0, repeats=2, lone_requests=2, rates=2, judge=False)
    limits = EngineLimits(64, 32, kv_bytes=8 << 20)
    said: list[str] = []
    path = tmp_path / "results.json"

    def keep_and_break_off(campaign: Campaign) -> None:
        Recording(path).keep(campaign)
        raise KeyboardInterrupt

    with serving(SYSTEMS, model, limits, tmp_path, said.append) as served:
        campaign = begin_campaign(plan, model, WORKLOADS[0], profile, limits, 10.0, served, said.append)
        turns = plan.turns(campaign.rates, campaign.repeated_rate)
        with pytest.raises(KeyboardInterrupt):
            measure(plan, campaign, served, said.append, keep_and_break_off)
        (campaign,) = read_campaigns(path)
        assert missing_turns(campaign, plan) == turns[1:]
        measure(plan, campaign, served, said.append, Recording(path).keep)
    assert campaign.rates == grid(10.0, 2)
    assert len(campaign.runs) == 3 * (2 + 1)
    for run in campaign.runs:
        assert run.predicted is not None
        assert run.predicted_at_pace is not None
        assert all(pace.prefill > 0 and pace.decode > 0 for pace in run.paces.values())
        assert [r.error for r in run.records if not r.ok] == []
        assert run.cpu.beside_engines > 0
        counted = merged(run.engines.values()).totals["steps"]
        assert counted >= len(run.records)
    moved = [r.engines["decode_0"].totals["transfers"] for r in campaign.runs if r.system == DISAGGREGATED]
    assert all(count > 0 for count in moved)
    text = report(campaign)
    assert text.count("measured") >= 3
    assert f"| disaggregated {campaign.rates[1]:g}/s |" in text
    assert f"| disaggregated {campaign.rates[1]:g}/s, decode_0 | - | x " in text
