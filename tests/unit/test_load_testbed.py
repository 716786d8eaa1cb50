"""Test-bed: placements, predictions on the same requests, pairing, goodput, who used the processor."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from distserve.core.model_config import ModelConfig
from distserve.core.parsing import ConfigError
from distserve.engine.step_times import StepSums
from distserve_planner.cluster import Link
from distserve_planner.coefficients import DecodePiece, Degree, PrefillPiece
from distserve_planner.placement_file import parse_placement
from distserve_planner.profile_file import Profile
from distserve_planner.slo import Slo
from distserve_tools.cli import main
from distserve_tools.load.record import Record
from distserve_tools.testbed import lone_engine, systems
from distserve_tools.testbed.campaign import (
    Campaign,
    add_predictions,
    belongs,
    beside_engines,
    blocks_of,
    fitting,
    grid,
    missing_turns,
    sizing,
    with_whole_rates,
)
from distserve_tools.testbed.comparison import goodput_rps, latency_error, pairs, repeat_noise, winner
from distserve_tools.testbed.cpu_account import (
    ENGINE,
    GENERATOR,
    ORCHESTRATOR,
    PARTS,
    STAGE_STUBS,
    TRITON,
    CpuSeconds,
    part_of,
    processor_time,
)
from distserve_tools.testbed.engine_counters import KEYS, EngineCount
from distserve_tools.testbed.figures import draw
from distserve_tools.testbed.pace import (
    Contention,
    LoadedRun,
    Pace,
    fit_contention,
    measured_pace,
    processor_share,
)
from distserve_tools.testbed.plan import WORKLOADS, TestbedPlan
from distserve_tools.testbed.prediction import Predictor, ServerTerms, fit_terms
from distserve_tools.testbed.recorded import Recording, read_campaigns
from distserve_tools.testbed.replay_engine import STAMP_UNIT_S, age_s, stamp
from distserve_tools.testbed.report import goodputs, report
from distserve_tools.testbed.runs import Run
from distserve_tools.testbed.simulated import simulated_goodputs
from distserve_tools.testbed.summary import summary
from distserve_tools.testbed.systems import CHUNKED, DISAGGREGATED, PREFILL_FIRST, SYSTEMS, EngineLimits
from distserve_tools.testbed.traces import lone_requests, requests_at

MODEL = ModelConfig(
    arch="llama",
    model_type="llama",
    hidden_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=128,
    vocab_size=1000,
    max_context=2048,
)
LIMITS = EngineLimits(max_batch_tokens=256, chunk_tokens=64, kv_bytes=64 << 20)
PREFILL_S, DECODE_S = 1e-3, 20e-3  # of a token, of a step


def profile(prefill_s: float = PREFILL_S) -> Profile:
    degree = Degree(1, (PrefillPiece(2e-3, prefill_s),), (DecodePiece(DECODE_S, 1e-6, per_request_s=1e-3),))
    return Profile("a core", "m", MODEL, "fp32", (degree,), lm_tokens=256, transfer=Link(1e9, 1e-3))


def predictor(system: str) -> Predictor:
    return Predictor(system, profile(), LIMITS, blocks_of(profile(), LIMITS))


def cpu(**parts: float) -> CpuSeconds:
    return CpuSeconds({**dict.fromkeys(PARTS, 0.0), ENGINE: 1.0, ORCHESTRATOR: 0.1, **parts}, 0.0, 10.0)


def run_of(system: str, rate: float, repeat: int, late: int, count: int = 20) -> Run:
    """A run in which `late` of the requests miss TTFT."""
    trace = requests_at(WORKLOADS[0], rate, count, 0, 2048)
    records = []
    for i, arrival in enumerate(trace.arrival_s.tolist()):
        first = arrival + (5.0 if i < late else 0.2)
        times = [first, first + 0.05]
        records.append(Record(i, arrival, int(trace.input_tokens[i]), arrival, times, [1, 1], times[-1]))
    return Run(system, rate, repeat, trace, records, cpu())


@pytest.mark.parametrize("system", SYSTEMS)
def test_placements_can_be_parsed_and_are_on_two_cores(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "cores", lambda: (0, 1))
    placement = parse_placement(systems.placement_text(system, "m", LIMITS)).placement
    engines = [placement.engine_config(i) for i in range(2)]
    assert {engine.devices for engine in engines} == {("cpu:0",), ("cpu:1",)}
    assert all(engine.max_batch_tokens == 256 for engine in engines)
    roles = [engine.role for engine in engines]
    assert roles == (["prefill", "decode"] if system == DISAGGREGATED else ["unified", "unified"])
    if system == CHUNKED:
        assert [(e.policy, e.chunk_tokens) for e in engines] == [("chunked_prefill", 64)] * 2


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_lone_request_is_predicted_by_the_coefficients(system: str) -> None:
    trace = lone_requests(WORKLOADS[0], 1, 1.0, 2048)
    seen = predictor(system).predict(trace, ServerTerms(first_token_s=0.01))
    prompt = int(trace.input_tokens[0])
    steps = -(-prompt // LIMITS.chunk_tokens) if system == CHUNKED else 1
    assert seen.ttft_s[0] == pytest.approx(steps * 2e-3 + PREFILL_S * prompt + 0.01, rel=1e-6)
    assert DECODE_S + 1e-3 < seen.tpot_s[0] < DECODE_S + 3e-3


def test_terms_fitted_to_lone_requests_reproduce_them() -> None:
    trace = lone_requests(WORKLOADS[0], 3, 5.0, 2048)
    slow = Pace(1.1, 1.2, iteration_s=0.003)
    seen = predictor(PREFILL_FIRST).predict_at(trace, (slow, slow), 0.008)
    records = []
    for i in range(3):
        first = 5.0 * i + seen.ttft_s[i]
        count = int(trace.output_tokens[i])
        times = [float(first + k * seen.tpot_s[i]) for k in range(count)]
        records.append(Record(i, 5.0 * i, 8, 5.0 * i, times, [1] * count, times[-1]))
    beside = [(10.0, 0.15), (30.0, 0.25)]
    terms = fit_terms(predictor(PREFILL_FIRST), trace, records, slow, beside, Contention(decode=1.3))
    assert terms.first_token_s == pytest.approx(0.008, abs=1e-6)
    assert terms.contention == Contention(decode=1.3)
    assert (terms.idle_cores, terms.per_token_s) == pytest.approx((0.1, 0.005))


@pytest.mark.parametrize("system", SYSTEMS)
def test_work_beside_the_engines_takes_from_both(system: str) -> None:
    trace = requests_at(WORKLOADS[0], 5.0, 60, 0, 2048)
    alone = predictor(system).predict(trace)
    beside = predictor(system).predict(trace, ServerTerms(idle_cores=0.4))
    others = predictor(system).predict(trace, None, others_cores=0.4)
    assert beside.tpot_s.tolist() == others.tpot_s.tolist()
    for name in ("ttft_s", "tpot_s"):
        ratio = getattr(beside, name).sum() / getattr(alone, name).sum()
        assert ratio > 1.02  # 0.4 cores of two: 1.25, and what that queues
    # one request at a time: TPOT by the loss of decode steps, TTFT by that of prefill
    lone = lone_requests(WORKLOADS[0], 3, 60.0, 2048)
    loss = Contention(prefill_loss=0.25, decode_loss=0.75)
    slower = predictor(system).predict(lone, ServerTerms(idle_cores=0.4, contention=loss))
    plain = predictor(system).predict(lone)
    assert slower.tpot_s.tolist() == pytest.approx((plain.tpot_s / 0.7).tolist(), rel=0.001)
    assert slower.ttft_s.tolist() == pytest.approx((plain.ttft_s / 0.9).tolist(), rel=0.01)


@pytest.mark.parametrize("system", SYSTEMS)
def test_contention_slows_each_phase_by_its_factor(system: str) -> None:
    trace = requests_at(WORKLOADS[0], 200.0, 80, 0, 2048)  # both engines compute nearly all the time
    plain = predictor(system).predict(trace)
    terms = ServerTerms(contention=Contention(prefill=1.2, decode=1.2))
    shared = predictor(system).predict(trace, terms)
    for name in ("ttft_s", "tpot_s"):
        assert 1.05 < getattr(shared, name).sum() / getattr(plain, name).sum() < 1.25


def counted(prefill: float, decode: float, execute_s: float, slower_clock: float = 1.0) -> EngineCount:
    """An engine whose steps took so many times the profile's; wall time is `slower_clock` times that."""
    latency = profile().latency_model().instance(1)
    times = {}
    for tokens, decodes, context in ((64, 0, 0), (256, 0, 0), (32, 4, 900), (0, 1, 50), (0, 8, 2000)):
        factor = prefill if tokens else decode
        cpu_s = 10 * factor * latency.mixed_stage_s(tokens, 0, decodes, context, 1)
        shape = (10 * tokens, 0, *((10, 10) if tokens else (0, 0)), 10 * decodes, 10 * context)
        times[tokens, decodes] = StepSums(10, *shape, slower_clock * cpu_s, cpu_s)
    return EngineCount(
        {**dict.fromkeys(KEYS, 0.0), "steps": 50, "loop_s": 0.1, "execute_s": execute_s}, times
    )


