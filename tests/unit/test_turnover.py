"""The load that turns: its requests, its placement, and how a pass is cut into phases."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from distserve.core.model_config import ModelConfig
from distserve.core.shapes import Shape
from distserve_planner.coefficients import DecodePiece, Degree, PrefillPiece
from distserve_planner.commands import watch
from distserve_planner.placement_file import parse_placement
from distserve_planner.planning_options import planning_problem
from distserve_planner.profile_file import Profile
from distserve_planner.report.arguments import placed_deployment
from distserve_planner.search.deployment import Deployment, Group
from distserve_planner.watch.choose import recent_problem, simulated
from distserve_planner.workload import Trace
from distserve_tools.load.record import Record
from distserve_tools.turnover.command import attainment, phases
from distserve_tools.turnover.run import Pass, Sample
from distserve_tools.turnover.scenario import SPREAD, Mix, Scenario

SCENARIO = Scenario("some/folder", Mix(300, 10), Mix(20, 100), 5.0, 1.5, 0.06, first_s=60.0, second_s=120.0)
MODEL = ModelConfig(
    arch="llama", model_type="llama", hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16,
    ffn_size=128, vocab_size=1000, max_context=2048,
)  # fmt: skip
TWO_PREFILLS, TURNED = {"prefill": 2, "decode": 1}, {"prefill": 1, "decode": 2}


def test_the_mix_turns_and_the_rate_stays() -> None:
    trace = SCENARIO.trace()
    before = trace.arrival_s < 60.0
    for side, first, second in ((trace.input_tokens, 300, 20), (trace.output_tokens, 10, 100)):
        assert side[before].mean() == pytest.approx(first, rel=0.1)
        assert side[~before].mean() == pytest.approx(second, rel=0.1)
        assert np.abs(side / np.where(before, first, second) - 1).max() <= SPREAD + 0.1
    assert before.sum() / 60.0 == pytest.approx(5.0, rel=0.15)
    assert (~before).sum() / 120.0 == pytest.approx(5.0, rel=0.15)


def test_the_planner_wants_the_change_on_a_core_of_any_speed(tmp_path: Path) -> None:
    for times in (1.0, 3.0):
        prefill, decode = PrefillPiece(7e-3 * times, 0.9e-3 * times), DecodePiece(21e-3 * times, 1e-6 * times)
        core = Profile("cpu", "m", MODEL, "fp32", (Degree(1, (prefill,), (decode,)),), lm_tokens=64)
        core.save(tmp_path / "core.yaml")
        scenario = Scenario.sized("m", core)
        parser = argparse.ArgumentParser()
        watch.add_arguments(parser)
        problem, _ = planning_problem(parser.parse_args(scenario.watch_words(tmp_path / "core.yaml")))
        trace = scenario.trace()
        before = trace.arrival_s < scenario.first_s
        for part, fits, misses in ((before, (2, 1), None), (~before, (1, 2), (2, 1))):
            columns = (trace.arrival_s[part], trace.input_tokens[part], trace.output_tokens[part])
            run = simulated(recent_problem(problem, Trace(*columns)))
            one = Shape(1, 1)
            for counts, meets in ((fits, True), (misses, False)):
                if counts is not None:
                    n, m = counts
                    found = run(Deployment("high", Group(one, n), Group(one, m)), 1.1 * scenario.rate_rps)
                    assert found.meets == meets, (times, counts, found)


def test_the_placement_is_one_that_can_be_turned() -> None:
    text = SCENARIO.placement((0, 1), 64, Path("requests.jsonl"))
    placement = parse_placement(text).placement
    found = placed_deployment(placement, "")
    assert (found.prefill.count, found.decode.count) == (2, 1)  # type: ignore[union-attr]
    # the one that stays (the first) is on the decode instance's core, the other one has a core to itself
    assert [i.devices for i in placement.instances] == [("cpu:1",), ("cpu:0",), ("cpu:1",)]


def test_a_pass_knows_when_the_change_began_and_when_it_was_there() -> None:
    samples = [
        Sample(1.0, TWO_PREFILLS),
        Sample(70.0, TWO_PREFILLS),
        Sample(71.0, {"prefill": 1, "decode": 1}),
        Sample(80.0, TURNED),
        Sample(81.0, TURNED),
    ]
    assert Pass([], samples, TURNED, "").change_s == (71.0, 80.0)
    assert Pass([], samples[:2], TWO_PREFILLS, "").change_s is None


def test_phases_are_cut_by_arrival_and_failures_are_misses() -> None:
    cut = phases(SCENARIO, (100.0, 110.0))
    assert [(p.start_s, p.end_s) for p in cut] == [(0, 60), (60, 100), (100, 110), (110, 180)]
    assert [p.end_s for p in phases(SCENARIO, None)] == [60, 180]
    good = Record(0, 65.0, 20, 65.0, [65.5, 65.55], [1, 1], 65.6)
    late = Record(1, 70.0, 20, 70.0, [75.0, 75.1], [1, 1], 75.1)
    slow = Record(2, 75.0, 20, 75.0, [75.1, 76.1], [1, 1], 76.1)
    failed = Record(3, 99.0, 20, 99.0, end_s=99.1, error="UNAVAILABLE: gone")
    records = [good, late, slow, failed]
    assert len(cut[1].of(records)) == 4
    assert cut[3].of(records) == []
    assert attainment(records, SCENARIO.slo) == 0.25
