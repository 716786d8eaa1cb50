"""What a tool needs to know of a generated model repository."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from distserve.core.model_config import cache_folder
from distserve.core.parsing import ConfigError, nearest, parse
from distserve.serving.orchestrator_config import MODEL_PARAMETER, InstanceSpec, OrchestratorConfig
from distserve_planner.generate import generate
from distserve_planner.placement_check import ORCHESTRATOR
from distserve_planner.placement_file import PlacementFile
from distserve_planner.render import LAUNCH_FILE, LAUNCH_SCHEMA


@dataclass(frozen=True)
class LaunchNode:
    """One entry of a launch file."""

    name: str
    host: str
    repository: str
    grpc_port: int | None = None
    ranks_of: tuple[str, ...] = ()  # instances of other nodes that have ranks on this one


@dataclass(frozen=True)
class NodeRepository:
    """The folder that one tritonserver serves, and how other nodes reach it.

    `orchestrator` is the gRPC address of the one on another node, if this node knows it, and `instances` are
    those that have ranks on this node, as it calls them.
    """

    folder: Path
    host: str | None = None
    grpc_port: int | None = None
    orchestrator: str | None = None
    instances: tuple[InstanceSpec, ...] = ()


def node_repository(folder: Path, node: str | None) -> NodeRepository:
    """The repository of a node; with several nodes, `node` says which. Raises `ConfigError`."""
    launch = folder / LAUNCH_FILE
    if not launch.exists():
        if node is not None:
            raise ConfigError(f"--node {node}: {folder} has no {LAUNCH_FILE}; it is for one node")
        if not folder.is_dir():
            raise ConfigError(f"--model-repository {folder}: no such folder")
        return NodeRepository(folder)
    values = yaml.safe_load(launch.read_text())
    if not isinstance(values, dict) or values.get("schema") != LAUNCH_SCHEMA:
        raise ConfigError(f"{launch}: not a launch file of this version ({LAUNCH_SCHEMA})")
    nodes = [parse(LaunchNode, entry, f"{launch}: nodes[{i}]") for i, entry in enumerate(values["nodes"])]
    by_name = {entry.name: entry for entry in nodes}
    if node is None:
        raise ConfigError(f"{folder} is for several nodes; choose with --node: {', '.join(by_name)}")
    if node not in by_name:
        raise ConfigError(f"--node {node}: not in {launch}{nearest(node, by_name)}")
    entry, first = by_name[node], nodes[0]
    here = NodeRepository(folder / entry.repository, entry.host, entry.grpc_port)
    config = None if entry == first else orchestrator_config(folder / first.repository)
    if config is None or first.grpc_port is None:
        return here
    address = f"{entry.host}:{entry.grpc_port}"
    instances = tuple(
        spec for spec in config.instances if spec.address == address or spec.name in entry.ranks_of
    )
    return replace(here, orchestrator=f"{first.host}:{first.grpc_port}", instances=instances)


def orchestrator_config(folder: Path) -> OrchestratorConfig | None:
    """The orchestrator's configuration in a repository; `None` on a node without one."""
    path = folder / ORCHESTRATOR / "config.pbtxt"
    if not path.exists():
        return None
    config: Any = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(path.read_text(), config)
        values = json.loads(config.parameters[MODEL_PARAMETER].string_value)
    except (text_format.ParseError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    return parse(OrchestratorConfig, values, str(path))


def repository_for(file: PlacementFile, name: str) -> Path:
    """Generates the repository of a placement in the user's cache, under `name`; returns its folder."""
    folder = cache_folder() / "repositories" / name
    generate(file, folder)
    return folder
