"""The systems that a report compares: the best of each family, and vLLM's usual parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from distserve.core.parsing import ConfigError
from distserve.core.shapes import Shape
from distserve_planner.memory import weight_bytes_per_device
from distserve_planner.search.assignment import assign
from distserve_planner.search.deployment import Deployment, Group
from distserve_planner.search.problem import Problem
from distserve_planner.search.result import Row, SearchResult

KV_SHARE = 0.25  # of device memory that a usual deployment leaves for KV

_LABELS = {
    "high": "DistServe-High",
    "low": "DistServe-Low",
    "best": "vLLM++",
    "vllm": "vLLM",
    "chunked": "chunked prefill",
    "own": "given placement",
}


@dataclass(frozen=True)
class System:
    """role: its colour and place in the paper's comparison; see `_LABELS`."""

    role: str
    deployment: Deployment

    @property
    def label(self) -> str:
        return _LABELS[self.role]

    @property
    def disaggregated(self) -> bool:
        return self.deployment.unified is None


@dataclass(frozen=True)
class Case:
    """What a report is about. `systems` in the order in which they are drawn."""

    problem: Problem
    result: SearchResult
    systems: tuple[System, ...]
    workload: str
    jobs: int

    def system(self, role: str) -> System | None:
        return next((s for s in self.systems if s.role == role), None)

    @property
    def rows(self) -> list[Row]:
        """The search's candidates, the winner first, then by falling score."""
        winner = self.result.winner.deployment
        return sorted(self.result.rows, key=lambda row: (row.deployment != winner, -row.score))

    @property
    def disaggregated(self) -> System | None:
        """The best disaggregated system: the winner if it is one, else the better of High and Low."""
        options = [s for s in self.systems if s.role in ("high", "low")]
        scores = {row.deployment: row.score for row in self.result.rows}
        return max(options, key=lambda s: scores.get(s.deployment, 0.0), default=None)


def systems(
    problem: Problem, result: SearchResult, own: Deployment | None = None, usual: Shape | None = None
) -> tuple[System, ...]:
    """The best of each family that met the objectives, and vLLM with its usual shape.

    own: a placement that was given; drawn beside the others. usual: see `usual_shape`, which is the default.
    Raises `ConfigError` if `usual` has no room on the cluster.
    """
    found = []
    families = (("high", "high"), ("low", "low"), ("best", "prefill_first"), ("chunked", "chunked_prefill"))
    for role, family in families:
        row = result.family_best.get(family)  # type: ignore[call-overload]
        if row is not None and row.score > 0:
            found.append(System(role, row.deployment))
    if "prefill_first" in problem.families:
        if usual is not None and usual not in result.shapes.fitting:
            raise ConfigError(
                f"tp={usual.tp}, pp={usual.pp} for vLLM: does not fit the cluster, its memory or the model"
            )
        shape = usual or usual_shape(problem, result.shapes.fitting)
        vllm = Deployment("prefill_first", unified=Group(shape))
        if assign(vllm, problem.cluster) is not None:
            found.insert(len(found) - any(s.role == "chunked" for s in found), System("vllm", vllm))
    if own is not None:
        found.append(System("own", own))
    return tuple(found)


def usual_shape(problem: Problem, fitting: Sequence[Shape]) -> Shape:
    """What a vLLM user would take: the smallest tp, a power of two, that leaves a quarter of memory to KV.

    This is the paper's choice for OPT on A100-80G (tp 1, 4 and 8 for 13B, 66B and 175B).
    """
    memory = problem.cluster.device_memory_bytes
    usable = problem.memory.usable - problem.memory.reserve
    powers = [s for s in fitting if s.pp == 1 and s.tp & (s.tp - 1) == 0]
    for shape in sorted(powers, key=lambda s: s.tp):
        weights = weight_bytes_per_device(problem.model, shape.tp, 1, problem.latency.dtype)
        if usable - weights / memory >= KV_SHARE:
            return shape
    return smallest_shape(powers or fitting)


def smallest_shape(fitting: Sequence[Shape]) -> Shape:
    """The fewest devices, and of those shapes the one with most tp."""
    return min(fitting, key=lambda s: (s.ranks, s.pp))


def with_nodes(problem: Problem, devices: int) -> Problem:
    """The same problem on part of the cluster, or on more of it: whole nodes, or `devices` on one node."""
    cluster = problem.cluster
    per_node = cluster.devices_per_node
    count = max(1, -(-devices // per_node))
    first = cluster.nodes[0]
    nodes = tuple(
        replace(first, name=f"node{i}", devices=min(per_node, devices - i * per_node)) for i in range(count)
    )
    return replace(problem, cluster=replace(cluster, nodes=nodes))
