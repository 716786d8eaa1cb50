"""Whether a placement can run: devices, names, roles, shapes and memory.

Every problem is reported at once, each with the line of the file, the value and the fix.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from distserve.core.model_config import ModelConfig
from distserve.core.parsing import ConfigError, nearest
from distserve.core.rank_host_config import rank_model
from distserve.core.shapes import head_range, layer_range, query_head_range
from distserve_planner.device_names import Device, parse_device
from distserve_planner.located_yaml import KeyPath
from distserve_planner.machine_facts import MachineFacts
from distserve_planner.memory import kv_bytes_per_token_per_device, weight_bytes_per_device
from distserve_planner.placement_file import InstancePlan, NodePlan, Placement, PlacementFile

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
ORCHESTRATOR = "orchestrator"


class PlacementError(ConfigError):
    """A placement that cannot run; `problems` has one message per reason."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def check_placement(
    file: PlacementFile, model: ModelConfig | None = None, machine: MachineFacts | None = None
) -> None:
    """Raises `PlacementError` if the placement cannot run.

    Without `model`, shapes and memory are not checked; without `machine`, only limits that the file itself
    gives for a node are.
    """
    check = _Check(file, model, machine)
    # each stage makes sense only once the one before is sound
    for stage in ((check.form,), (check.times, check.devices, check.shapes), (check.memory,)):
        problems = [file.document.located(path, text) for part in stage for path, text in part()]
        if problems:
            raise PlacementError(problems)


def rank_bytes(placement: Placement, model: ModelConfig, instance: InstancePlan) -> int:
    """Bytes of the fullest rank: its weights, and its KV pool or, without a limit, one long sequence."""
    dtype, limits = placement.dtype, instance.limits
    weights = weight_bytes_per_device(model, instance.tp, instance.pp, dtype)
    if limits.get("kv_bytes") is not None:
        return weights + int(limits["kv_bytes"])
    per_token = kv_bytes_per_token_per_device(model, instance.tp, instance.pp, dtype)
    if limits.get("num_blocks") is not None:
        return weights + int(limits["num_blocks"]) * placement.block_size * per_token
    return weights + int(limits.get("max_context") or model.max_context) * per_token