def test_the_pace_of_counted_steps_is_their_factor_on_the_profile() -> None:
    pace = measured_pace(profile(), counted(1.2, 1.5, 5.0, slower_clock=1.1))
    assert (pace.prefill, pace.decode) == (pytest.approx(1.32), pytest.approx(1.65))
    assert pace.iteration_s == pytest.approx(0.002)
    own = measured_pace(profile(), counted(1.2, 1.5, 5.0, slower_clock=1.1), "cpu_s")
    assert (own.prefill, own.decode) == (pytest.approx(1.2), pytest.approx(1.5))
    assert processor_share(counted(1.2, 1.5, 5.0, slower_clock=1.1)) == pytest.approx(1 / 1.1)


def test_contention_is_what_load_adds_for_the_share_in_which_the_other_computes() -> None:
    busy = {name: counted(1.2, 1.4, 8.0, slower_clock=1.1) for name in ("prefill_0", "decode_0")}
    loaded = [LoadedRun(busy, 10.0, 0.2)]
    found = fit_contention(profile(), {"prefill_0": counted(1.0, 1.1, 1.0)}, loaded)
    assert (found.alone.prefill, found.alone.decode) == (pytest.approx(1.0), pytest.approx(1.1))
    # in wall time, as they were counted
    at_that_load = found.pace(0.8, 0.2)
    assert (at_that_load.prefill, at_that_load.decode) == (pytest.approx(1.32), pytest.approx(1.54))
    undisturbed = found.pace(0.8, 0.0)
    assert (undisturbed.prefill, undisturbed.decode) == (pytest.approx(1.2), pytest.approx(1.4))
    # a machine that was slower during the lone requests
    found = fit_contention(profile(), {"prefill_0": counted(1.5, 1.6, 1.0)}, loaded)
    assert found.pace(0.0, 0.0).prefill == found.pace(1.0, 0.0).prefill == pytest.approx(1.2)


