"""Docker: the image, and one script per node that runs it."""

from __future__ import annotations

import shlex
from importlib import resources

from distserve_planner.deployment.containers import ContainerNode, ContainerPlan, ModelFolder
from distserve_planner.deployment.serve_command import serve_command
from distserve_planner.deployment.settings import REPOSITORY_FOLDER, SECRET_FILE, Settings

REPOSITORY = "model_repository"  # beside the scripts
ULIMITS = {"memlock": -1, "stack": 64 << 20, "nofile": 65536}
"""Pinned memory without limit and NGC's stack size; file descriptors for many streams."""

_SCRIPT_HEADER = """\
#!/bin/sh
# Written by `planner generate`. Build the image first: see Dockerfile.
set -eu
cd "$(dirname "$0")"
"""


def image_files(monitoring: bool) -> dict[str, str]:
    """Dockerfile and what it leaves out of its context; `monitoring` adds Prometheus and Grafana."""
    text = template("Dockerfile")
    if monitoring:
        text += template("Dockerfile.monitoring")
    return {"Dockerfile": text, ".dockerignore": template("dockerignore")}


def template(name: str) -> str:
    """A file of this package's data."""
    return resources.files("distserve_planner.deployment").joinpath("data", name).read_text()


def run_scripts(plan: ContainerPlan, secret: str | None, settings: Settings) -> dict[str, str]:
    """`run.sh`, or `run-NODE.sh` for each of several nodes. `secret`: the channel key's file on the host."""
    if plan.single:
        return {"run.sh": _script(plan, plan.nodes[0], secret, settings)}
    return {f"run-{node.name}.sh": _script(plan, node, secret, settings) for node in plan.nodes}


def _script(plan: ContainerPlan, node: ContainerNode, secret: str | None, settings: Settings) -> str:
    ports = settings.ports
    name = f"distserve-{node.name}"
    options = [["--name", name]]
    if node.gpus:
        options.append(["--gpus", f'"device={",".join(map(str, node.gpus))}"'])
    options.append([f"--shm-size={node.shm_bytes}"])
    options += [[f"--ulimit={key}={value}:{value}"] for key, value in ULIMITS.items()]
    options += [["--cap-drop=ALL"], ["--security-opt=no-new-privileges"]]
    drains = 2 if node.orchestrator else 1  # the front end's, then the server's
    options.append([f"--stop-timeout={drains * settings.drain_s + settings.stop_margin_s}"])
    if plan.single:
        # the model-control API is for this host only: who can load a model can run code
        options += [[f"--publish=127.0.0.1:{p}:{p}"] for p in (ports.http, ports.grpc, ports.metrics)]
        options.append([f"--publish={ports.openai}:{ports.openai}"])
    else:
        options.append(["--network=host"])
        options.append([f"--health-cmd=distserve health --http {node.host}:{ports.http}"])
    if node.orchestrator:
        options.append(["--env=DISTSERVE_API_KEY"])
    lines = [shlex.join(option) for option in options]
    lines.append(f'--volume="$PWD"/{REPOSITORY}:{REPOSITORY_FOLDER}:ro')
    lines.append(f'--volume="$model":{shlex.quote(plan.model.target)}:ro')
    if secret is not None and not plan.single:
        lines.append(f"--volume={shlex.quote(secret)}:{SECRET_FILE}:ro")
    command = serve_command(settings, node, plan.single, openai=node.orchestrator)
    lines += [shlex.quote(settings.image_name), shlex.join(command)]
    body = " \\\n    ".join(["exec docker run --rm", *lines])
    return f"{_SCRIPT_HEADER}model={_model_source(plan.model)}\n{body}\n"


def _model_source(model: ModelFolder) -> str:
    """Shell text: the model's folder on the host."""
    if model.source is not None:
        return f"${{DISTSERVE_MODEL:-{shlex.quote(model.source)}}}"
    return f'${{DISTSERVE_MODEL:-"$HOME"/.cache/distserve/models/{shlex.quote(model.name)}}}'