def is_this_host(host: str) -> bool:
    """Whether an address is a name for this machine (the network is not asked)."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


_Problems = Iterator[tuple[KeyPath, str]]


@dataclass(frozen=True)
class _Check:
    file: PlacementFile
    model: ModelConfig | None
    machine: MachineFacts | None

    def form(self) -> _Problems:
        """Names, nodes, roles, ports."""
        placement = self.file.placement
        if not placement.instances:
            yield ("instances",), "[]: at least one instance is needed"
            return
        node_names = [node.name for node in placement.nodes]
        if not node_names:
            yield ("nodes",), "[]: list at least one node, or leave 'nodes' out for this host"
            return
        yield from _repeated(("nodes",), node_names)
        for index, node in enumerate(placement.nodes):
            for position, text in enumerate(node.devices or ()):
                try:
                    parse_device(text)
                except ConfigError as error:
                    yield ("nodes", index, "devices", position), str(error)
        yield from _repeated(("instances",), list(placement.names))
        yield from _like_ranks(placement)
        known = True
        for index, (name, instance) in enumerate(zip(placement.names, placement.instances, strict=True)):
            path: KeyPath = ("instances", index)
            if not _NAME.fullmatch(name) or name == ORCHESTRATOR:
                yield (
                    (*path, "name"),
                    f"{name!r}: letters, digits, '_' and '-' are allowed, and not {ORCHESTRATOR!r}",
                )
            places: list[tuple[KeyPath, str]] = [
                (("nodes", rank), name) for rank, name in enumerate(instance.nodes or ())
            ]
            if instance.node is not None:
                places.append((("node",), instance.node))
            for place, name in places:
                if name not in node_names:
                    known = False
                    yield (*path, *place), f"{name!r}: no such node{nearest(name, node_names)}"
        if not known:
            return
        yield from self._roles()
        yield from self._network()

    def _roles(self) -> _Problems:
        roles = {instance.role for instance in self.file.placement.instances}
        for role in ("prefill", "decode"):
            if not roles & {role, "unified"}:
                yield (
                    ("instances",),
                    f"no instance can {role}; add one with 'role: {role}' or 'role: unified'",
                )

    def times(self) -> _Problems:
        """Times that the orchestrator and its instances must agree on."""
        placement = self.file.placement
        orchestrator = placement.orchestrator_config()
        for index in range(len(placement.instances)):
            engine = placement.engine_config(index)
            path: KeyPath = ("instances", index)
            if engine.lease_s < 3 * orchestrator.lease_renew_s:
                yield (
                    (*path, "lease_s"),
                    f"{engine.lease_s:g}: must be at least three times the orchestrator's "
                    f"lease_renew_s={orchestrator.lease_renew_s:g}",
                )
            if engine.heartbeat_s != orchestrator.heartbeat_s:
                yield (
                    (*path, "heartbeat_s"),
                    f"{engine.heartbeat_s:g}: must be the orchestrator's, "
                    f"heartbeat_s={orchestrator.heartbeat_s:g}",
                )

    def _network(self) -> _Problems:
        placement = self.file.placement
        if placement.spans_hosts and placement.transfer_secret_file is None:
            yield (
                ("nodes",),
                "KV goes from host to host, so the instances must know each other; set "
                "'transfer_secret_file: PATH' to a file with the same secret on every node",
            )
        for index, node in enumerate(placement.nodes):
            if node.grpc_port is None and (caller := _caller(placement, node)) is not None:
                yield ("nodes", index), f"grpc_port is missing; {caller} calls this node"

    def devices(self) -> _Problems:
        """Each device once (unless `oversubscribe`), of one kind per instance, and there."""
        placement = self.file.placement
        used: list[_Use] = []
        for index, instance in enumerate(placement.instances):
            kinds = set()
            places = zip(instance.devices, placement.rank_nodes(instance), strict=True)
            for rank, (text, node) in enumerate(places):
                path: KeyPath = ("instances", index, "devices", rank)
                try:
                    device = parse_device(text)
                except ConfigError as error:
                    yield path, str(error)
                    continue
                kinds.add(device.kind)
                yield from self._present(path, text, device, node)
                user = f"{placement.names[index]} (line {self.file.document.line(path)})"
                if not placement.oversubscribe:
                    yield from _shared(path, text, device, node.name, used)
                used.append(_Use(node.name, device, user))
            if len(kinds) > 1:
                yield (
                    ("instances", index, "devices"),
                    f"{list(instance.devices)}: all devices of an instance must be of one kind",
                )

    def _present(self, path: KeyPath, text: str, device: Device, node: NodePlan) -> _Problems:
        if node.devices is not None:
            listed = [parse_device(name) for name in node.devices]
            have = {i for d in listed if d.kind == device.kind for i in d.ids}
            source = f"node {node.name} lists {', '.join(node.devices)}"
        elif self.machine is not None and is_this_host(node.host):
            if device.kind == "cpu":
                have = set(self.machine.cores)
                source = f"this machine has cores {_ranges(have)}"
            else:
                have = set(range(len(self.machine.gpu_memory_bytes)))
                source = f"this machine has {len(have)} GPUs"
        else:
            return
        if missing := sorted(set(device.ids) - have):
            yield (
                path,
                f"{text}: {device.kind} {', '.join(map(str, missing))} is not there; {source}. "
                "Use one of those, or skip this check with --no-machine-check when the repository is for "
                "another machine",
            )

    def shapes(self) -> _Problems:
        """tp and pp that the model allows; a context that it has."""
        if self.model is None:
            return
        model = self.model
        for index, instance in enumerate(self.file.placement.instances):
            path: KeyPath = ("instances", index)
            try:
                layer_range(model.num_layers, instance.pp, 0)
            except ConfigError as error:
                yield (*path, "pp"), str(error)
            try:
                head_range(model.num_kv_heads, instance.tp, 0)
                query_head_range(model.num_heads, model.num_kv_heads, instance.tp, 0)
            except ConfigError as error:
                yield (*path, "tp"), str(error)
            context = instance.limits.get("max_context")
            if context is not None and context > model.max_context:
                yield (*path, "max_context"), f"{context}: the model has {model.max_context} positions"

    def memory(self) -> _Problems:
        """Weights and KV caches against the memory of each host and of each GPU."""
        if self.model is None:
            return
        placement = self.file.placement
        host_need: dict[str, list[tuple[str, int]]] = {}
        gpu_need: dict[tuple[str, int], list[tuple[str, int]]] = {}
        for index, instance in enumerate(placement.instances):
            need = rank_bytes(placement, self.model, instance)
            for text, node in zip(instance.devices, placement.rank_nodes(instance), strict=True):
                device = parse_device(text)
                share = (placement.names[index], need)
                if device.kind == "cpu":
                    host_need.setdefault(node.name, []).append(share)
                else:
                    gpu_need.setdefault((node.name, device.ids.start), []).append(share)
        nodes = {node.name: node for node in placement.nodes}
        for name, shares in host_need.items():
            yield from _over(f"node {name}", self._host_limit(nodes[name]), shares)
        for (name, gpu), shares in gpu_need.items():
            yield from _over(f"cuda:{gpu} of node {name}", self._gpu_limit(nodes[name], gpu), shares)

    def _host_limit(self, node: NodePlan) -> int | None:
        if node.memory_bytes is not None:
            return node.memory_bytes
        if self.machine is not None and is_this_host(node.host):
            return self.machine.memory_available_bytes
        return None

    def _gpu_limit(self, node: NodePlan, gpu: int) -> int | None:
        if node.device_memory_bytes is not None:
            return node.device_memory_bytes
        if self.machine is not None and is_this_host(node.host):
            return self.machine.gpu_memory_bytes[gpu]
        return None


def _caller(placement: Placement, node: NodePlan) -> str | None:
    """Who needs the gRPC port of a node: the orchestrator for its instances, an instance for its ranks."""
    first = placement.nodes[0]
    for name, instance in zip(placement.names, placement.instances, strict=True):
        lead = placement.node_of(instance)
        if node == lead != first:
            return f"the orchestrator on {first.name}"
        if node != lead and placement.ranks_on(instance, node):
            return f"{name}, whose rank 0 is on {lead.name},"
    return None


def _repeated(path: KeyPath, names: list[str]) -> _Problems:
    first: dict[str, int] = {}
    for index, name in enumerate(names):
        if name in first:
            yield (
                (*path, index),
                f"the name {name!r} is taken by {path[0]}[{first[name]}]; give it another 'name'",
            )
        first.setdefault(name, index)


def _like_ranks(placement: Placement) -> _Problems:
    """Instances that are named as the models that host ranks of another."""
    taken = {rank_model(n): n for n, i in zip(placement.names, placement.instances, strict=True) if i.nodes}
    for index, name in enumerate(placement.names):
        if name in taken:
            yield (
                ("instances", index, "name"),
                f"{name!r}: is what hosts ranks of {taken[name]!r}; give another",
            )


@dataclass(frozen=True)
class _Use:
    node: str
    device: Device
    user: str


def _shared(path: KeyPath, text: str, device: Device, node: str, used: list[_Use]) -> _Problems:
    for use in used:
        if use.node == node and (both := use.device.overlap(device)):
            yield (
                path,
                f"{text}: {device.kind}:{both.start} is already used by {use.user}; give each "
                "rank a device of its own, or set 'oversubscribe: true'",
            )
            return


def _over(where: str, limit: int | None, shares: list[tuple[str, int]]) -> _Problems:
    total = sum(size for _, size in shares)
    if limit is None or total <= limit:
        return
    by_instance: dict[str, int] = {}
    for name, size in shares:
        by_instance[name] = by_instance.get(name, 0) + size
    parts = ", ".join(f"{name} {_gib(size)}" for name, size in by_instance.items())
    yield (
        ("instances",),
        f"{where} has {_gib(limit)} for weights and KV caches, this needs {_gib(total)} ({parts}); lower "
        "kv_bytes or num_blocks, take a smaller dtype, or use fewer instances",
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _ranges(ids: set[int]) -> str:
    """`0-3, 8`"""
    parts: list[list[int]] = []
    for i in sorted(ids):
        if parts and parts[-1][1] == i - 1:
            parts[-1][1] = i
        else:
            parts.append([i, i])
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in parts)