@pytest.mark.parametrize("system", SYSTEMS)
def test_at_the_pace_of_a_contention_the_same_is_predicted(system: str) -> None:
    trace = requests_at(WORKLOADS[0], 3.0, 60, 0, 2048)
    contention = Contention(Pace(1.1, 1.3, iteration_s=0.001))
    seen = predictor(system).predict(trace, ServerTerms(first_token_s=0.02, contention=contention))
    same = predictor(system).predict_at(trace, (contention.alone, contention.alone), 0.02)
    assert seen.ttft_s.tolist() == same.ttft_s.tolist()
    assert seen.tpot_s.tolist() == same.tpot_s.tolist()
    slow_decode = predictor(system).predict_at(trace, (contention.alone, Pace(1.1, 2.6)), 0.02)
    assert slow_decode.tpot_s.mean() > 1.2 * seen.tpot_s.mean()


@pytest.mark.parametrize(("prefill_s", "part"), [(0.1e-3, 1), (1e-3, 1), (4e-3, 2), (8e-3, 4), (0.5, 4)])
def test_a_slower_core_is_asked_shorter_prompts(prefill_s: float, part: int) -> None:
    chat = WORKLOADS[0]
    fitted = fitting(profile(prefill_s), chat, LIMITS)
    assert fitted == replace(chat, scale=chat.scale / part)
    assert fitted in chat.sizes


