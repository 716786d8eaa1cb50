"""Cluster files: what they hold, and how they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from distserve.core.parsing import ConfigError
from distserve_planner.cluster import Cluster, Link, Node

PAPER = """\
schema: cluster/1
name: testbed
device: a100-80g
device_memory_bytes: 85899345920
nodes:
- {name: a, devices: 8, host: 10.0.0.1}
- {name: b, devices: 4}
intra: {bandwidth_bytes_s: 300000000000.0, latency_s: 1.0e-05}
inter: {bandwidth_bytes_s: 3125000000, latency_s: 2.0e-05}
"""


def test_file_is_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(PAPER)
    cluster = Cluster.load(path)
    assert cluster.nodes == (Node("a", 8, "10.0.0.1"), Node("b", 4))
    assert (cluster.num_nodes, cluster.num_devices, cluster.devices_per_node) == (2, 12, 4)
    assert cluster.link(same_node=True).bandwidth_bytes_s == 300e9
    assert cluster.link(same_node=False) == Link(3.125e9, 2e-5)
    assert Cluster.parse(cluster.dump()) == cluster


def test_uniform_cluster() -> None:
    cluster = Cluster.uniform(
        4, 8, device="a100-80g", device_memory_bytes=1, intra=Link(1.0), inter=Link(1.0)
    )
    assert cluster.num_devices == 32
    assert [n.name for n in cluster.nodes] == ["node0", "node1", "node2", "node3"]


def test_link_time_is_latency_and_bytes_over_lanes() -> None:
    assert Link(1e9, 1e-3).seconds(2e9) == pytest.approx(2.001)
    assert Link(1e9, 1e-3).seconds(2e9, lanes=4) == pytest.approx(0.501)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("device: a100", "devise: a100", "unknown key 'devise'; did you mean 'device'"),
        ("devices: 8", "devices: 0", r"nodes\[0\].*devices=0: node 'a' needs at least 1"),
        ("name: b", "name: a", "the name 'a' is used twice"),
        ("bandwidth_bytes_s: 3125000000", "bandwidth_bytes_s: 0", "inter.*bandwidth_bytes_s=0.0"),
        ("latency_s: 2.0e-05", "latency_s: -1.0", "latency_s=-1.0: must not be negative"),
        ("devices: 8", "devices: many", "expected int, found 'many'"),
        ("schema: cluster/1", "schema: placement/1", "schema='placement/1'"),
        ("name: testbed\n", "", "missing key 'name'"),
    ],
)
def test_mistakes_are_named(old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Cluster.parse(PAPER.replace(old, new))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml: No such file"):
        Cluster.load(tmp_path / "no.yaml")
