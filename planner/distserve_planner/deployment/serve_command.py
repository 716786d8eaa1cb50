"""The command lines that run in the containers."""

from __future__ import annotations

from distserve_planner.deployment.containers import ContainerNode
from distserve_planner.deployment.settings import REPOSITORY_FOLDER, Settings


def serve_command(settings: Settings, node: ContainerNode, single: bool, openai: bool) -> list[str]:
    """Arguments of `distserve serve` for the node's repository.

    A `single` node listens on all of its container's addresses; one of several does on its own, which the
    repository knows. `openai`: the front end runs beside the server, not in a container of its own.
    """
    ports = settings.ports
    words = ["serve", "--model-repository", REPOSITORY_FOLDER, "--echo-log"]
    words += ["--openai-port", str(ports.openai)] if openai else ["--no-openai"]
    words += ["--host", "0.0.0.0"] if single else ["--node", node.name]
    words += ["--http-port", str(ports.http), "--grpc-port", str(node.grpc_port)]
    words += ["--metrics-port", str(ports.metrics)]
    words += ["--start-timeout", str(settings.start_timeout_s), "--drain-timeout", str(settings.drain_s)]
    return words


def openai_command(settings: Settings, model: str, server: str) -> list[str]:
    """Arguments of `distserve openai` for the server at host `server`."""
    ports = settings.ports
    return [
        "openai",
        *("--model", model, "--grpc", f"{server}:{ports.grpc}"),
        *("--metrics-url", f"http://{server}:{ports.metrics}/metrics"),
        *("--host", "0.0.0.0", "--port", str(ports.openai), "--drain-timeout", str(settings.drain_s)),
    ]
