"""`planner generate --target`: checks a placement and writes its deployment."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from distserve.core.model_config import ModelConfig, resolve_model
from distserve.core.parsing import ConfigError
from distserve_planner.deployment.chart import chart_files
from distserve_planner.deployment.compose import compose_file
from distserve_planner.deployment.containers import container_plan
from distserve_planner.deployment.docker import REPOSITORY, image_files, run_scripts
from distserve_planner.deployment.settings import SECRET_FILE, Settings
from distserve_planner.generate import check
from distserve_planner.placement_check import check_placement
from distserve_planner.placement_file import Placement, PlacementFile
from distserve_planner.render import render
from distserve_planner.repository_files import write_repository

Target = Literal["docker", "compose", "kubernetes"]
TARGETS: tuple[Target, ...] = ("docker", "compose", "kubernetes")

_HEADER = "# Written by `planner generate`: the placement as the containers see it.\n"


def generate_deployment(
    file: PlacementFile,
    target: Target,
    output: Path,
    settings: Settings,
    machine_check: bool = True,
    force: bool = False,
) -> list[str]:
    """Checks a placement and writes its deployment to `output`; returns the paths that changed.

    For `docker` and `compose` the placement is that of this machine unless `machine_check` is off; for
    `kubernetes` it never is. Raises `ConfigError`.
    """
    if target == "kubernetes":
        _check_for_cluster(file, settings)
    else:
        check(file, machine_check)
    files = deployment_files(file.placement, target, settings)
    # the repository has a manifest of its own, so that other commands may change it
    inside = {path: text for path, text in files.items() if path.startswith(f"{REPOSITORY}/")}
    beside = {path: text for path, text in files.items() if path not in inside}
    changed = write_repository(output, beside, force)
    if inside:
        repository = {path.removeprefix(f"{REPOSITORY}/"): text for path, text in inside.items()}
        changed += [f"{REPOSITORY}/{p}" for p in write_repository(output / REPOSITORY, repository, force)]
    return changed


def deployment_files(placement: Placement, target: Target, settings: Settings) -> dict[str, str]:
    """Relative path -> text of every file of a deployment. Raises `ConfigError`."""
    plan = container_plan(_with_absolute_model(placement), settings)
    files = image_files(monitoring=target == "compose")
    if target == "kubernetes":
        return files | {f"chart/{path}": text for path, text in chart_files(plan, settings).items()}
    files["placement.yaml"] = _HEADER + plan.placement.dump()
    files |= {f"{REPOSITORY}/{path}": text for path, text in render(plan.placement).items()}
    if target == "compose":
        return files | {"compose.yaml": compose_file(plan, settings)}
    return files | run_scripts(plan, placement.transfer_secret_file, settings)


def _with_absolute_model(placement: Placement) -> Placement:
    if placement.model.startswith("cache:"):
        return placement
    return dataclasses.replace(placement, model=str(Path(placement.model).expanduser().absolute()))


def _check_for_cluster(file: PlacementFile, settings: Settings) -> None:
    """As far as it can be told here. Addresses, ports and the secret are the chart's business."""
    placement = file.placement
    nodes = tuple(
        dataclasses.replace(node, host=node.name, grpc_port=settings.ports.grpc) for node in placement.nodes
    )
    in_cluster = dataclasses.replace(placement, nodes=nodes, transfer_secret_file=SECRET_FILE)
    try:
        model = ModelConfig.load(resolve_model(placement.model))
    except ConfigError:
        model = None  # it lies in the cluster
    check_placement(PlacementFile(in_cluster, file.document), model, None)
