"""Checks a placement and writes its model repository."""

from __future__ import annotations

from pathlib import Path

from distserve.core.model_config import ModelConfig, resolve_model
from distserve.core.parsing import ConfigError
from distserve_planner.machine_facts import this_machine
from distserve_planner.placement_check import check_placement
from distserve_planner.placement_file import PlacementFile
from distserve_planner.render import render
from distserve_planner.repository_files import write_repository


def generate(file: PlacementFile, output: Path, machine_check: bool = True, force: bool = False) -> list[str]:
    """Checks a placement and writes its repository to `output`; returns the paths that changed.

    Raises `ConfigError`: the placement cannot run, its model is not here, or `output` has other files.
    """
    check(file, machine_check)
    return write_repository(output, render(file.placement), force)


def check(file: PlacementFile, machine_check: bool = True) -> None:
    """Raises `ConfigError` if the placement cannot run; with `machine_check`, here."""
    model = None
    if machine_check:
        try:
            model = ModelConfig.load(resolve_model(file.placement.model))
        except ConfigError as error:
            raise ConfigError(
                file.document.located(
                    ("model",), f"{error} (for another machine's repository: --no-machine-check)"
                )
            ) from None
    check_placement(file, model, this_machine() if machine_check else None)