def test_sizing_chooses_a_chunk_and_rates_around_the_limit() -> None:
    limits, top = sizing(profile(), WORKLOADS[0], LIMITS)
    assert limits.max_batch_tokens == LIMITS.max_batch_tokens
    # prefill alone: about 193 tokens a prompt at 1 ms, two cores at most
    assert 1.0 < top < 2 / (193 * PREFILL_S)
    rates = grid(top, 7)
    assert len(rates) == 7
    assert rates[0] < 0.5 * top < top < rates[-1]
    assert rates == sorted(rates)


def test_the_same_seed_gives_the_same_requests_at_every_rate() -> None:
    slow, fast = (requests_at(WORKLOADS[1], rate, 30, 3, 2048) for rate in (1.0, 4.0))
    assert np.array_equal(slow.input_tokens, fast.input_tokens)
    assert np.allclose(slow.arrival_s, 4 * fast.arrival_s)


def test_pairs_join_repeats_and_noise_is_their_deviation() -> None:
    slo = Slo(1.0, 0.1)
    runs = [run_of("a", 1.0, 0, 0), run_of("a", 2.0, 0, 2), run_of("a", 2.0, 1, 6)]
    found = pairs(runs, "a", slo)
    assert [p.rate_rps for p in found] == [1.0, 2.0]
    assert [p.measured for p in found] == [1.0, pytest.approx(0.8)]
    assert found[1].requests == 40
    assert found[0].predicted is None
    assert found[0].error is None
    assert repeat_noise(runs, ["a"], slo) == pytest.approx(100 * np.std([0.9, 0.7], ddof=1))
    assert repeat_noise(runs[:2], ["a"], slo) is None


def test_predictions_are_compared_request_by_request() -> None:
    run = run_of("a", 1.0, 0, 0)
    run.predicted = predictor(PREFILL_FIRST).predict(run.trace)
    error = latency_error([run])
    assert error is not None
    expected = np.median(np.abs(run.predicted.ttft_s - 0.2) / 0.2)
    assert error.ttft_p50 == pytest.approx(expected, rel=1e-6)
    assert pairs([run], "a", Slo(1.0, 0.1))[0].error is not None


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ([(1.0, 0.8), (2.0, 0.5)], 0.0),
        ([(1.0, 1.0), (2.0, 0.8)], 1.5),
        ([(1.0, 1.0), (2.0, 0.95)], 2.0),
        ([(1.0, 1.0), (2.0, 0.8), (3.0, 1.0)], 1.5),  # what comes after the first miss does not count
        ([(1.0, 0.9)], 1.0),
    ],
)
def test_goodput_lies_between_measured_rates(curve: list[tuple[float, float]], expected: float) -> None:
    assert goodput_rps(curve, 0.9) == pytest.approx(expected)


def test_winners_within_a_tie_are_named_together() -> None:
    assert winner({"a": 1.0, "b": 0.97, "c": 0.5}) == "a = b"
    assert winner({"a": 0.0, "b": 0.0}) == "none"


def test_processes_are_told_apart_by_their_command() -> None:
    stub = "/x/triton_python_backend_stub /r/{}/1/model.py name 1 1"
    assert part_of(stub.format("orchestrator")) == ORCHESTRATOR
    assert part_of(stub.format("prefill_0")) == STAGE_STUBS
    assert part_of("/usr/bin/python3 -m distserve.engine --fd 9") == ENGINE
    assert part_of("/usr/bin/something") == TRITON


def test_our_own_time_is_counted() -> None:
    before = processor_time([])
    end = time.process_time() + 0.1
    while time.process_time() < end:
        sum(range(1000))
    spent = processor_time([]).since(before)
    assert 0.07 < spent.parts[GENERATOR] < 0.5
    assert spent.wall > 0.05
    assert processor_time([os.getpid()]).parts[TRITON] > 0


def test_stamps_tell_their_age_across_the_wrap() -> None:
    for now in (123.456, 0.99999 * 49152 * STAMP_UNIT_S):
        token = stamp(now, 49152)
        assert 0 <= token < 49152
        assert age_s(token, now + 0.02, 49152) == pytest.approx(0.02, abs=2 * STAMP_UNIT_S)


