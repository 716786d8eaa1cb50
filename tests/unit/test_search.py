"""The search: families, objectives, bounds, reasons, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from distserve.core.parsing import ConfigError
from distserve.core.shapes import Shape
from distserve_planner.cluster import Cluster, Link
from distserve_planner.devices import latency_model
from distserve_planner.goodput import Goodput, Precision, Requests
from distserve_planner.placement import placement_of
from distserve_planner.placement_check import check_placement
from distserve_planner.placement_file import parse_placement
from distserve_planner.render import render
from distserve_planner.report.arguments import placed_deployment
from distserve_planner.search.algorithm1 import Candidate, combinations, replicas
from distserve_planner.search.algorithm2 import bounded_units
from distserve_planner.search.assignment import assign
from distserve_planner.search.bounds import decode_ceiling, prefill_ceiling, system_ceiling
from distserve_planner.search.candidates import pairs, phase_tasks, shapes, tp_degrees
from distserve_planner.search.deployment import Deployment, Group
from distserve_planner.search.evaluate import evaluate
from distserve_planner.search.least_devices import least_devices
from distserve_planner.search.problem import Assumptions, Problem
from distserve_planner.search.ranking import rank
from distserve_planner.search.result import Objective, SearchResult
from distserve_planner.search.result_file import from_values, to_values
from distserve_planner.search.search import search
from distserve_planner.search.system_spec import system_spec
from distserve_planner.search.tasks import DeploymentTask, PhaseTask, Result, Task
from distserve_planner.search.workers import Done, Workers
from distserve_planner.slo import Slo
from distserve_planner.workload import named_workload

QUICK = Precision(150, 300, 150, step=0.1)
LONG = Precision(300, 600, 300, step=0.1)


def problem(
    model: str = "opt-13b",
    nodes: int = 1,
    devices: int = 4,
    slo: Slo | None = None,
    network: float = 25e9 / 8,
    **assumptions: object,
) -> Problem:
    cluster = Cluster.uniform(
        nodes,
        devices,
        device="a100-80g",
        device_memory_bytes=80 << 30,
        intra=Link(3e11, 1e-5),
        inter=Link(network, 1e-5),
    )
    return Problem(
        latency_model("a100-80g", model),
        cluster,
        Requests(named_workload("sharegpt").resample(1, 1.0, 2500)),
        slo or Slo(0.4, 0.1),
        Assumptions(chunk_tokens=(512,), **assumptions),  # type: ignore[arg-type]
        QUICK,
        LONG,
        unified_latency=latency_model("a100-80g-vllm", model),
    )


def unit(prefill: Shape, decode: Shape, segments: int = 1) -> Deployment:
    return Deployment("low", Group(prefill, 1, segments), Group(decode, 1, segments))


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return search(problem(devices=3), Objective(), jobs=1)


def test_every_family_is_tried_and_explained(found: SearchResult) -> None:
    assert set(found.family_best) == {"high", "low", "prefill_first", "chunked_prefill"}
    assert found.winner.reason == "best"
    scores = [row.score for row in found.rows]
    assert found.winner.score == max(scores)
    for row in found.rows:
        assert row.reason
        if row.deployment != found.winner.deployment:
            assert any(
                word in row.reason for word in ("TTFT", "TPOT", "cannot win", "memory", "devices", "%")
            ), row.reason


def test_winner_is_validated_jointly_and_confirmed_by_a_long_run(found: SearchResult) -> None:
    entry = found.winner.entry
    assert entry is not None
    assert entry.long
    assert entry.at is not None
    assert entry.at.both >= 0.9
    assert entry.at.requests >= LONG.min_requests
    assert found.diagnosis is not None
    assert found.diagnosis.rate == entry.rate


def test_result_does_not_depend_on_the_number_of_processes(found: SearchResult) -> None:
    again = search(problem(devices=3), Objective(), jobs=2)
    assert again.winner.deployment == found.winner.deployment
    assert again.winner.score == found.winner.score


def test_bounds_are_optimistic() -> None:
    """No joint goodput is above the closed-form ceiling or what its phases reach alone."""
    given = problem()
    for deployment in (
        unit(Shape(2, 1), Shape(1, 1)),
        unit(Shape(1, 2), Shape(2, 1)),
        unit(Shape(1, 1), Shape(1, 1)),
    ):
        joint = evaluate(given, DeploymentTask(deployment))
        assert isinstance(joint, Goodput)
        placed = assign(deployment, given.cluster)
        assert placed is not None
        assert joint.rate <= system_ceiling(given, system_spec(given, deployment, placed))
        phases = {}
        for task in phase_tasks(given, (), [deployment]):
            result = evaluate(given, task)
            assert isinstance(result, Goodput)
            phases[task] = result
            spec = given.instance(task.shape, cross_hops=task.cross_hops)
            ceiling = (prefill_ceiling if task.role == "prefill" else decode_ceiling)(given, spec)
            assert result.rate <= ceiling
        bound = bounded_units(given, [deployment], phases)[0].predicted
        assert joint.rate <= bound * (1 + QUICK.step)


def test_pruned_search_finds_what_trying_everything_finds() -> None:
    given = replace(problem(slo=Slo(0.3, 0.08)), families=("low",))
    result = search(given, Objective(), jobs=1)
    best = 0.0
    for deployment in pairs(given, shapes(given).fitting):
        joint = evaluate(given, DeploymentTask(deployment, long=True))
        assert isinstance(joint, Goodput)
        best = max(best, joint.rate / deployment.devices)
    assert result.winner.score >= best / (1 + QUICK.step)


def test_algorithm_1_replicates_each_phase_for_the_rate() -> None:
    given = problem(devices=16)
    prefill, decode = PhaseTask("prefill", Shape(2, 1)), PhaseTask("decode", Shape(1, 1))
    phases = {prefill: Goodput(4.0, None, None), decode: Goodput(3.0, None, None)}
    best = replicas(given, phases, rate=10.0, keep=1)[0].deployment
    assert best.prefill == Group(Shape(2, 1), 3)
    assert best.decode == Group(Shape(1, 1), 4)
    combined = combinations(given, phases, per_device=True, keep=1)[0]
    # 3 prefill and 4 decode instances balance: 12 requests/s on 10 devices
    assert combined.predicted / combined.deployment.devices == pytest.approx(1.2)


def test_algorithm_1_prefers_numbers_whose_kv_stays_on_a_node() -> None:
    """5 prefill and 2 decode instances balance best, but the KV of OPT-66B does not pass 25 Gbps cards."""
    prefill, decode = PhaseTask("prefill", Shape(4, 1)), PhaseTask("decode", Shape(4, 1))
    phases = {prefill: Goodput(3.0, None, None), decode: Goodput(7.5, None, None)}
    slow = problem("opt-66b", nodes=4, devices=8)
    found = combinations(slow, phases, per_device=True, keep=1)[0]
    assert (found.deployment.prefill, found.deployment.decode) == (Group(Shape(4, 1)), Group(Shape(4, 1)))
    assert found.predicted == pytest.approx(3.0)
    fast = problem("opt-66b", nodes=4, devices=8, network=3e11)
    balanced = combinations(fast, phases, per_device=True, keep=1)[0].deployment
    assert (balanced.prefill, balanced.decode) == (Group(Shape(4, 1), 5), Group(Shape(4, 1), 2))
    first = replicas(slow, phases, rate=3.0, keep=2)[0]
    assert first.predicted >= 3.0


def test_least_devices_meets_the_rate_with_both_objectives() -> None:
    given = replace(problem(devices=6), families=("high", "low", "prefill_first"))
    result = search(given, Objective("least-devices", 5.0), jobs=1)
    devices = result.winner.deployment.devices
    assert devices < 6
    entry = result.winner.entry
    assert entry is not None
    assert entry.rate == 5.0
    assert entry.at is not None
    assert entry.at.both >= 0.9
    for row in result.family_best.values():
        assert row.score == 0 or row.deployment.devices >= devices


def test_deployments_of_the_same_name_are_told_apart() -> None:
    given = replace(problem(nodes=2, devices=4), families=("low",))
    on_one_node, on_two = (
        Candidate(Deployment("low", prefill=group, decode=group), 50.0)
        for group in (Group(Shape(1, 2), 1, segments) for segments in (1, 2))
    )
    assert str(on_one_node.deployment) == str(on_two.deployment)
    with Workers(given, 2) as workers:  # both in one wave: the search ends with the first that passes
        rows = least_devices(workers, given, [on_one_node, on_two], rate=0.5)
    passed = [row.deployment for row in rows if row.rate]
    assert sorted(d.prefill.segments for d in passed if d.prefill) == [1, 2]


def test_tightest_scale_and_offline_throughput() -> None:
    given = replace(problem(), families=("low", "prefill_first"))
    scale = search(given, Objective("slo-scale", 3.0), jobs=1)
    tighter = 1 / scale.winner.score
    assert tighter < 1
    # at that scale the objectives are just met, at a tenth less they are not
    relaxed = replace(given, slo=given.slo.scaled(tighter * 1.1))
    task = DeploymentTask(scale.winner.deployment, floor=3.0 / scale.winner.deployment.devices)
    seen = evaluate(relaxed, task)
    assert isinstance(seen, Goodput)
    assert seen.rate > 0
    offline = search(given, Objective("throughput"), jobs=1)
    assert offline.winner.score > 0
    assert "tokens/s" in offline.winner.figure
    split = [row.reason for row in offline.rows if row.deployment.family == "low"]
    assert all("limited by" in why and "% of the time" in why for why in split if why != "best")


def test_free_hops_and_transfers_never_hurt() -> None:
    slow = problem(model="opt-13b", nodes=2, devices=2, network=1e8)
    free = problem(model="opt-13b", nodes=2, devices=2, network=1e8, hop="free", transfer="free")
    deployment = unit(Shape(1, 2), Shape(1, 2), segments=2)
    rates = []
    for given in (slow, free):
        joint = evaluate(given, DeploymentTask(deployment))
        assert isinstance(joint, Goodput)
        rates.append(joint.rate)
    assert rates[0] < rates[1]


def test_slow_network_is_named_as_the_reason() -> None:
    given = replace(problem(nodes=2, devices=2, network=4e8), families=("high",))
    result = search(given, Objective("cluster"), jobs=1)
    assert any("moving KV takes" in row.reason for row in result.rows)


def test_reserving_more_admits_fewer() -> None:
    assert problem(reserve="prompt").reserve_tokens == 0
    assert problem(reserve="max").reserve_tokens is None
    expected = problem(reserve="expected")
    assert expected.reserve_tokens == round(expected.requests.mean_output)


@pytest.mark.parametrize(
    ("rule", "degrees"),
    [("divisors", (1, 2, 3, 4, 6, 8)), ("powers_of_two", (1, 2, 4, 8)), ("all", tuple(range(1, 9)))],
)
def test_tp_candidates(rule: str, degrees: tuple[int, ...]) -> None:
    assert tp_degrees(latency_model("a100-80g", "opt-66b").model, 8, rule) == degrees


def test_algorithm_2_keeps_segments_on_a_node() -> None:
    given = problem("opt-66b", nodes=2, devices=8)
    units = pairs(given, shapes(given).fitting)
    assert units
    for candidate in units:
        placed = assign(candidate, given.cluster)
        assert placed is not None
        assert placed[0].nodes == placed[1].nodes
        assert candidate.prefill is not None
        assert len(placed[0].nodes) == candidate.prefill.segments


def test_kv_of_a_pair_on_its_nodes_stays_off_the_network() -> None:
    given = problem("opt-66b", nodes=2, devices=8)
    deployment = unit(Shape(1, 4), Shape(3, 2), segments=2)
    placed = assign(deployment, given.cluster)
    assert placed is not None
    route = system_spec(given, deployment, placed).routes[0, 0]
    assert all(port >= 1 << 20 for port in route.ports)  # NVLink ends only, no network card
    apart = Deployment("high", Group(Shape(8, 1)), Group(Shape(8, 1)))
    placed = assign(apart, given.cluster)
    assert placed is not None
    route = system_spec(given, apart, placed).routes[0, 0]
    assert {0, 3} <= set(route.ports) or {1, 2} <= set(route.ports)
    per_token = given.model.kv_bytes_per_token("fp16")
    # 10 prompts of 512 tokens a second are 90 Gbps (paper, section 3.3): more than three times 25 Gbps
    assert 10 * 512 * route.s_per_token == pytest.approx(10 * 512 * per_token / (25e9 / 8))
    assert 10 * 512 * per_token * 8 / 2**30 == pytest.approx(90, rel=0.01)


def test_what_cannot_work_is_refused_with_the_fix() -> None:
    with pytest.raises(
        ConfigError, match=r"tpot_s=0\.001: impossible even for a lone request; the best reachable"
    ):
        search(problem(slo=Slo(0.4, 0.001)), Objective(), jobs=1)
    with pytest.raises(
        ConfigError, match=r"2 devices of 80 GiB cannot hold opt-175b; its weights alone need \d"
    ):
        search(problem("opt-175b", devices=2), Objective(), jobs=1)
    with pytest.raises(ConfigError, match="needs a target rate"):
        Objective("least-devices")
    with pytest.raises(ConfigError, match="rate=-1: must be above 0"):
        Objective("least-devices", -1)
    with pytest.raises(ConfigError, match="rate=500"):
        search(replace(problem(), families=("low",)), Objective("least-devices", 500.0), jobs=1)


def test_winner_becomes_a_placement_that_is_sound(found: SearchResult) -> None:
    text = placement_of(problem(devices=3), found, "some/folder", "sharegpt").dump()
    file = parse_placement(text)
    check_placement(file)
    assert len(file.placement.instances) == len(found.placed)
    config = file.placement.engine_config(0)
    assert config.max_batch_size == 512
    assert config.num_blocks is not None
    predicted = file.placement.predicted
    assert predicted is not None
    assert predicted["attainment"]["both"] >= 0.9
    assert predicted["slo"] == {"ttft_s": 0.4, "tpot_s": 0.1, "attainment": 0.9}


def test_a_winner_over_several_nodes_becomes_a_placement_and_a_repository_per_node(
    found: SearchResult,
) -> None:
    given = problem(nodes=3, devices=4)
    deployment = unit(Shape(2, 2), Shape(1, 4), segments=2)
    placed = assign(deployment, given.cluster)
    assert placed is not None
    result = replace(found, winner=replace(found.winner, deployment=deployment), placed=placed)
    with pytest.raises(ConfigError, match=r"prefill_0 .* lies on node0, node1; give --grpc-port"):
        placement_of(given, result, "some/folder", "sharegpt")
    placement = placement_of(given, result, "some/folder", "sharegpt", 8101, "/etc/secret")
    assert placement.transfer_secret_file == "/etc/secret"
    check_placement(parse_placement(placement.dump()))
    prefill, decode = placement.instances
    # segments of the same layers share a node, and no device is given twice
    assert prefill.nodes == ("node0", "node0", "node1", "node1")
    assert decode.nodes == ("node0", "node0", "node1", "node1")
    used = [
        *zip(prefill.nodes, prefill.devices, strict=True),
        *zip(decode.nodes, decode.devices, strict=True),
    ]
    assert len(set(used)) == len(used) == 8
    files = render(placement)
    assert {path.split("/")[0] for path in files} == {"node0", "node1", "launch.yaml"}
    assert "node0/prefill_0/config.pbtxt" in files
    assert placed_deployment(placement, "file") == deployment


def test_several_pairs_are_groups_and_come_back_as_pairs(found: SearchResult) -> None:
    given = problem(devices=4)
    deployment = unit(Shape(1, 1), Shape(1, 1)).with_units(2)
    placed = assign(deployment, given.cluster)
    assert placed is not None
    result = replace(found, winner=replace(found.winner, deployment=deployment), placed=placed)
    placement = placement_of(given, result, "some/folder", "sharegpt")
    assert [i.group for i in placement.instances] == ["pair_0", "pair_1", "pair_0", "pair_1"]
    assert placed_deployment(parse_placement(placement.dump()).placement, "file") == deployment


def test_a_result_survives_its_file(found: SearchResult) -> None:
    given = problem(devices=3)
    text = json.dumps(to_values(given, found), allow_nan=False)
    searched, again = from_values(given, json.loads(text), "result.json")
    assert again == found
    assert searched.families == given.families
    with pytest.raises(ConfigError, match=r"result\.json: .* have changed since this search"):
        from_values(problem(devices=4), json.loads(text), "result.json")


def test_worker_errors_reach_the_caller() -> None:
    with Workers(problem(), 1) as workers, pytest.raises(ValueError, match="does not fit"):
        workers.map([DeploymentTask(unit(Shape(4, 1), Shape(4, 1)))])


def test_requests_are_the_same_at_every_rate() -> None:
    given = problem().requests
    assert np.all(np.diff(given.times) >= 0)
    assert (len(given) - 1) / given.times[-1] == pytest.approx(1.0)


class ScriptedWorkers(Workers):
    """Goodputs from a table: per deployment what a short run finds, and a long one."""

    def __init__(self, rates: dict[Deployment, tuple[float, float]]) -> None:
        super().__init__(problem(), 1)
        self.rates = rates
        self.asked: list[Deployment] = []

    def map(self, tasks: Sequence[Task], done: Done | None = None) -> list[Result]:
        results: list[Result] = []
        for task in tasks:
            assert isinstance(task, DeploymentTask)
            self.asked.append(task.deployment)
            rate = self.rates[task.deployment][task.long]
            met = rate >= task.floor * task.deployment.devices
            results.append(Goodput(rate if met else 0.0, None, None))
        return results


def test_candidates_that_missed_a_rate_which_did_not_last_are_tried_again() -> None:
    one, slow, two, three, four = (unit(Shape(1, 1), Shape(1, pp)) for pp in range(1, 6))
    rates = {one: (10.0, 6.0), slow: (1.0, 1.0), two: (8.0, 8.0), three: (7.5, 7.5), four: (5.0, 5.0)}
    workers = ScriptedWorkers(rates)
    bounds = {one: 12.0, slow: 11.5, two: 11.0, three: 9.0, four: 7.0}  # the first two are tried at once
    found = rank(workers, [Candidate(d, bound) for d, bound in bounds.items()], lambda deployment: 1.0)
    assert (found[0].deployment, found[0].rate, found[0].long) == (two, 8.0, True)
    assert four not in workers.asked  # its bound is below what lasted
