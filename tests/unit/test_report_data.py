"""The numbers behind the report's figures."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf, isfinite

import numpy as np
import pytest

from distserve.core.parsing import ConfigError
from distserve.core.shapes import Shape
from distserve_planner.cluster import Cluster, Link
from distserve_planner.coefficients import DecodePiece, Degree, PrefillPiece
from distserve_planner.devices.catalog import device_spec, latency_model
from distserve_planner.goodput import Precision, Requests
from distserve_planner.latency import LatencyModel
from distserve_planner.placement_file import parse_placement
from distserve_planner.queueing import crossover_rate, pipeline_ttft_s, two_way_tensor_ttft_s
from distserve_planner.report.ablation import ablation
from distserve_planner.report.arguments import parse_shape, placed_deployment
from distserve_planner.report.attainment_curves import AttainmentCurves, crossing
from distserve_planner.report.crossover import SPEEDUPS, crossover, meeting_rate
from distserve_planner.report.decode_parallelism import decode_parallelism
from distserve_planner.report.document import plain
from distserve_planner.report.effort import Effort
from distserve_planner.report.interference import beside, leaves
from distserve_planner.report.lengths import lengths
from distserve_planner.report.parallel import map_tasks
from distserve_planner.report.points import PointTask, Swept, rate_grid, simulate_point
from distserve_planner.report.ratio import best_share, mix_rate
from distserve_planner.report.scaling import cluster_sizes, replicated
from distserve_planner.report.search_time import measure
from distserve_planner.report.systems import smallest_shape, usual_shape, with_nodes
from distserve_planner.report.throughput import throughput
from distserve_planner.search.candidates import shapes
from distserve_planner.search.deployment import Deployment, Group
from distserve_planner.search.problem import Problem
from distserve_planner.slo import Slo
from distserve_planner.workload import named_workload

GIB = 1 << 30
TINY = replace(
    Effort.quick(),
    precision=Precision(100, 200, 100, step=0.2),
    long_precision=Precision(100, 200, 100, step=0.2),
    curve_requests=100,
)


def problem(model: str = "opt-13b", nodes: int = 1, devices: int = 4, slo: Slo | None = None) -> Problem:
    spec = device_spec("a100-80g")
    cluster = Cluster.uniform(
        nodes,
        devices,
        device="a100-80g",
        device_memory_bytes=spec.memory_bytes,
        intra=spec.intra,
        inter=spec.inter,
    )
    requests = Requests(named_workload("sharegpt").resample(0, 1.0, 3000))
    return Problem(
        latency_model("a100-80g", model), cluster, requests, slo or Slo(0.25, 0.1), precision=TINY.precision
    )


def test_lm_is_the_shortest_prompt_with_95_percent_of_the_best_rate() -> None:
    data = throughput(problem(), Shape(1, 1))
    one = dict(zip(data.lengths, data.prefill[0].tokens_s, strict=True))
    assert one[data.lm_tokens] >= 0.95 * data.best_tokens_s > one[data.lm_tokens - 16]


def test_decode_throughput_grows_with_the_batch_and_ends_with_memory() -> None:
    case = problem()
    data = throughput(case, Shape(1, 1))
    for curve in data.decode:
        finite = [rate for rate in curve.tokens_s if isfinite(rate)]
        assert len(finite) == min(256, case.instance(Shape(1, 1)).kv_tokens // curve.context)
        assert finite[:90] == sorted(finite[:90])


def test_tpot_marker_is_the_largest_batch_within_the_objective() -> None:
    loose = throughput(problem(slo=Slo(0.25, 0.05)), Shape(1, 1))
    tight = throughput(problem(slo=Slo(0.25, 0.03)), Shape(1, 1))
    assert 0 < tight.tpot_batch < loose.tpot_batch
    assert tight.tpot_limits
    assert not throughput(problem(slo=Slo(0.25, 10)), Shape(1, 1)).tpot_limits
    assert throughput(problem(slo=Slo(0.25, 0.001)), Shape(1, 1)).tpot_batch == 0


def test_effect_of_k_crosses_where_equation_3_meets_equation_2() -> None:
    data = crossover(problem(), TINY)
    assert [effect.speedup for effect in data.effects] == list(SPEEDUPS)
    for effect in data.effects:
        assert effect.crossover == pytest.approx(crossover_rate(1.0, effect.speedup))
        above = np.array(effect.ttft) > np.array(data.pipeline_ttft)
        first = data.loads[int(np.argmax(above))]
        assert effect.crossover is not None
        assert effect.crossover <= first <= effect.crossover + 2 * data.loads[1]


def test_crossover_of_the_case_is_where_its_two_lines_meet() -> None:
    data = crossover(problem(), TINY)
    assert data.crossover is not None
    tensor = two_way_tensor_ttft_s(data.crossover, data.service_s, data.speedup)
    pipeline = pipeline_ttft_s(data.crossover, data.pipeline_total_s, data.pipeline_stage_s)
    assert tensor == pytest.approx(pipeline, rel=1e-6)


@pytest.mark.parametrize(
    ("total", "stage", "expected"), [(1.0, 0.9, None), (0.5, 0.45, 0.0), (0.5, 0.9, 0.0)]
)
def test_one_kind_of_parallelism_may_always_be_better(total: float, stage: float, expected: float) -> None:
    # K = 1.25: tensor parallelism takes 0.8; stages of 0.9 saturate before it, stages of 0.45 never
    assert meeting_rate(1.0, 1.25, total, stage) == expected


def test_simulated_dots_lie_on_the_closed_forms() -> None:
    data = crossover(problem(), replace(TINY, curve_requests=1000))
    for rate, tensor, pipeline in zip(
        data.simulated_rates[:4], data.simulated_tensor_s, data.simulated_pipeline_s, strict=False
    ):
        assert tensor == pytest.approx(two_way_tensor_ttft_s(rate, data.service_s, data.speedup), rel=0.05)
        expected = pipeline_ttft_s(rate, data.pipeline_total_s, data.pipeline_stage_s)
        assert pipeline == pytest.approx(expected, rel=0.05)


def test_a_model_that_cannot_be_split_has_no_crossover() -> None:
    degree = Degree(1, (PrefillPiece(0.1, 0.0),), (DecodePiece(0.02, 0.0),))
    case = problem()
    model = replace(case.model, num_heads=1, num_kv_heads=1, head_dim=case.model.hidden_size)
    alone = replace(case, latency=LatencyModel("one-head", model, "test", "fp16", (degree,)))
    with pytest.raises(ConfigError, match="tp"):
        crossover(alone, TINY)


def test_a_step_with_a_prompt_takes_longer_than_without() -> None:
    short, long = beside(problem(), Shape(1, 1))
    for step in (short, long):
        assert all(mixed > alone for mixed, alone in zip(step.mixed_s, step.decode_s, strict=True))
    assert (short.prompt_tokens, long.prompt_tokens) == (128, 1024)
    assert long.mixed_s[-1] - long.decode_s[-1] > short.mixed_s[-1] - short.decode_s[-1]


def test_tensor_parallelism_shortens_a_round_and_stages_multiply_throughput() -> None:
    data = decode_parallelism(problem())
    assert list(data.tensor.tpot_s) == sorted(data.tensor.tpot_s, reverse=True)
    assert list(data.pipeline.tokens_s) == sorted(data.pipeline.tokens_s)
    assert data.pipeline.tokens_s[-1] > data.tensor.tokens_s[-1]
    assert dict(zip(data.tensor.devices, data.tensor.predicted, strict=True)) == {
        1: False, 2: False, 4: False, 8: True,
    }  # fmt: skip


def test_lengths_keep_every_request() -> None:
    data = lengths("w", [10, 10, 2000, 30], [1, 2, 3, 4])
    assert sum(data.input.shares) == pytest.approx(1)
    assert data.input.mean == 512.5
    assert data.input.max == 2000
    assert len(data.output.edges) == len(data.output.shares) + 1


def test_attainment_does_not_rise_with_rate_or_with_tighter_objectives() -> None:
    case = problem()
    deployment = Deployment("high", Group(Shape(1, 2)), Group(Shape(2, 1)))
    scales = (0.5, 1.0, 2.0)
    points = [simulate_point(case, PointTask(deployment, rate, 400, scales)) for rate in (2.0, 8.0, 14.0)]
    for slower, faster in pairwise(points):
        assert faster.both <= slower.high + 0.02
    for point in points:
        assert list(point.at_scales) == sorted(point.at_scales)
        assert point.at_scales[1] == point.both
        assert point.low <= point.both <= point.high
        assert point.both <= min(point.ttft, point.tpot)
        assert list(point.transfer_s) == sorted(point.transfer_s)
        assert len(point.stages_s) == 5


def test_a_deployment_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        simulate_point(problem(), PointTask(Deployment("prefill_first", unified=Group(Shape(8, 1))), 1.0, 10))


@pytest.mark.parametrize(
    ("shares", "expected"), [((0.0, 0.8, 1.0), 1.5), ((0.95, 1.0, 1.0), 0.5), ((0.1, 0.2, 0.3), None)]
)
def test_crossing_is_interpolated(shares: tuple[float, ...], expected: float | None) -> None:
    assert crossing((0.5, 1.0, 2.0), shares, 0.9) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "expected"), [((1, 2, 4), 2.5), ((1, 1, 2), 3.0), ((4, 5, 6), None), ((1, inf, inf), 1.0)]
)
def test_a_latency_leaves_its_objective(values: tuple[float, ...], expected: float | None) -> None:
    assert leaves((1.0, 2.0, 3.0), values, 3.0) == pytest.approx(expected)


def curves(**goodputs: float) -> AttainmentCurves:
    swept = tuple(Swept(role, role, role, 1, goodput, ()) for role, goodput in goodputs.items())
    return AttainmentCurves(0.9, 1.0, 0.1, swept, 1.0, (), {}, {})


@pytest.mark.parametrize(
    ("goodputs", "follows"),
    [
        ({"high": 3.0, "low": 2.95, "best": 1.0, "vllm": 1.0}, True),
        ({"high": 2.0, "low": 3.0, "best": 1.0, "vllm": 1.0}, False),
        ({"high": 3.0, "low": 2.0, "best": 2.5, "vllm": 1.0}, False),
        ({"high": 3.0, "best": 1.0, "vllm": 1.0}, False),
    ],
)
def test_ablation_says_whether_the_papers_order_holds(goodputs: dict[str, float], follows: bool) -> None:
    data = ablation(curves(**goodputs))
    assert data.follows_paper is follows
    assert [bar.role for bar in data.bars] == [r for r in ("high", "low", "best", "vllm") if r in goodputs]


def test_balanced_ratio_has_equal_rates_of_both_phases() -> None:
    share = best_share(3.0, 1.0)
    assert share * 3.0 == pytest.approx((1 - share) * 1.0)
    assert mix_rate(2, 1.5, 3, 0.5) == 1.5


def test_replicated_units_fill_a_cluster_and_leave_the_rest() -> None:
    two, three = (Deployment("prefill_first", unified=Group(Shape(n, 1))) for n in (2, 3))
    steps = replicated((1, 2, 3, 4, 5, 6), [(two, 1.0), (three, 2.0)])
    assert [step.predicted for step in steps] == [0, 1, 2, 2, 2, 4]
    assert steps[0].deployment == ""
    assert "tp 3" in steps[-1].deployment


def test_cluster_sizes_are_devices_of_a_node_then_whole_nodes() -> None:
    case = problem(nodes=3, devices=2)
    assert cluster_sizes(case) == (1, 2, 4, 6)
    assert [with_nodes(case, n).cluster.num_devices for n in (1, 2, 4, 6, 8)] == [1, 2, 4, 6, 8]


@pytest.mark.parametrize(("model", "tp"), [("opt-13b", 1), ("opt-66b", 4), ("opt-175b", 8)])
def test_usual_parallelism_of_vllm_is_the_papers(model: str, tp: int) -> None:
    case = problem(model, devices=8)
    assert usual_shape(case, shapes(case).fitting) == Shape(tp, 1)


def test_smallest_shape_prefers_tensor_parallelism() -> None:
    assert smallest_shape([Shape(1, 2), Shape(2, 1), Shape(4, 1)]) == Shape(2, 1)


def test_rate_grid_spans_the_systems() -> None:
    rates = rate_grid([2.0, 1.0, 0.0], 5)
    assert rates[0] == pytest.approx(0.25)
    assert rates[-1] == pytest.approx(2.7)
    assert list(rates) == sorted(rates)


def test_tasks_keep_their_order_in_one_process_and_in_several() -> None:
    seen: list[int] = []
    assert map_tasks(abs, [-3, 2, -1], 1, lambda done, total: seen.append(done)) == [3, 2, 1]
    assert seen == [1, 2, 3]
    assert map_tasks(abs, [-3, 2, -1], 2) == [3, 2, 1]


def test_search_time_counts_a_search_that_finds_nothing() -> None:
    ticks = iter((10.0, 12.5))
    timed = measure("s", "v", problem(slo=Slo(1e-3, 1e-3)), 1, lambda: next(ticks))
    assert (timed.seconds, timed.found, timed.devices) == (2.5, False, 4)


def test_what_is_not_finite_is_null_in_json() -> None:
    assert plain({"a": (1, inf), "b": Link(2.0)}) == {
        "a": [1, None], "b": {"bandwidth_bytes_s": 2.0, "latency_s": 0.0},
    }  # fmt: skip


PLACEMENT = """\
schema: placement/1
model: cache:m
instances:
- {role: prefill, devices: [cuda:0, cuda:1], tp: 2}
- {role: prefill, devices: [cuda:2, cuda:3], tp: 2}
- {role: decode, devices: [cuda:4]}
"""


def test_a_placement_file_is_a_deployment() -> None:
    found = placed_deployment(parse_placement(PLACEMENT).placement, "p.yaml")
    assert found == Deployment("high", Group(Shape(2, 1), 2), Group(Shape(1, 1), 1))
    unified = parse_placement(
        "schema: placement/1\nmodel: cache:m\ninstances:\n- {role: unified, devices: [cuda:0]}\n"
    )
    assert placed_deployment(unified.placement, "p.yaml") == Deployment(
        "prefill_first", unified=Group(Shape(1, 1))
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[cuda:2, cuda:3], tp: 2", "[cuda:2], tp: 1", "prefill instances differ"),
        ("- {role: decode, devices: [cuda:4]}\n", "", "no decode instance"),
        ("role: decode", "role: unified", "unified beside"),
    ],
)
def test_placements_that_a_report_cannot_draw_are_refused(old: str, new: str, message: str) -> None:
    placement = parse_placement(PLACEMENT.replace(old, new)).placement
    with pytest.raises(ConfigError, match=message):
        placed_deployment(placement, "p.yaml")


@pytest.mark.parametrize("text", ["4", "4,", "0,1", "a,b", "1,2,3"])
def test_a_bad_shape_names_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--vllm-shape="):
        parse_shape(text, "--vllm-shape")
