"""Placements never give a device twice, keep tp groups on a node, and pair segments where asked to."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distserve.core.shapes import Shape
from distserve_planner.cluster import Cluster, Link, Node
from distserve_planner.search.assignment import Placed, assign, cross_hops, units_that_fit
from distserve_planner.search.deployment import Deployment, Group

SHAPES = st.builds(Shape, st.integers(1, 8), st.integers(1, 6))
CLUSTERS = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def cluster(devices: list[int]) -> Cluster:
    nodes = tuple(Node(f"node{i}", count) for i, count in enumerate(devices))
    return Cluster("test", "a100-80g", 80 << 30, nodes, Link(1e11), Link(1e9))


def check(placed: tuple[Placed, ...], given_cluster: Cluster, deployment: Deployment) -> None:
    used = [(node, device) for p in placed for node, devices in p.stages for device in devices]
    assert len(used) == len(set(used)) == deployment.devices
    for node, device in used:
        assert 0 <= device < given_cluster.nodes[node].devices
    for p in placed:
        assert len(p.stages) == p.shape.pp
        assert all(len(devices) == p.shape.tp for _, devices in p.stages)
    assert sorted((p.role, p.index) for p in placed) == sorted(
        (role, index) for role, group in deployment.groups for index in range(group.count)
    )


@given(CLUSTERS, SHAPES, SHAPES, st.integers(1, 5), st.integers(1, 5))
def test_no_device_is_given_twice(devices: list[int], prefill: Shape, decode: Shape, n: int, m: int) -> None:
    deployment = Deployment("high", Group(prefill, n), Group(decode, m))
    placed = assign(deployment, cluster(devices))
    if placed is not None:
        check(placed, cluster(devices), deployment)
        for p in placed:
            if p.shape.ranks <= max(devices) and len(p.nodes) > 1:
                # it was spread only because no node had room left
                others = sum(q.shape.ranks for q in placed if q is not p)
                assert others > 0


@given(
    CLUSTERS, st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 2), st.integers(1, 4)
)
def test_pairs_share_the_nodes_of_their_segments(
    devices: list[int], tp_p: int, tp_d: int, segments: int, local: int, count: int
) -> None:
    prefill, decode = Shape(tp_p, segments), Shape(tp_d, segments * local)
    deployment = Deployment("low", Group(prefill, count, segments), Group(decode, count, segments))
    placed = assign(deployment, cluster(devices))
    if placed is None:
        return
    check(placed, cluster(devices), deployment)
    by_key = {(p.role, p.index): p for p in placed}
    for index in range(count):
        a, b = by_key["prefill", index], by_key["decode", index]
        assert len(a.nodes) == segments
        # stage s of prefill and the stages of the same layers of decode are on one node
        assert [node for node, _ in b.stages] == [node for node, _ in a.stages for _ in range(local)]


@given(CLUSTERS, SHAPES, st.integers(1, 4))
def test_as_many_units_as_fit(devices: list[int], shape: Shape, segments: int) -> None:
    unit = Deployment("prefill_first", unified=Group(shape))
    count = units_that_fit(unit, cluster(devices))
    assert count == 0 or assign(unit.with_units(count), cluster(devices)) is not None
    assert assign(unit.with_units(count + 1), cluster(devices)) is None


@given(SHAPES, st.integers(1, 8))
def test_hops_between_nodes(shape: Shape, per_node: int) -> None:
    if shape.tp > per_node:
        return
    nodes = [per_node] * 12
    placed = assign(Deployment("prefill_first", unified=Group(shape)), cluster(nodes))
    if placed is not None:
        assert placed[0].cross_hops == cross_hops(shape, per_node)