def campaign() -> Campaign:
    """Two rates of two systems, one of them a peer without a prediction."""
    runs = []
    for system in (DISAGGREGATED, "vllm"):
        runs += [run_of(system, 1.0, 0, 0), run_of(system, 2.0, 0, 4), run_of(system, 2.0, 1, 6)]
    terms = {DISAGGREGATED: ServerTerms(0.01, 0.1, 4e-4)}
    for run in runs[:3]:
        run.predicted = predictor(DISAGGREGATED).predict(run.trace, terms[DISAGGREGATED])
        moved = {"transfer_wait_s": 0.00301 * len(run.records), "transfer_wire_s": 0.0}
        totals = {"steps": 10, "execute_s": 0.95, "loop_s": 0.05, **moved}
        prompts, decodes = (
            {(64, 0): StepSums(1, 64, wall_s=0.1)},
            {(0, 1): StepSums(1, decodes=1, wall_s=0.1)},
        )
        run.engines = {
            "prefill_0": EngineCount(totals, prompts),
            "decode_0": EngineCount(totals, decodes),
        }
        run.paces = {"prefill_0": Pace(1.02), "decode_0": Pace(decode=1.31)}
        run.predicted_at_pace = predictor(DISAGGREGATED).predict_at(run.trace, (Pace(1.02), Pace(1, 1.31)), 0)
        for record in run.records:
            record.stages = {"prefill": 0.2, "transfer": 0.001, "decode": 0.1}
    lone = {name: run_of(name, 0.1, 0, 0, 3) for name in (DISAGGREGATED, "vllm")}
    slos = {"easy": Slo(1.0, 0.1), "hard": Slo(0.1, 0.1)}
    blocks = {DISAGGREGATED: blocks_of(profile(), LIMITS), "vllm": 0}
    rates = [1.0, 2.0]
    return Campaign("m", WORKLOADS[0], profile(), LIMITS, blocks, lone, slos, terms, rates, 2.0, runs=runs)


def test_the_report_has_every_table() -> None:
    text = report(campaign())
    for line in (
        "| 1/s | 100.0 % | ",  # measured, then simulated
        "Noise, the standard deviation of attainment between 2 runs",
        "| easy | 90% | 0.",
        "| hard | 90% | 0.00 (",
        "| disaggregated 2/s | 0 ms | 200 ms | 0 ms | 1 ms | 100 ms | 0.33% | 1.00% | 0.00% |",
        "| vllm 1/s | 0.10 |",
        "| disaggregated 2/s, prefill_0 | x 1.02 | - | 0% |",
        "| disaggregated 2/s, decode_0 | - | x 1.31 | 0% |",
        "| disaggregated, at the run's pace | ",
        " of 4 |",  # predictions, in the noise or not
    ):
        assert line in text
    assert "5.0%" in text  # of the loop
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(row.count("|") == following.count("|") for row, following in _same_table(text))
    assert len(rows) > 25


def test_the_summary_counts_predictions_and_names() -> None:
    one = campaign()
    text = summary([one, replace(one, model="n")])
    # simulated at 1/s and 2/s under two objectives
    errors = [p.error or 0.0 for slo in one.slos.values() for p in pairs(one.runs, DISAGGREGATED, slo)]
    assert len(errors) == 4
    noise = [repeat_noise(one.runs, one.systems, slo) or 0.0 for slo in one.slos.values() for _ in range(2)]
    within = [sum(abs(e) <= max(2.0, k * n) for e, n in zip(errors, noise, strict=True)) for k in range(3)]
    mean, bias = np.mean(np.abs(errors)), np.mean(errors)
    median = np.median(np.abs(errors))
    counts = " | ".join(map(str, within))
    assert f"| chat x 0.25, m | 4 | {mean:.1f} | {median:.1f} | {bias:+.1f} | {counts} |" in text
    doubled = " | ".join(str(2 * count) for count in within)
    assert f"| all | 8 | {mean:.1f} | {median:.1f} | {bias:+.1f} | {doubled} |" in text
    assert "| chat x 0.25, m | easy | 0.70/" in text
    assert "in 4 of 4 rows and targets" in text  # one system is simulated: it is named where it attains
    assert all(row.count("|") == following.count("|") for row, following in _same_table(text))


