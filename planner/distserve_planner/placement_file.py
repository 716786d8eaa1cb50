"""The placement file (`schema: placement/1`): which instances run, on which devices of which nodes.

    schema: placement/1
    model: cache:smollm2-135m-instruct      # a folder, or cache:NAME
    dtype: fp32
    instances:
      - role: prefill
        devices: [cpu:0]
        kv_bytes: 268435456
      - role: decode
        devices: [cpu:1]

`nodes` may be left out for one host. Every limit of `distserve.core.config.EngineConfig` may stand in an
instance.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from distserve.core.config import Dtype, EngineConfig, Role
from distserve.core.parsing import ConfigError, nearest, parse
from distserve.serving.orchestrator_config import OrchestratorConfig
from distserve_planner.located_yaml import ROOT, LocatedYaml, check_schema

PLACEMENT_SCHEMA = "placement/1"


@dataclass(frozen=True)
class NodePlan:
    """One host with its own tritonserver. Limits that are given stand in for what the machine has."""

    name: str = "node0"
    host: str = "127.0.0.1"  # address by which the other nodes reach it
    grpc_port: int | None = None  # of its tritonserver; needed where another node's orchestrator calls it
    devices: tuple[str, ...] | None = None  # e.g. [cuda:0, cuda:1]; default: all that it has
    memory_bytes: int | None = None  # for weights and KV caches of its CPU instances
    device_memory_bytes: int | None = None  # of each GPU


@dataclass(frozen=True)
class InstancePlan:
    """One instance. `limits` are further fields of `EngineConfig`; in the file they stand beside these."""

    role: Role
    devices: tuple[str, ...]
    name: str | None = None  # default: <role>_<index within the role>
    node: str | None = None  # default: the first node
    nodes: tuple[str, ...] | None = None  # instead, for one over several nodes: of each rank, as `devices`
    tp: int = 1
    pp: int = 1
    group: str | None = None  # prefill instances hand over to decode instances of their group (Algorithm 2)
    limits: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_OWN_KEYS = frozenset(f.name for f in dataclasses.fields(InstancePlan)) - {"limits"}
_SET_BY_PLACEMENT = frozenset(
    {"instance", "model", "dtype", "block_size", "transfer_host", "transfer_secret_file", "rank_servers"}
)
LIMITS = frozenset(f.name for f in dataclasses.fields(EngineConfig)) - _OWN_KEYS - _SET_BY_PLACEMENT
"""Keys of an instance that go to its engine as they are."""


@dataclass(frozen=True)
class Placement:
    """The whole plan. `predicted` is what a search expected of it; nothing here reads it."""

    schema: str
    model: str
    instances: tuple[InstancePlan, ...]
    dtype: Dtype = "fp32"
    block_size: int = 16
    nodes: tuple[NodePlan, ...] = (NodePlan(),)
    oversubscribe: bool = False
    transfer_secret_file: str | None = None  # needed when nodes are reached over a network
    orchestrator: Mapping[str, Any] | None = None  # settings of `OrchestratorConfig`, instances left out
    predicted: Mapping[str, Any] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each instance, in order."""
        counts: dict[str, int] = {}
        names = []
        for instance in self.instances:
            index = counts.get(instance.role, 0)
            counts[instance.role] = index + 1
            names.append(instance.name or f"{instance.role}_{index}")
        return tuple(names)

    def node_of(self, instance: InstancePlan) -> NodePlan:
        """The node that serves an instance: that of rank 0. Raises `KeyError` for one that is not listed."""
        name = instance.node if instance.nodes is None else instance.nodes[0]
        return self.nodes[0] if name is None else self._node(name)

    def rank_nodes(self, instance: InstancePlan) -> tuple[NodePlan, ...]:
        """The node of each rank; raises `KeyError` for one that is not listed."""
        if instance.nodes is None:
            return (self.node_of(instance),) * len(instance.devices)
        return tuple(self._node(name) for name in instance.nodes)

    def ranks_on(self, instance: InstancePlan, node: NodePlan) -> tuple[int, ...]:
        """The ranks of an instance that a node hosts."""
        return tuple(rank for rank, other in enumerate(self.rank_nodes(instance)) if other == node)

    def _node(self, name: str) -> NodePlan:
        return {node.name: node for node in self.nodes}[name]

    @property
    def spans_hosts(self) -> bool:
        return len({node.host for node in self.nodes}) > 1

    def engine_config(self, index: int) -> EngineConfig:
        """What the engine of instance `index` is given. Raises `ConfigError`."""
        return EngineConfig.load(self.engine_values(index), f"instances[{index}]")

    def engine_values(self, index: int) -> dict[str, Any]:
        """The same as a plain mapping, unchecked."""
        instance = self.instances[index]
        values: dict[str, Any] = {
            "instance": self.names[index],
            "role": instance.role,
            "model": self.model,
            "devices": instance.devices,
            "tp": instance.tp,
            "pp": instance.pp,
            "dtype": self.dtype,
            "block_size": self.block_size,
            **instance.limits,
        }
        lead, rank_nodes = self.node_of(instance), self.rank_nodes(instance)
        if any(node != lead for node in rank_nodes):
            values["rank_servers"] = tuple(
                "" if node == lead else f"{node.host}:{node.grpc_port}" for node in rank_nodes
            )
        if self.spans_hosts:
            values["transfer_host"] = lead.host
        if self.transfer_secret_file is not None:
            values["transfer_secret_file"] = self.transfer_secret_file
        return values

    def orchestrator_values(self) -> dict[str, Any]:
        """What the orchestrator is given, unchecked: model, instances, and the `orchestrator` section."""
        instances = []
        for name, instance in zip(self.names, self.instances, strict=True):
            node = self.node_of(instance)
            entry: dict[str, Any] = {"name": name, "role": instance.role}
            if instance.group is not None:
                entry["group"] = instance.group
            if node != self.nodes[0]:
                entry["address"] = f"{node.host}:{node.grpc_port}"
            instances.append(entry)
        values: dict[str, Any] = {"model": self.model, "instances": instances, **(self.orchestrator or {})}
        if len(self.nodes) > 1 and self.transfer_secret_file is not None:
            values["transfer_secret_file"] = self.transfer_secret_file
        return values

    def orchestrator_config(self) -> OrchestratorConfig:
        """The same, parsed. Raises `ConfigError`."""
        return parse(OrchestratorConfig, self.orchestrator_values(), "orchestrator")

    def dump(self) -> str:
        """YAML text that `parse_placement` reads back."""
        return str(yaml.safe_dump(_plain(self), sort_keys=False, width=110))


