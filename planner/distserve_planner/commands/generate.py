"""Writes the Triton model repository that serves a placement file, or what a search finds.

With --target, the files that run it in containers: beside the repository a Dockerfile, and scripts, a compose
file or a Helm chart.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from distserve.core.parsing import ConfigError
from distserve_planner.deployment.deployment import TARGETS, generate_deployment
from distserve_planner.deployment.settings import Settings
from distserve_planner.generate import generate
from distserve_planner.placement_file import default_placement, read_placement

EXAMPLES = """\
examples:
  planner generate -o model_repository                              the demo's placement
  planner generate -p placement.yaml -o repository                  a saved placement, for this machine
  planner generate -p placement.yaml -o repository --no-machine-check    for another machine
  planner generate -p placement.yaml -o deployment --target compose in containers
  planner generate -o repository --search --model cache:smollm2-135m-instruct --device profile.yaml \\
      --devices-per-node 2 --workload sharegpt --ttft 1 --tpot 0.1  search and repository in one go
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `planner generate`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument(
        "-p",
        "--placement",
        type=Path,
        help="placement file (YAML); default: the demo's, 1 prefill + 1 decode",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of the model repository")
    parser.add_argument("--target", choices=TARGETS, help="write a deployment in containers into the folder")
    parser.add_argument("--image", default="", metavar="NAME:TAG", help="of the deployment's image")
    parser.add_argument(
        "--no-machine-check",
        action="store_true",
        help="for another machine's repository: do not look at this one's devices, memory and models",
    )
    parser.add_argument("--force", action="store_true", help="overwrite generated files that were edited")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.add_argument(
        "--search",
        nargs=argparse.REMAINDER,
        metavar="OPTION",
        help="search first, with these options of `planner search`; last on the line",
    )


def run(args: argparse.Namespace) -> int:
    """Writes the repository; returns the exit code."""
    if args.search is not None:
        return _search(args)
    file = default_placement() if args.placement is None else read_placement(args.placement)
    machine_check = not args.no_machine_check
    if args.target is not None:
        settings = Settings(image=args.image)
        changed = generate_deployment(file, args.target, args.output, settings, machine_check, args.force)
    elif args.image:
        raise ConfigError(f"--image={args.image}: only with --target")
    else:
        changed = generate(file, args.output, machine_check, args.force)
    count = len(file.placement.instances)
    if args.json:
        written = {"output": str(args.output), "instances": list(file.placement.names), "written": changed}
        sys.stdout.write(json.dumps({"schema": "generated/1", **written}, indent=1) + "\n")
        return 0
    state = f"{len(changed)} files written" if changed else "up to date"
    sys.stdout.write(f"{args.output}: {count} instances and the orchestrator; {state}\n")
    return 0


def _search(args: argparse.Namespace) -> int:
    from distserve_planner.commands import search  # slow to import, and a plain `generate` needs none of it

    if args.target is not None:
        raise ConfigError(f"--target={args.target}: not with --search; give the placement that it saved")
    if args.placement is not None:
        raise ConfigError(f"--placement={args.placement}: either a saved placement, or --search")
    parser = argparse.ArgumentParser(prog="planner generate --search")
    search.add_arguments(parser)
    words = [*args.search, "--generate", str(args.output)]
    words += [f"--{name}" for name in ("force", "json") if getattr(args, name)]
    return search.run(parser.parse_args(words))
