"""A Helm chart: one StatefulSet per node of the placement.

The templates are fixed; everything that the placement decides is in `values.yaml`. The pods generate their
model repository from the placement in a ConfigMap, because only Helm knows their addresses.
"""

from __future__ import annotations

import re
from importlib import metadata, resources
from typing import Any

import yaml

from distserve.core.parsing import ConfigError
from distserve_planner.deployment.containers import ContainerNode, ContainerPlan
from distserve_planner.deployment.docker import template
from distserve_planner.deployment.settings import DISTRIBUTION, Settings

_HEADER = "# Written by `planner generate`. values.schema.json says what each value means.\n"
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NODE_NAME = 20  # release, node and ordinal share the 63 characters of a pod's name
_TEMPLATES = "chart/templates"


def chart_files(plan: ContainerPlan, settings: Settings) -> dict[str, str]:
    """The chart, relative to its folder. Raises `ConfigError` for a node that Kubernetes cannot name."""
    for node in plan.nodes:
        if not _LABEL.fullmatch(node.name) or len(node.name) > _LONGEST_NODE_NAME:
            raise ConfigError(
                f"nodes: name={node.name!r}: on Kubernetes, up to {_LONGEST_NODE_NAME} lower-case letters, "
                "digits and '-'"
            )
    folder = resources.files("distserve_planner.deployment").joinpath("data", _TEMPLATES)
    names = sorted(item.name for item in folder.iterdir())
    return {
        "Chart.yaml": _dump(_chart()),
        "values.yaml": _dump(values(plan, settings)),
        "values.schema.json": template("chart/values.schema.json"),
        **{f"templates/{name}": template(f"{_TEMPLATES}/{name}") for name in names},
    }


def values(plan: ContainerPlan, settings: Settings) -> dict[str, Any]:
    """What the chart is installed with."""
    name, tag = settings.image_parts
    ports = settings.ports
    model = plan.model
    return {
        "image": {"repository": name, "tag": tag, "pullPolicy": "IfNotPresent", "pullSecrets": []},
        "model": {
            "mountPath": model.target,
            "volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
            "subPath": model.name,
        },
        "placement": yaml.safe_load(plan.placement.dump()),
        "nodes": [_node(node) for node in plan.nodes],
        "openai": {
            "apiKeySecret": "",
            "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
        },
        "ports": {
            "http": ports.http,
            "grpc": ports.grpc,
            "metrics": ports.metrics,
            "openai": ports.openai,
        },
        "channelKey": {"existingSecret": ""},
        "spreadNodes": True,
        "startTimeoutSeconds": settings.start_timeout_s,
        "preStopSeconds": settings.pre_stop_s,
        "drainSeconds": settings.drain_s,
        "podDisruptionBudget": {"maxUnavailable": 1},
        "networkPolicy": {"enabled": True, "clients": []},
        "podMonitor": {"enabled": False},
        "service": {"type": "ClusterIP", "annotations": {}},
        "clusterDomain": "cluster.local",
        "env": [],
        "podAnnotations": {},
    }


def _node(node: ContainerNode) -> dict[str, Any]:
    requests: dict[str, Any] = {"cpu": _cpus(node)}
    if node.memory_bytes is not None:
        requests["memory"] = str(node.memory_bytes)
    resources: dict[str, Any] = {"requests": requests}
    tolerations = []
    if node.gpus:
        resources["limits"] = {"nvidia.com/gpu": len(node.gpus)}
        tolerations.append({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"})
    return {
        "name": node.name,
        "orchestrator": node.orchestrator,
        "instances": list(node.instances),
        "resources": resources,
        "shm": str(node.shm_bytes),
        "nodeSelector": {},
        "tolerations": tolerations,
    }


def _cpus(node: ContainerNode) -> int:
    """Cores: for the server, an orchestrator, and each instance one or those that it is pinned to."""
    gpu_instances = len(node.instances) if node.gpus else 0
    return 1 + node.orchestrator + len(node.cores) + gpu_instances


def _chart() -> dict[str, Any]:
    version = metadata.version(DISTRIBUTION)
    return {
        "apiVersion": "v2",
        "name": "distserve",
        "description": "Disaggregated LLM serving on Triton Inference Server",
        "type": "application",
        "version": version,
        "appVersion": version,
        "kubeVersion": ">=1.25.0-0",
    }


def _dump(mapping: dict[str, Any]) -> str:
    return _HEADER + str(yaml.safe_dump(mapping, sort_keys=False, width=110))
