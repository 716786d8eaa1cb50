"""The cluster that a placement is made for: nodes, devices, memory and links (`schema: cluster/1`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from distserve.core.parsing import ConfigError
from distserve_planner.schema_file import dump_document, load_document, parse_document

CLUSTER_SCHEMA = "cluster/1"


@dataclass(frozen=True, slots=True)
class Link:
    """A path between two devices: bytes per second in one direction, and seconds before the first byte."""

    bandwidth_bytes_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_s > 0:
            raise ConfigError(f"bandwidth_bytes_s={self.bandwidth_bytes_s}: must be above 0")
        if self.latency_s < 0:
            raise ConfigError(f"latency_s={self.latency_s}: must not be negative")

    def seconds(self, size_bytes: float, lanes: int = 1) -> float:
        """Time to move `size_bytes` over `lanes` such links at once."""
        return self.latency_s + size_bytes / (self.bandwidth_bytes_s * lanes)


@dataclass(frozen=True, slots=True)
class Node:
    """One host: its name, how many devices it has, and the address others reach it by."""

    name: str
    devices: int
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ConfigError(f"devices={self.devices}: node {self.name!r} needs at least 1")


@dataclass(frozen=True)
class Cluster:
    """Nodes of one kind of device.

    `device` names a latency profile or a device of `distserve_planner.devices`. `intra` joins any two
    devices of one node (per device, one direction); `inter` is a node's link to the others, shared by all
    of its devices.
    """

    name: str
    device: str
    device_memory_bytes: int
    nodes: tuple[Node, ...]
    intra: Link
    inter: Link
    device_kind: Literal["cuda", "cpu"] = "cuda"

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError("nodes=[]: at least one node is needed")
        if self.device_memory_bytes < 1:
            raise ConfigError(f"device_memory_bytes={self.device_memory_bytes}: must be above 0")
        names = [node.name for node in self.nodes]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"nodes: the name {twice[0]!r} is used twice; every node needs its own")

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Reads a `schema: cluster/1` file; raises `ConfigError`."""
        return load_document(path, CLUSTER_SCHEMA, cls)

    @classmethod
    def parse(cls, text: str, where: str = "cluster") -> Cluster:
        """From YAML text; raises `ConfigError`."""
        return parse_document(text, CLUSTER_SCHEMA, cls, where)

    def dump(self) -> str:
        """YAML text that `parse` reads back."""
        return dump_document(self, CLUSTER_SCHEMA)

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def num_devices(self) -> int:
        return sum(node.devices for node in self.nodes)

    @property
    def devices_per_node(self) -> int:
        """Devices of the smallest node: what a placement that must fit on any node can count on."""
        return min(node.devices for node in self.nodes)

    def link(self, same_node: bool) -> Link:
        """The link between two devices of one node, or of two."""
        return self.intra if same_node else self.inter

    @classmethod
    def uniform(
        cls,
        nodes: int,
        devices_per_node: int,
        *,
        device: str,
        device_memory_bytes: int,
        intra: Link,
        inter: Link,
        name: str = "cluster",
        device_kind: Literal["cuda", "cpu"] = "cuda",
    ) -> Cluster:
        """`nodes` equal nodes named node0, node1, ..."""
        members = tuple(Node(f"node{i}", devices_per_node) for i in range(nodes))
        return cls(name, device, device_memory_bytes, members, intra, inter, device_kind)
