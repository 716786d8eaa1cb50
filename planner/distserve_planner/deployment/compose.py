"""A compose file: server, OpenAI front end, Prometheus, Grafana, on one host."""

from __future__ import annotations

from typing import Any

import yaml

from distserve.core.parsing import ConfigError
from distserve_planner.deployment.containers import ContainerPlan, ModelFolder
from distserve_planner.deployment.docker import REPOSITORY, ULIMITS
from distserve_planner.deployment.serve_command import openai_command, serve_command
from distserve_planner.deployment.settings import REPOSITORY_FOLDER, Settings

_HEADER = (
    "# Written by `planner generate`. Change the placement file and generate again.\n"
    "# GRAFANA_PASSWORD must be set; DISTSERVE_API_KEY and DISTSERVE_MODEL may be.\n"
)
_SERVER = "server"  # its name is its address for the others; the Dockerfile's scrape target has it too


def compose_file(plan: ContainerPlan, settings: Settings) -> str:
    """The text of `compose.yaml`. Raises `ConfigError` for a placement of several nodes."""
    if not plan.single:
        names = ", ".join(node.name for node in plan.nodes)
        raise ConfigError(
            f"--target compose: the placement has several nodes ({names}), and compose runs on one host; "
            "use --target kubernetes, or --target docker with one script per host"
        )
    services = {
        _SERVER: _server(plan, settings),
        "openai": _front_end(plan, settings),
        "prometheus": _prometheus(),
        "grafana": _grafana(),
    }
    values = {"name": "distserve", "services": services, "volumes": {"prometheus": {}, "grafana": {}}}
    return _HEADER + str(yaml.dump(values, Dumper=_NoAliases, sort_keys=False, width=110))


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _server(plan: ContainerPlan, settings: Settings) -> dict[str, Any]:
    node, ports = plan.nodes[0], settings.ports
    repository = {"type": "bind", "source": f"./{REPOSITORY}", "target": REPOSITORY_FOLDER, "read_only": True}
    service: dict[str, Any] = {
        "image": literal(settings.image_name),
        "build": {"context": ".", "target": "server"},
        "command": serve_command(settings, node, single=True, openai=False),
        "shm_size": node.shm_bytes,
        "ulimits": {name: {"soft": value, "hard": value} for name, value in ULIMITS.items()},
        "volumes": [repository, _model_volume(plan.model)],
        # the model-control API is for this host only: who can load a model can run code
        "ports": [f"127.0.0.1:{port}:{port}" for port in (ports.http, ports.grpc, ports.metrics)],
        "stop_grace_period": f"{settings.drain_s + settings.stop_margin_s}s",
        **_common(),
    }
    if node.gpus:
        device = {"driver": "nvidia", "device_ids": [str(i) for i in node.gpus], "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return service


def _front_end(plan: ContainerPlan, settings: Settings) -> dict[str, Any]:
    port = settings.ports.openai
    return {
        "image": literal(settings.image_name),
        "command": [literal(w) for w in openai_command(settings, plan.placement.model, _SERVER)],
        "environment": {"DISTSERVE_API_KEY": "${DISTSERVE_API_KEY:-}"},
        "volumes": [_model_volume(plan.model)],
        "ports": [f"{port}:{port}"],
        "depends_on": {_SERVER: {"condition": "service_healthy"}},
        "healthcheck": {
            "test": ["CMD", "distserve", "health", "--openai", f"127.0.0.1:{port}"],
            "interval": "15s",
            "timeout": "10s",
            "start_period": "60s",
            "retries": 3,
        },
        "stop_grace_period": f"{settings.drain_s + settings.stop_margin_s}s",
        **_common(),
    }


def _prometheus() -> dict[str, Any]:
    return {
        "build": {"context": ".", "target": "prometheus"},
        "volumes": ["prometheus:/prometheus"],
        "ports": ["127.0.0.1:9090:9090"],
        **_common(),
    }


def _grafana() -> dict[str, Any]:
    return {
        "build": {"context": ".", "target": "grafana"},
        "environment": {"GF_SECURITY_ADMIN_PASSWORD": "${GRAFANA_PASSWORD:?give admin a password}"},
        "volumes": ["grafana:/var/lib/grafana"],
        "ports": ["127.0.0.1:3000:3000"],
        "depends_on": ["prometheus"],
        **_common(),
    }


def _common() -> dict[str, Any]:
    return {"restart": "unless-stopped", "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}


def _model_volume(model: ModelFolder) -> dict[str, Any]:
    if model.source is None:
        default = f"${{HOME}}/.cache/distserve/models/{literal(model.name)}"
    else:
        default = literal(model.source)
    source = f"${{DISTSERVE_MODEL:-{default}}}"
    return {"type": "bind", "source": source, "target": literal(model.target), "read_only": True}


def literal(text: str) -> str:
    """Text that compose's interpolation leaves as it is."""
    return text.replace("$", "$$")
