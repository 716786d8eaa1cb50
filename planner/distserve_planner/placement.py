"""From a search's winner to the placement file that `planner generate` renders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from distserve.core.config import Dtype
from distserve.core.order import Ordering
from distserve.core.parsing import ConfigError
from distserve_planner.placement_file import PLACEMENT_SCHEMA, InstancePlan, NodePlan, Placement
from distserve_planner.search.assignment import Placed
from distserve_planner.search.deployment import Deployment
from distserve_planner.search.diagnosis import Diagnosis
from distserve_planner.search.problem import Problem
from distserve_planner.search.result import SearchResult
from distserve_planner.simulator.spec import InstanceSpec, SystemSpec

_SCHEDULER_LIMITS = (
    "max_batch_size",
    "max_batch_tokens",
    "chunk_tokens",
    "reserve_tokens",
    "prefill_chunk_tokens",
)


def placement_of(
    problem: Problem,
    result: SearchResult,
    model: str,
    workload: str,
    grpc_port: int | None = None,
    transfer_secret_file: str | None = None,
) -> Placement:
    """The winner on its devices, with the limits that were simulated and what was predicted.

    model: a folder or cache:NAME, as the engines will find it. grpc_port: of the tritonserver of each node
    but the first, where there are several. transfer_secret_file: where these are several hosts. Raises
    `ConfigError` if an instance spans nodes without a port, at which rank 0 calls the others.
    """
    deployment = result.winner.deployment
    spread = [p for p in result.placed if len(p.nodes) > 1]
    if spread and grpc_port is None:
        names = ", ".join(problem.cluster.nodes[n].name for n in spread[0].nodes)
        raise ConfigError(
            f"{spread[0].role}_{spread[0].index} (tp={spread[0].shape.tp}, pp={spread[0].shape.pp}) lies on "
            f"{names}; give --grpc-port, at which its nodes call each other"
        )
    used = sorted({node for placed in result.placed for node in placed.nodes})
    called = {*used[1:], *(node for placed in spread for node in placed.nodes[1:])}
    nodes = tuple(
        NodePlan(
            problem.cluster.nodes[node].name,
            problem.cluster.nodes[node].host,
            grpc_port if node in called else None,
        )
        for node in used
    )
    instances = tuple(_instance(problem, deployment, placed) for placed in result.placed)
    return Placement(
        PLACEMENT_SCHEMA,
        model,
        instances,
        cast(Dtype, problem.latency.dtype),
        problem.assumptions.block_size,
        nodes,
        transfer_secret_file=transfer_secret_file,
        orchestrator=_ordering("scheduling", problem.assumptions.ordering()) or None,
        predicted=predicted(problem, result, workload),
    )


def _ordering(key: str, ordering: Ordering) -> dict[str, Any]:
    """Settings of a queue, of instance or orchestrator; nothing for the default."""
    if ordering == Ordering():
        return {}
    return {key: ordering.order, "ageing_tokens_per_s": ordering.ageing_tokens_per_s}


def _instance(problem: Problem, deployment: Deployment, placed: Placed) -> InstancePlan:
    spec = problem.instance(
        placed.shape,
        cross_hops=placed.cross_hops,
        unified=placed.role == "unified",
        chunk_tokens=deployment.chunk_tokens,
    )
    limits: dict[str, Any] = {
        "num_blocks": spec.num_blocks,
        "max_batch_size": spec.limits.max_batch_size,
        "max_batch_tokens": spec.limits.max_batch_tokens,
    }
    if placed.role == "prefill":
        limits |= _ordering("prefill_order", spec.ordering)
        if spec.limits.prefill_chunk_tokens is not None:
            limits["prefill_chunk_tokens"] = spec.limits.prefill_chunk_tokens
    if placed.role != "prefill" and spec.limits.reserve_tokens != 0:
        limits["reserve_tokens"] = spec.limits.reserve_tokens
    if placed.role == "unified":
        limits["policy"] = deployment.policy
        if deployment.policy == "chunked_prefill":
            limits["chunk_tokens"] = spec.limits.chunk_tokens
    ranks = [(node, device) for node, devices in placed.stages for device in devices]
    names = tuple(problem.cluster.nodes[node].name for node, _ in ranks)
    return InstancePlan(
        placed.role,
        tuple(f"{problem.cluster.device_kind}:{device}" for _, device in ranks),
        node=names[0] if len(placed.nodes) == 1 else None,
        nodes=names if len(placed.nodes) > 1 else None,
        tp=placed.shape.tp,
        pp=placed.shape.pp,
        group=f"pair_{placed.index}" if deployment.paired and deployment.units > 1 else None,
        limits=limits,
    )


def with_limits_of(placement: Placement, problem: Problem, system: SystemSpec) -> SystemSpec:
    """A system with the limits that the placement's instances give, where they give any, and its orders.

    So what is simulated is what the engines will admit. Raises `ConfigError` for a limit out of range.
    """
    groups: dict[str, list[InstanceSpec]] = {"prefill": [], "decode": [], "unified": []}
    specs = {"prefill": iter(system.prefill), "decode": iter(system.decode), "unified": iter(system.unified)}
    for index, instance in enumerate(placement.instances):
        config = placement.engine_config(index)
        spec = next(specs[instance.role])
        given = {name: getattr(config, name) for name in _SCHEDULER_LIMITS if name in instance.limits}
        blocks = config.num_blocks or spec.num_blocks
        if config.num_blocks is None and config.kv_bytes is not None:
            token = problem.model.kv_bytes_per_token(placement.dtype)
            blocks = max(1, config.kv_bytes // (token * placement.block_size))
        groups[instance.role].append(
            replace(
                spec,
                num_blocks=blocks,
                block_size=placement.block_size,
                limits=replace(spec.limits, **given),
                ordering=config.ordering(),
            )
        )
    return replace(
        system,
        prefill=tuple(groups["prefill"]),
        decode=tuple(groups["decode"]),
        unified=tuple(groups["unified"]),
        ordering=placement.orchestrator_config().ordering(),
    )


def predicted(problem: Problem, result: SearchResult, workload: str) -> dict[str, Any]:
    """What the search expects, for people and for comparing with what is measured."""
    slo, look = problem.slo, result.diagnosis
    out: dict[str, Any] = {
        "placement": str(result.winner.deployment),
        "objective": result.objective.kind,
        "figure": result.winner.figure,
        "workload": workload,
        "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "attainment": slo.attainment},
    }
    if look is not None:
        out |= {"rate_rps": _short(look.rate), **figures(look)}
    return out


def figures(look: Diagnosis) -> dict[str, Any]:
    """Attainment, percentiles, stages and usage of one simulated rate, rounded."""
    seen = look.attainment
    return {
        "attainment": {
            "both": _short(seen.both),
            "interval": [_short(seen.low), _short(seen.high)],
            "ttft": _short(seen.ttft),
            "tpot": _short(seen.tpot),
            "requests": seen.requests,
        },
        "ttft_s": {f"p{p}": _short(v) for p, v in look.ttft_s.items()},
        "tpot_s": {f"p{p}": _short(v) for p, v in look.tpot_s.items()},
        "stages_s": {name: _short(v) for name, v in look.stages_s.items()},
        "usage": {
            name: _short(v)
            for name in (
                "prefill_device",
                "decode_device",
                "unified_device",
                "prefill_kv",
                "decode_kv",
                "link",
            )
            if (v := getattr(look.usage, name)) is not None
        },
        "preemptions": look.preemptions,
        "refused": look.refused,
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def nodes_and_devices(problem: Problem, placed: Sequence[Placed]) -> list[dict[str, Any]]:
    """Each instance with the node and device ids of its stages."""
    cluster = problem.cluster
    return [
        {
            "instance": f"{p.role}_{p.index}",
            "tp": p.shape.tp,
            "pp": p.shape.pp,
            "stages": [{"node": cluster.nodes[node].name, "devices": list(ids)} for node, ids in p.stages],
        }
        for p in placed
    ]
