"""Reads a placement file and writes the Triton model repository that serves it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from distserve.core.model_config import ModelConfig, resolve_model
from distserve.core.parsing import ConfigError
from distserve_planner.machine_facts import this_machine
from distserve_planner.placement_check import check_placement
from distserve_planner.placement_file import PlacementFile, default_placement, read_placement
from distserve_planner.render import render
from distserve_planner.repository_files import write_repository


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `planner generate`."""
    parser.add_argument(
        "-p",
        "--placement",
        type=Path,
        help="placement file (YAML); default: the demo's, 1 prefill + 1 decode",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the model repository")
    parser.add_argument(
        "--no-machine-check",
        action="store_true",
        help="for another machine's repository: do not look at this one's devices, memory and models",
    )
    parser.add_argument("--force", action="store_true", help="overwrite generated files that were edited")


def run(args: argparse.Namespace) -> int:
    """Writes the repository; returns the exit code."""
    file = default_placement() if args.placement is None else read_placement(args.placement)
    changed = generate(file, args.output, machine_check=not args.no_machine_check, force=args.force)
    count = len(file.placement.instances)
    state = f"{len(changed)} files written" if changed else "up to date"
    sys.stdout.write(f"{args.output}: {count} instances and the orchestrator; {state}\n")
    return 0


def generate(file: PlacementFile, output: Path, machine_check: bool = True, force: bool = False) -> list[str]:
    """Checks a placement and writes its repository to `output`; returns the paths that changed.

    Raises `ConfigError`: the placement cannot run, its model is not here, or `output` has other files.
    """
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
    return write_repository(output, render(file.placement), force)
