"""From a placement to the text of a Triton model repository. Pure: no file is read or written here.

One model per instance and one `orchestrator`; each `config.pbtxt` is the `ModelConfig` protobuf of Triton's
client printed as text, so that a field that does not exist cannot be written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from distserve.core.parsing import to_mapping
from distserve.core.rank_host_config import RANKS_PARAMETER, RankHostConfig, rank_model
from distserve.serving.orchestrator_config import MODEL_PARAMETER
from distserve.serving.schema import (
    ORCHESTRATOR_INPUTS,
    ORCHESTRATOR_OUTPUTS,
    STAGE_INPUTS,
    STAGE_OUTPUTS,
    TensorSpec,
)
from distserve_planner.device_names import parse_device
from distserve_planner.placement_check import ORCHESTRATOR
from distserve_planner.placement_file import NodePlan, Placement

LAUNCH_SCHEMA = "launch/1"
LAUNCH_FILE = "launch.yaml"

_SHOWN = ("instance", "role", "model", "devices", "dtype", "tp", "pp", "block_size")
_HEADER = "# Written by `planner generate`. Change the placement file and generate again.\n"
_STAGE_MODEL = '''"""Written by `planner generate`. An instance; its settings are in config.pbtxt."""

from distserve.serving.stage import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''
_RANKS_MODEL = '''"""Written by `planner generate`. Ranks for another node's instance; see config.pbtxt."""

from distserve.serving.rank_stage import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''
_ORCHESTRATOR_MODEL = '''"""Written by `planner generate`. For clients; its settings are in config.pbtxt."""

from distserve.serving.triton_orchestrator import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''


def render(placement: Placement) -> dict[str, str]:
    """Relative path -> text of every file of the repository.

    With several nodes each has a repository of its own in a folder of its name, and `launch.yaml` beside
    them says which host serves which. Raises `ConfigError` for a value that an engine would refuse.
    """
    if len(placement.nodes) == 1:
        return _node_files(placement, placement.nodes[0])
    files: dict[str, str] = {}
    for node in placement.nodes:
        files |= {f"{node.name}/{path}": text for path, text in _node_files(placement, node).items()}
    files[LAUNCH_FILE] = _launch_file(placement)
    return files


def _node_files(placement: Placement, node: NodePlan) -> dict[str, str]:
    files: dict[str, str] = {}
    for index, instance in enumerate(placement.instances):
        name, ranks = placement.names[index], placement.ranks_on(instance, node)
        if placement.node_of(instance) == node:
            files[f"{name}/config.pbtxt"] = _HEADER + _text(_stage_config(placement, index))
            files[f"{name}/1/model.py"] = _STAGE_MODEL
        elif ranks:
            name = rank_model(name)
            files[f"{name}/config.pbtxt"] = _HEADER + _text(_ranks_config(placement, index, ranks))
            files[f"{name}/1/model.py"] = _RANKS_MODEL
    if node == placement.nodes[0]:
        files[f"{ORCHESTRATOR}/config.pbtxt"] = _HEADER + _text(_orchestrator_config(placement))
        files[f"{ORCHESTRATOR}/1/model.py"] = _ORCHESTRATOR_MODEL
    return files


def _stage_config(placement: Placement, index: int) -> Any:
    engine = placement.engine_config(index)
    config = _model_config(engine.instance, STAGE_INPUTS, STAGE_OUTPUTS)
    # to_mapping leaves defaults out; these a reader of the file looks for
    shown = {name: getattr(engine, name) for name in _SHOWN}
    config.parameters["engine"].string_value = _compact({**shown, **to_mapping(engine)})
    instance = placement.instances[index]
    here = placement.ranks_on(instance, placement.node_of(instance))
    _put_on(config, [engine.devices[rank] for rank in here])
    return config


def _ranks_config(placement: Placement, index: int, ranks: Sequence[int]) -> Any:
    """The model that hosts `ranks` of an instance whose rank 0 is on another node."""
    engine = placement.engine_config(index)
    config = _model_config(rank_model(engine.instance), STAGE_INPUTS, STAGE_OUTPUTS)
    host = RankHostConfig(engine.instance, tuple(ranks), engine.transfer_secret_file, engine.log_format)
    config.parameters[RANKS_PARAMETER].string_value = _compact(to_mapping(host))
    _put_on(config, [engine.devices[rank] for rank in ranks])
    return config


def _put_on(config: Any, names: Sequence[str]) -> None:
    """The model's one instance, on these devices."""
    devices = [parse_device(name) for name in names]
    group = config.instance_group.add(count=1)
    if devices[0].kind == "cpu":
        group.kind = model_config_pb2.ModelInstanceGroup.KIND_CPU
    elif len(devices) == 1:
        group.kind = model_config_pb2.ModelInstanceGroup.KIND_GPU
        group.gpus.append(devices[0].ids.start)
    else:
        # Triton makes one instance per GPU of a KIND_GPU group; this is one instance on several
        group.kind = model_config_pb2.ModelInstanceGroup.KIND_MODEL
        config.parameters["devices"].string_value = ",".join(names)


def _orchestrator_config(placement: Placement) -> Any:
    config = _model_config(ORCHESTRATOR, ORCHESTRATOR_INPUTS, ORCHESTRATOR_OUTPUTS)
    config.model_transaction_policy.decoupled = True
    config.instance_group.add(count=1, kind=model_config_pb2.ModelInstanceGroup.KIND_CPU)
    config.parameters[MODEL_PARAMETER].string_value = _compact(to_mapping(placement.orchestrator_config()))
    return config


def _model_config(name: str, inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> Any:
    config = model_config_pb2.ModelConfig(name=name, backend="python", max_batch_size=0)
    for spec in inputs:
        config.input.add(
            name=spec.name,
            data_type=model_config_pb2.DataType.Value(spec.dtype),
            dims=spec.dims,
            optional=spec.optional,
        )
    for spec in outputs:
        config.output.add(
            name=spec.name, data_type=model_config_pb2.DataType.Value(spec.dtype), dims=spec.dims
        )
    return config


def _text(config: Any) -> str:
    return str(text_format.MessageToString(config))


def _compact(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True)


def _launch_file(placement: Placement) -> str:
    nodes = []
    for node in placement.nodes:
        entry: dict[str, Any] = {"name": node.name, "host": node.host, "repository": node.name}
        if node.grpc_port is not None:
            entry["grpc_port"] = node.grpc_port
        guests = [
            name
            for name, instance in zip(placement.names, placement.instances, strict=True)
            if placement.node_of(instance) != node and placement.ranks_on(instance, node)
        ]
        if guests:
            entry["ranks_of"] = guests
        nodes.append(entry)
    return _HEADER + str(yaml.safe_dump({"schema": LAUNCH_SCHEMA, "nodes": nodes}, sort_keys=False))
