"""Physical assignment: which devices of which nodes each rank gets. Pure; never gives a device twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from distserve.core.config import Role
from distserve.core.shapes import Shape
from distserve_planner.cluster import Cluster
from distserve_planner.search.deployment import Deployment, Group


@dataclass(frozen=True)
class Placed:
    """One instance. `stages` gives per pipeline stage its node and the indices of its tp devices there."""

    role: Role
    index: int
    shape: Shape
    stages: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        """Nodes that it lies on, in order of its stages, each once."""
        return tuple(dict.fromkeys(node for node, _ in self.stages))

    @property
    def cross_hops(self) -> int:
        """Hops between neighbouring stages that leave a node."""
        return sum(a[0] != b[0] for a, b in zip(self.stages, self.stages[1:], strict=False))


class _Free:
    """Devices that are not given out yet, by node."""

    def __init__(self, cluster: Cluster) -> None:
        self.devices = [list(range(node.devices)) for node in cluster.nodes]

    def count(self, node: int) -> int:
        return len(self.devices[node])

    def take(self, node: int, stages: int, tp: int) -> list[tuple[int, tuple[int, ...]]]:
        taken, self.devices[node] = self.devices[node][: stages * tp], self.devices[node][stages * tp :]
        return [(node, tuple(taken[i * tp : (i + 1) * tp])) for i in range(stages)]


def assign(deployment: Deployment, cluster: Cluster) -> tuple[Placed, ...] | None:
    """Devices for every instance, or None if the cluster does not have them.

    A tp group stays on one node. Paired instances: their segments of the same layers share a node. Otherwise
    whole instances go to the fullest node that has room, and only those that no node can hold are spread, in
    as few pieces as possible.
    """
    free = _Free(cluster)
    if deployment.paired:
        return _assign_pairs(deployment, free)
    placed: list[Placed] = []
    for role, index, group in _largest_first(deployment):
        stages = _whole(group.shape, free) or _spread(group.shape, free)
        if stages is None:
            return None
        placed.append(Placed(role, index, group.shape, tuple(stages)))
    order = {"prefill": 0, "decode": 1, "unified": 2}
    return tuple(sorted(placed, key=lambda p: (order[p.role], p.index)))


def _largest_first(deployment: Deployment) -> Iterator[tuple[Role, int, Group]]:
    """Instances by falling size; those of equal size by turns, so that both phases meet on each node."""
    queue = [(role, index, group) for role, group in deployment.groups for index in range(group.count)]
    yield from sorted(queue, key=lambda item: (-item[2].shape.ranks, item[1]))


def _whole(shape: Shape, free: _Free) -> list[tuple[int, tuple[int, ...]]] | None:
    nodes = [n for n in range(len(free.devices)) if free.count(n) >= shape.ranks]
    if not nodes:
        return None
    return free.take(min(nodes, key=lambda n: (free.count(n), n)), shape.pp, shape.tp)


def _spread(shape: Shape, free: _Free) -> list[tuple[int, tuple[int, ...]]] | None:
    stages: list[tuple[int, tuple[int, ...]]] = []
    while len(stages) < shape.pp:
        node = max(range(len(free.devices)), key=lambda n: (free.count(n), -n))
        here = min(free.count(node) // shape.tp, shape.pp - len(stages))
        if not here:
            return None
        stages += free.take(node, here, shape.tp)
    return stages


def _assign_pairs(deployment: Deployment, free: _Free) -> tuple[Placed, ...] | None:
    prefill, decode = deployment.prefill, deployment.decode
    assert prefill is not None
    assert decode is not None
    segments = prefill.segments
    per_node = prefill.shape.ranks // segments + decode.shape.ranks // segments
    placed: list[Placed] = []
    for index in range(prefill.count):
        nodes = [n for n in range(len(free.devices)) if free.count(n) >= per_node]
        nodes.sort(key=lambda n: (free.count(n), n))
        if len(nodes) < segments:
            return None
        for role, group in deployment.groups:
            stages: list[tuple[int, tuple[int, ...]]] = []
            for node in nodes[:segments]:
                stages += free.take(node, group.shape.pp // segments, group.shape.tp)
            placed.append(Placed(role, index, group.shape, tuple(stages)))
    return tuple(sorted(placed, key=lambda p: (p.role == "decode", p.index)))


def units_that_fit(unit: Deployment, cluster: Cluster) -> int:
    """How many copies of `unit` the cluster holds."""
    count = cluster.num_devices // unit.devices
    while count and assign(unit.with_units(count), cluster) is None:
        count -= 1
    return count


def cross_hops(shape: Shape, devices_per_node: int) -> int:
    """Hops that leave a node when an instance alone is spread over as few nodes as possible."""
    per_node = devices_per_node // shape.tp
    return -(-shape.pp // per_node) - 1 if per_node else shape.pp - 1