@dataclass(frozen=True)
class PlacementFile:
    """A placement and the lines that it came from."""

    placement: Placement
    document: LocatedYaml


def read_placement(path: str | Path) -> PlacementFile:
    """Reads a placement file. Raises `ConfigError` naming file, line, field and value.

    Checks the form only; see `distserve_planner.placement_check` for whether it can run.
    """
    return _from_document(LocatedYaml.read(path))


def parse_placement(text: str, name: str = "placement") -> PlacementFile:
    """Like `read_placement`, from a string."""
    return _from_document(LocatedYaml.parse(text, name))


def default_placement() -> PlacementFile:
    """One prefill and one decode instance of the demo model on two CPU cores."""
    text = resources.files("distserve_planner").joinpath("data/default_placement.yaml").read_text()
    return parse_placement(text, "default_placement.yaml")


def _from_document(document: LocatedYaml) -> PlacementFile:
    check_schema(document, PLACEMENT_SCHEMA)
    values = dict(document.values)
    if isinstance(values.get("instances"), list):
        values["instances"] = [
            _with_limits(document, index, item) for index, item in enumerate(values["instances"])
        ]
    placement = dataclasses.replace(document, values=values).into(Placement)
    _check_orchestrator(document, placement)
    for index, instance in enumerate(placement.instances):
        _check_nodes(document, index, instance)
        if not _nodes_are_known(placement, instance):
            continue  # refused by the check
        try:
            parse(EngineConfig, placement.engine_values(index), f"{ROOT}.instances[{index}]")
        except ConfigError as error:
            raise document.relocated(error) from None
    return PlacementFile(placement, document)


def _check_nodes(document: LocatedYaml, index: int, instance: InstancePlan) -> None:
    """Raises `ConfigError` unless an instance says once where it is, for each rank."""
    if instance.nodes is None:
        return
    path = ("instances", index, "nodes")
    if instance.node is not None:
        raise ConfigError(document.located(path, f"{list(instance.nodes)}: either 'node' or 'nodes'"))
    if len(instance.nodes) != instance.tp * instance.pp:
        text = f"tp={instance.tp} x pp={instance.pp} needs {instance.tp * instance.pp}, one per rank"
        raise ConfigError(document.located(path, f"{list(instance.nodes)}: {text}"))


def _nodes_are_known(placement: Placement, instance: InstancePlan) -> bool:
    """Also whether the nodes of further ranks have a port to be called at."""
    try:
        nodes = placement.rank_nodes(instance)
    except (KeyError, IndexError):
        return False
    return all(node.grpc_port is not None for node in nodes if node != nodes[0])


def _check_orchestrator(document: LocatedYaml, placement: Placement) -> None:
    section = placement.orchestrator or {}
    for key in ("model", "instances", "transfer_secret_file"):
        if key in section:
            raise ConfigError(
                document.located(("orchestrator", key), "is the placement's own and cannot be given here")
            )
    try:
        parse(OrchestratorConfig, {"model": placement.model, **section}, f"{ROOT}.orchestrator")
    except ConfigError as error:
        raise document.relocated(error) from None


def _with_limits(document: LocatedYaml, index: int, item: Any) -> Any:
    """The keys that belong to the engine, moved into `limits`."""
    if not isinstance(item, Mapping):
        return item  # refused by the parser
    for key in item:
        if key not in _OWN_KEYS | LIMITS:
            line = document.line(("instances", index, str(key)))
            where = f"{document.name}:{line}: instances[{index}]"
            raise ConfigError(f"{where}: unknown key '{key}'{nearest(str(key), _OWN_KEYS | LIMITS)}")
    own = {key: value for key, value in item.items() if key in _OWN_KEYS}
    return {**own, "limits": {key: value for key, value in item.items() if key in LIMITS}}


def _plain(config: Any) -> dict[str, Any]:
    """Fields in order, those at their default left out, limits beside the others."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value is None or (field.default is not dataclasses.MISSING and value == field.default):
            continue
        if field.name == "limits":
            out.update(value)
            continue
        if isinstance(value, tuple):
            value = [_plain(v) if dataclasses.is_dataclass(v) else v for v in value]
        out[field.name] = dict(value) if isinstance(value, Mapping) else value
    return out
