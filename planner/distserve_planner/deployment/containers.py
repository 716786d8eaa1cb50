"""A placement as containers see it: one per node, with its own GPUs, folders and addresses. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from distserve_planner.deployment.settings import CACHE_FOLDER, MODELS_FOLDER, SECRET_FILE, Settings
from distserve_planner.device_names import parse_device
from distserve_planner.placement_file import InstancePlan, NodePlan, Placement

_SHM_BASE_BYTES = 1 << 30
_SHM_RANK_BYTES = 512 << 20
_CACHE_PREFIX = "cache:"


@dataclass(frozen=True)
class ContainerNode:
    """The container of one node. `instances` have ranks on it. `gpus` are its GPUs by their numbers on the
    host, ascending: inside they are numbered from 0. `cores` are those that its CPU instances are pinned to,
    by the same numbers inside.
    """

    name: str
    host: str
    grpc_port: int
    orchestrator: bool
    instances: tuple[str, ...]
    gpus: tuple[int, ...]
    cores: tuple[int, ...]
    shm_bytes: int
    memory_bytes: int | None


@dataclass(frozen=True)
class ModelFolder:
    """Where the model lies on the host (`None`: in the user's cache, by `name`) and in the container."""

    name: str
    source: str | None
    target: str


@dataclass(frozen=True)
class ContainerPlan:
    """`placement` is the one that the container's repository is generated from."""

    placement: Placement
    nodes: tuple[ContainerNode, ...]
    model: ModelFolder

    @property
    def single(self) -> bool:
        return len(self.nodes) == 1


def container_plan(placement: Placement, settings: Settings) -> ContainerPlan:
    """Renumbers GPUs, moves model and secret to where containers have them, and leaves out empty nodes.

    `placement.model` must be `cache:NAME` or an absolute folder. Applied to its own result it changes
    nothing.
    """
    used = [
        node
        for index, node in enumerate(placement.nodes)
        if index == 0 or any(placement.ranks_on(i, node) for i in placement.instances)
    ]
    gpus = {node.name: _ids(placement, node, "cuda") for node in used}
    model = model_folder(placement.model)
    inside = dataclasses.replace(
        placement,
        model=placement.model if model.source is None else model.target,
        instances=tuple(
            _inside(i, [gpus[node.name] for node in placement.rank_nodes(i)]) for i in placement.instances
        ),
        nodes=tuple(_node_inside(node, len(used) > 1, settings) for node in used),
        transfer_secret_file=SECRET_FILE if len(used) > 1 else None,
    )
    containers = tuple(_container(placement, node, gpus[node.name], settings) for node in used)
    return ContainerPlan(inside, containers, model)


def model_folder(model: str) -> ModelFolder:
    """Where a model is mounted: `cache:NAME` stays a name, a folder is found again below `MODELS_FOLDER`."""
    if model.startswith(_CACHE_PREFIX):
        name = model.removeprefix(_CACHE_PREFIX)
        return ModelFolder(name, None, f"{CACHE_FOLDER}/models/{name}")
    name = PurePosixPath(model).name or "model"
    return ModelFolder(name, model, f"{MODELS_FOLDER}/{name}")


def shm_bytes(ranks: int) -> int:
    """Size of /dev/shm: the stubs' regions (they grow with the prompts), and NCCL's of `ranks` ranks that
    share an instance.
    """
    return _SHM_BASE_BYTES + ranks * _SHM_RANK_BYTES


def _container(
    placement: Placement, node: NodePlan, gpus: tuple[int, ...], settings: Settings
) -> ContainerNode:
    here = [
        (name, instance)
        for name, instance in zip(placement.names, placement.instances, strict=True)
        if placement.ranks_on(instance, node)
    ]
    return ContainerNode(
        name=node.name,
        host=node.host,
        grpc_port=node.grpc_port or settings.ports.grpc,
        orchestrator=node == placement.nodes[0],
        instances=tuple(name for name, _ in here),
        gpus=gpus,
        cores=_ids(placement, node, "cpu"),
        shm_bytes=shm_bytes(sum(len(placement.ranks_on(i, node)) for _, i in here if len(i.devices) > 1)),
        memory_bytes=node.memory_bytes,
    )


def _ids(placement: Placement, node: NodePlan, kind: str) -> tuple[int, ...]:
    """GPUs or cores that the instances of a node use, ascending."""
    devices = [
        parse_device(instance.devices[rank])
        for instance in placement.instances
        for rank in placement.ranks_on(instance, node)
    ]
    return tuple(sorted({i for device in devices if device.kind == kind for i in device.ids}))


def _inside(instance: InstancePlan, gpus: Sequence[tuple[int, ...]]) -> InstancePlan:
    """`gpus`: of the container of each rank."""

    def renumbered(text: str, here: tuple[int, ...]) -> str:
        device = parse_device(text)
        return f"cuda:{here.index(device.ids.start)}" if device.kind == "cuda" else text

    devices = tuple(renumbered(text, here) for text, here in zip(instance.devices, gpus, strict=True))
    return dataclasses.replace(instance, devices=devices)


def _node_inside(node: NodePlan, several: bool, settings: Settings) -> NodePlan:
    # the list of devices is the host's; a container has those that it was given
    port = node.grpc_port or (settings.ports.grpc if several else None)
    return dataclasses.replace(node, devices=None, grpc_port=port)
