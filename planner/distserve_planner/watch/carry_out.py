"""From a deployment that is wanted to a placement file, with as little moved as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distserve.core.config import Role
from distserve.core.parsing import ConfigError
from distserve.core.shapes import Shape
from distserve_planner.device_names import parse_device
from distserve_planner.placement_file import InstancePlan, Placement
from distserve_planner.search.deployment import Deployment
from distserve_planner.search.problem import Problem

_OF_A_ROLE = frozenset(
    {
        "policy",
        "chunk_tokens",
        "prefill_chunk_tokens",
        "prefill_order",
        "ageing_tokens_per_s",
        "reserve_tokens",
    }
)
_OF_A_SHAPE = frozenset({"num_blocks", "kv_bytes"})


def placement_for(problem: Problem, present: Placement, wanted: Deployment) -> Placement:
    """The placement file of `wanted`: instances that stay keep their name, devices and limits; new ones get
    free devices, those of instances that go first.

    Limits of new instances are those of a present one of the role, or of any; the KV pool is the planner's
    where the shape is another. Raises `ConfigError` for several nodes or too few devices.
    """
    if len(present.nodes) > 1:
        raise ConfigError(
            f"nodes: {len(present.nodes)} of them; a placement can be changed while it serves on one node"
        )
    named = tuple(replace(i, name=n) for i, n in zip(present.instances, present.names, strict=True))
    present = replace(present, instances=named)
    instances, missing = _matched(present, wanted)
    free = _free_devices(problem, present, instances)
    for role, shape in missing:
        if len(free) < shape.ranks:
            raise ConfigError(
                f"{role} (tp={shape.tp}, pp={shape.pp}): needs {shape.ranks} devices, {len(free)} are free"
            )
        devices, free = tuple(free[: shape.ranks]), free[shape.ranks :]
        limits = _limits(problem, present, wanted, role, shape)
        instances.append(InstancePlan(role, devices, None, tp=shape.tp, pp=shape.pp, limits=limits))
    order = {"prefill": 0, "decode": 1, "unified": 2}
    instances.sort(key=lambda i: order[i.role])
    return replace(present, instances=_with_names(instances), predicted=None)


def _matched(present: Placement, wanted: Deployment) -> tuple[list[InstancePlan], list[tuple[Role, Shape]]]:
    left = list(present.instances)
    stay: list[InstancePlan] = []
    missing: list[tuple[Role, Shape]] = []
    for role, group in wanted.groups:
        for _ in range(group.count):
            same = next((i for i in left if _is(i, role, group.shape, wanted)), None)
            if same is None:
                missing.append((role, group.shape))
            else:
                left.remove(same)
                stay.append(same)
    return stay, missing


def _is(instance: InstancePlan, role: Role, shape: Shape, wanted: Deployment) -> bool:
    if instance.role != role or (instance.tp, instance.pp) != (shape.tp, shape.pp):
        return False
    if role != "unified":
        return True
    policy = instance.limits.get("policy", "prefill_first")
    chunk = instance.limits.get("chunk_tokens", 256) if policy == "chunked_prefill" else None
    return bool(policy == wanted.policy and (chunk == wanted.chunk_tokens))


def _free_devices(problem: Problem, present: Placement, stay: Sequence[InstancePlan]) -> list[str]:
    """Those of instances that go (a shared one as often as it becomes free), then those that nobody uses."""
    kept = {instance.name for instance in stay}
    freed = [device for i in present.instances if i.name not in kept for device in i.devices]
    kind = parse_device(present.instances[0].devices[0]).kind
    listed = present.nodes[0].devices or tuple(f"{kind}:{i}" for i in range(problem.cluster.nodes[0].devices))
    used = [parse_device(d) for i in present.instances for d in i.devices]
    spare = [d for d in listed if not any(len(parse_device(d).overlap(u)) for u in used)]
    return [*freed, *spare]


def _limits(
    problem: Problem, present: Placement, wanted: Deployment, role: Role, shape: Shape
) -> dict[str, Any]:
    alike = [i for i in present.instances if i.role == role]
    model = (alike or list(present.instances))[0]
    drop = frozenset() if alike else _OF_A_ROLE
    same_shape = (model.tp, model.pp) == (shape.tp, shape.pp)
    drop = drop if same_shape else drop | _OF_A_SHAPE
    limits = {key: value for key, value in model.limits.items() if key not in drop}
    if not same_shape:
        limits["num_blocks"] = problem.kv_tokens(shape) // present.block_size
    if role == "unified":
        limits["policy"] = wanted.policy
        if wanted.chunk_tokens is not None:
            limits["chunk_tokens"] = wanted.chunk_tokens
    return limits


def _with_names(instances: Sequence[InstancePlan]) -> tuple[InstancePlan, ...]:
    """New instances get the role's lowest number that is free."""
    taken = {instance.name for instance in instances if instance.name is not None}
    out = []
    for instance in instances:
        name = instance.name
        if name is None:
            name = next(n for i in range(len(instances) + 1) if (n := f"{instance.role}_{i}") not in taken)
            taken.add(name)
        out.append(replace(instance, name=name))
    return tuple(out)