def test_a_summary_of_what_nobody_attains_says_so() -> None:
    late = campaign()
    late.slos = {"impossible": Slo(1e-6, 1e-6)}
    assert "No system attains any of the targets." in summary([late])


def _same_table(text: str) -> list[tuple[str, str]]:
    lines = text.splitlines()
    return [(a, b) for a, b in pairwise(lines) if a.startswith("|") and b.startswith("|")]


def test_goodputs_per_core_leave_peers_unpredicted() -> None:
    both = campaign()
    slo = both.slos["easy"]
    measured = goodputs(both, slo, 0.9, predicted=False)
    # 100 % at 1/s, 75 % at 2/s: 90 % at 1.4/s, on two cores
    assert measured == {DISAGGREGATED: pytest.approx(0.7), "vllm": pytest.approx(0.7)}
    assert set(goodputs(both, slo, 0.9, predicted=True)) == {DISAGGREGATED}


def test_figures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = draw(campaign(), tmp_path, "m-chat")
    assert [path.name for path in paths] == [
        "m-chat-attainment.png",
        "m-chat-slo-scale.png",
        "m-chat-breakdown.png",
        "m-chat-latency.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def recorded(path: Path, *campaigns: Campaign) -> Recording:
    """Their lone requests have what the engines have counted, as measured ones do."""
    for campaign in campaigns:
        for run in campaign.lone.values():
            run.engines = campaign.runs[0].engines if run.system == DISAGGREGATED else {}
    return Recording(path, campaigns)


def test_an_interrupted_campaign_is_reported_with_its_whole_rates() -> None:
    cut = campaign()
    cut.rates = [1.0, 2.0, 3.0]
    cut.runs.append(run_of(DISAGGREGATED, 3.0, 0, 0))  # the other system was not measured there
    whole = with_whole_rates(cut)
    assert whole is not None
    assert whole.rates == [1.0, 2.0]
    assert {run.rate_rps for run in whole.runs} == {1.0, 2.0}
    assert cut.rates == [1.0, 2.0, 3.0], "so that it can go on"
    assert with_whole_rates(campaign()) is not None
    assert with_whole_rates(replace(cut, runs=cut.runs[-1:])) is None


def test_a_campaign_that_was_kept_is_reported_again(tmp_path: Path) -> None:
    measured = campaign()
    failed = measured.runs[-1].records[3]
    failed.error, failed.token_s, failed.token_counts = "UNAVAILABLE: gone", [], []
    path = tmp_path / "results.json"
    recording = recorded(path, measured)
    add_predictions(measured)
    recording.save(path)
    again = Recording(path, read_campaigns(path))
    (found,) = again.finished()
    assert report(found) == report(measured)
    assert found.runs[-1].records[3].error == "UNAVAILABLE: gone"
    seen = found.runs[0].predicted
    assert seen is not None
    request = json.loads(path.read_text())["campaigns"][0]["runs"][0]["requests"][0]
    assert request["predicted"]["ttft_s"] == pytest.approx(float(seen.ttft_s[0]), abs=1e-6)


def test_a_campaign_under_way_is_reported_without_the_rate_that_is_not_whole(tmp_path: Path) -> None:
    cut = campaign()
    cut.rates, cut.terms = [1.0, 2.0, 3.0], {}
    for run in (*cut.runs, *cut.lone.values()):
        run.predicted = run.predicted_at_pace = None
    cut.runs.append(run_of(DISAGGREGATED, 3.0, 0, 0))
    path = tmp_path / "results.json"
    recorded(path, cut).save(path)
    (found,) = Recording(path, read_campaigns(path)).finished()
    assert found.rates == [1.0, 2.0]
    assert "| disaggregated, at the run's pace | " in report(found)


def test_a_campaign_without_a_whole_rate_is_not_reported(tmp_path: Path) -> None:
    kept, begun = campaign(), replace(campaign(), model="n")
    begun.runs = begun.runs[:1]
    path = tmp_path / "results.json"
    assert [c.model for c in recorded(path, kept, begun).finished()] == ["m"]
    with pytest.raises(ConfigError, match=r"results\.json: holds no rate that every system was measured at"):
        Recording(path, [begun]).finished()


def test_a_recording_keeps_all_other_campaigns(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    old, other, new = campaign(), replace(campaign(), workload=WORKLOADS[1]), campaign()
    new.runs = new.runs[:2]
    recording = Recording(path, [old, other])
    recording.keep(new)
    assert [(c.workload.label, len(c.runs)) for c in read_campaigns(path)] == [("code", 6), ("chat", 2)]


def test_a_resumed_run_measures_what_is_missing() -> None:
    plan = TestbedPlan(models=("m",), rates=2, run_s=20.0, repeats=3, lone_requests=3)
    begun = campaign()
    begun.runs = [
        run_of(system, rate, repeat, 0, plan.requests(rate))
        for rate, repeat in plan.turns(begun.rates, begun.repeated_rate)
        for system in begun.systems
    ]
    assert belongs(begun, plan, 2)
    assert missing_turns(begun, plan) == []
    begun.runs = begun.runs[:5]  # the third turn lacks a system
    assert belongs(begun, plan, 2)
    assert missing_turns(begun, plan) == [(2.0, 2), (1.0, 0)]
    assert not belongs(begun, plan, 3), "a system more"
    assert belongs(replace(begun, workload=begun.workload.sizes[2]), plan, 2), "as a slower core is asked"
    longer = replace(WORKLOADS[0], scale=0.3)
    for other in (
        replace(plan, run_s=30.0),
        replace(plan, repeats=2),
        replace(plan, rates=3),
        replace(plan, lone_requests=4),
        replace(plan, models=("n",)),
        replace(plan, workloads=(longer,)),
    ):
        assert not belongs(begun, other, 2), other


def test_going_on_under_another_plan_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.json"
    recorded(path, replace(campaign(), model=TestbedPlan.models[0])).save(path)
    before = path.read_bytes()
    assert main(["testbed", "--quick", "--resume", "--output", str(tmp_path)]) != 0
    assert "results.json holds chat of cache:smollm2" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_a_report_made_again_goes_beside_what_it_is_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "results.json"
    recorded(path, campaign()).save(path)
    assert main(["testbed", "--again", str(tmp_path / "results.json")]) == 0
    assert (tmp_path / "report.md").read_text() == capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{", "not a results.json"),
        ('{"campaigns": []}', "'schema'"),
        ('{"schema": "testbed/2", "campaigns": []}', "testbed/3"),
        ('{"schema": "testbed/3", "campaigns": []}', "holds no rate that every system was measured at"),
        ('{"schema": "testbed/3", "campaigns": [{}]}', "'lone'"),
    ],
)
def test_a_file_that_is_no_record_is_named(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        Recording(path, read_campaigns(path)).finished()
    assert str(path) in str(caught.value)


def test_processor_time_beside_engines_is_taken_of_lone_requests_and_repeats() -> None:
    busy = campaign()
    points = beside_engines(busy, DISAGGREGATED)
    assert len(points) == 3  # lone requests, and two repeats of the middle rate
    assert points[0] == (busy.lone[DISAGGREGATED].tokens / 10.0, pytest.approx(0.01))


def test_the_comparison_without_a_server_names_a_best_system() -> None:
    text = simulated_goodputs(profile(), WORKLOADS[:1], LIMITS)
    rows = [line for line in text.splitlines() if line.startswith("| chat")]
    assert len(rows) == 8  # four objectives, two targets
    assert any("disaggregated |" in row or "prefill |" in row for row in rows)


def test_the_factor_of_a_disturbance_is_the_median_of_rounds_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lone_engine, "CHANGE_S", 0.0)
    switched: list[bool] = []
    calls = iter(range(10_000))

    def step_s() -> float:
        outlier = 50.0 if next(calls) % 25 == 24 else 1.0
        return outlier * (1.5 if switched[-1] else 1.0)

    assert lone_engine.factor(step_s, switched.append) == pytest.approx(1.5)
    assert switched == [False, True] * lone_engine.ROUNDS + [False]  # and it ends undisturbed
