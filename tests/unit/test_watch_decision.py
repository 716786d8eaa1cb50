"""When a change pays: hysteresis, the cost of switching, and the placement file that it leads to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distserve.core.parsing import ConfigError
from distserve.core.shapes import Shape
from distserve_planner.cluster import Cluster, Link
from distserve_planner.devices.catalog import latency_model
from distserve_planner.goodput import Requests
from distserve_planner.placement_file import parse_placement
from distserve_planner.report.arguments import placed_deployment
from distserve_planner.search.deployment import Deployment, Group
from distserve_planner.search.problem import Problem
from distserve_planner.slo import Slo
from distserve_planner.watch.carry_out import placement_for
from distserve_planner.watch.decision import Comparison, Switch, SwitchRule, decide, switch_cost
from distserve_planner.workload.named import named_workload

RULE = SwitchRule(horizon_s=1000.0, settle_s=600.0, load_s=20.0, drain_s=30.0)
ONE = Shape(1, 1)


def high(n: int, m: int, prefill: Shape = ONE, decode: Shape = ONE) -> Deployment:
    return Deployment("high", Group(prefill, n), Group(decode, m))


def seen(**values: object) -> Comparison:
    base = Comparison(0.9, 0.95, 0.97, 0.95, 4, 4, Switch(50.0, None, 0), 1e6)
    return replace(base, **values)  # type: ignore[arg-type]


def test_a_repair_must_gain_more_than_the_margin_with_its_cost() -> None:
    assert decide(seen(present=0.6), RULE).change
    assert not decide(seen(present=0.89, wanted=0.90, during=0.89), RULE).change
    # the change itself would cost more than it brings
    long = Switch(900.0, high(1, 1), 0)
    assert not decide(seen(present=0.8, wanted=0.97, during=0.5, switch=long), RULE).change
    assert decide(seen(present=0.8, wanted=0.97, during=0.78, switch=Switch(90.0, None, 0)), RULE).change


def test_a_placement_that_meets_the_target_is_left_alone() -> None:
    assert not decide(seen(present=0.9, wanted=1.0), RULE).change
    assert not decide(seen(present=0.95, wanted=0.99, wanted_devices=6), RULE).change


def test_a_saving_needs_head_room_and_rest_since_the_last_change() -> None:
    fewer = seen(wanted_devices=3, wanted_down=0.93)
    assert decide(fewer, RULE).change
    assert not decide(replace(fewer, wanted_down=0.85), RULE).change
    waits = decide(replace(fewer, since_change_s=100.0), RULE)
    assert not waits.change
    assert waits.retry_s == 500.0
    # more devices for longer than the saving lasts
    assert not decide(replace(fewer, switch=Switch(600.0, None, 3)), RULE).change


def test_the_rule_keeps_a_gap_between_up_and_down() -> None:
    with pytest.raises(ConfigError, match="headroom_down"):
        SwitchRule(headroom_up=0.2, headroom_down=0.2)


def test_what_a_change_takes() -> None:
    assert switch_cost(high(2, 2), high(2, 2), 8, RULE) == Switch(0.0, None, 0)
    assert switch_cost(high(2, 2), high(2, 1), 8, RULE) == Switch(0.0, None, 0)  # only drains
    assert switch_cost(high(2, 2), high(2, 4), 8, RULE) == Switch(20.0, None, 2)  # free devices: loaded first
    turned = switch_cost(high(3, 1), high(1, 3), 4, RULE)  # in place, one after the other
    assert turned == Switch(2 * 50.0, high(2, 1), 0)
    assert switch_cost(high(1, 1), Deployment("prefill_first", unified=Group(ONE, 2)), 2, RULE) == Switch(
        100.0, None, 0
    )
    wider = switch_cost(high(2, 2), high(2, 1, decode=Shape(2, 1)), 4, RULE)
    assert wider == Switch(100.0, high(2, 1), 0)


PLACEMENT = """
schema: placement/1
model: some/folder
dtype: fp16
instances:
  - {role: prefill, devices: [cuda:0], num_blocks: 900, lease_s: 5.0}
  - {role: prefill, devices: [cuda:1], num_blocks: 900, lease_s: 5.0}
  - {role: decode, devices: [cuda:2], num_blocks: 800, reserve_tokens: 64}
"""


def problem() -> Problem:
    cluster = Cluster.uniform(
        1, 4, device="a100-80g", device_memory_bytes=80 << 30, intra=Link(1e11), inter=Link(1e10)
    )
    requests = Requests(named_workload("humaneval").resample(0, 1.0, 100))
    return Problem(latency_model("a100-80g", "opt-13b", None), cluster, requests, Slo(1.0, 0.1))


def test_a_role_changes_on_its_device_and_the_rest_stays() -> None:
    present = parse_placement(PLACEMENT).placement
    found = placement_for(problem(), present, high(1, 2))
    assert found.names == ("prefill_0", "decode_0", "decode_1")
    assert [i.devices for i in found.instances] == [("cuda:0",), ("cuda:2",), ("cuda:1",)]
    assert found.instances[2].limits == {"num_blocks": 800, "reserve_tokens": 64}
    assert placed_deployment(found, "") == high(1, 2)
    assert parse_placement(found.dump()).placement == found


def test_other_shapes_and_unified_get_devices_that_are_free() -> None:
    present = parse_placement(PLACEMENT).placement
    wide = placement_for(problem(), present, high(1, 1, decode=Shape(2, 1)))
    assert wide.instances[1].devices == ("cuda:1", "cuda:2")
    assert wide.instances[1].limits["num_blocks"] > 800  # the planner's, for two devices
    unified = Deployment("chunked_prefill", unified=Group(ONE, 4), chunk_tokens=512)
    both = placement_for(problem(), present, unified)
    assert [i.devices[0] for i in both.instances] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert both.instances[0].limits == {
        "num_blocks": 900,
        "lease_s": 5.0,
        "policy": "chunked_prefill",
        "chunk_tokens": 512,
    }
    with pytest.raises(ConfigError, match="needs 1 devices, 0 are free"):
        placement_for(problem(), present, high(1, 4))


def test_instances_that_share_devices_hand_them_on() -> None:
    """Two cores, three instances: the core of the one that goes is free although another one uses it, too."""
    present = parse_placement(
        """
schema: placement/1
model: some/folder
oversubscribe: true
instances:
  - {role: prefill, devices: [cpu:1], num_blocks: 900}
  - {role: prefill, devices: [cpu:0], num_blocks: 900}
  - {role: decode, devices: [cpu:0], num_blocks: 900}
"""
    ).placement
    found = placement_for(problem(), present, high(1, 2))
    assert [(i.role, i.devices) for i in found.instances] == [
        ("prefill", ("cpu:1",)), ("decode", ("cpu:0",)), ("decode", ("cpu:0",)),
    ]  # fmt: skip
