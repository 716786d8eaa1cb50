"""From a placed deployment to what the simulator runs."""

from __future__ import annotations

from collections.abc import Sequence

from distserve.core.shapes import Shape, split_range
from distserve_planner.search.assignment import Placed
from distserve_planner.search.deployment import Deployment
from distserve_planner.search.problem import Problem
from distserve_planner.simulator.spec import InstanceSpec, Route, SystemSpec

_SENDS, _RECEIVES = (
    1 << 20,
    1 << 21,
)  # ports of an instance's NVLink; a node's network card is 2 n and 2 n + 1


def system_spec(problem: Problem, deployment: Deployment, placed: Sequence[Placed]) -> SystemSpec:
    """The system of a deployment on its devices, with KV routes by where the stages lie."""
    by_role = {role: [p for p in placed if p.role == role] for role in ("prefill", "decode", "unified")}
    specs = {
        role: tuple(_instance(problem, deployment, p) for p in members) for role, members in by_role.items()
    }
    routes = {}
    if problem.assumptions.transfer == "network":
        routes = kv_routes(problem, deployment, placed)
    targets = {p.index: (p.index,) for p in by_role["prefill"]} if deployment.paired else {}
    return SystemSpec(
        specs["prefill"],
        specs["decode"],
        specs["unified"],
        deployment.policy,
        routes,
        targets,
        problem.assumptions.ordering(),
    )


def kv_routes(
    problem: Problem, deployment: Deployment, placed: Sequence[Placed]
) -> dict[tuple[int, int], Route]:
    """The way of KV for each prefill and decode instance that may meet, by their indices."""
    return {
        (source.index, target.index): route(problem, source, target)
        for source in placed
        for target in placed
        if source.role == "prefill"
        and target.role == "decode"
        and (not deployment.paired or source.index == target.index)
    }


def _instance(problem: Problem, deployment: Deployment, placed: Placed) -> InstanceSpec:
    return problem.instance(
        placed.shape,
        cross_hops=placed.cross_hops,
        unified=placed.role == "unified",
        chunk_tokens=deployment.chunk_tokens,
    )


def route(problem: Problem, source: Placed, target: Placed) -> Route:
    """The slowest of all pieces that a request's KV is moved in at once, and the ports that they occupy.

    Between stages on one node: their NVLinks, as many as the smaller tp. Between nodes: the network cards of
    both, each shared by all pieces that pass it.
    """
    layers = problem.model.num_layers
    per_layer = problem.model.kv_bytes_per_token(problem.latency.dtype) / layers
    cluster = problem.cluster
    local = 0.0
    cards: dict[int, float] = {}
    for i, (node_s, _) in enumerate(source.stages):
        for j, (node_t, _) in enumerate(target.stages):
            shared = _common(layers, source.shape, i, target.shape, j) * per_layer
            if not shared:
                continue
            if node_s == node_t:
                lanes = min(source.shape.tp, target.shape.tp)
                local = max(local, shared / (cluster.intra.bandwidth_bytes_s * lanes))
            else:
                for card in (2 * node_s, 2 * node_t + 1):
                    cards[card] = cards.get(card, 0.0) + shared
    network = max(cards.values(), default=0.0) / cluster.inter.bandwidth_bytes_s
    latency = cluster.inter.latency_s if cards else cluster.intra.latency_s
    ports = (*cards, _SENDS + source.index, _RECEIVES + target.index)
    return Route(ports, latency, max(local, network))


def _common(layers: int, a: Shape, i: int, b: Shape, j: int) -> int:
    first, second = split_range(layers, a.pp, i), split_range(layers, b.pp, j)
    return max(0, min(first.stop, second.stop) - max(first.start, second.start))
