"""Makes a running server be what a placement file says: loads, attaches, drains and unloads instances.

No request is lost, and both phases are served all the while. A failure half-way is rolled back.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from distserve.core.model_config import ModelConfig, resolve_model
from distserve_planner.device_names import parse_device
from distserve_planner.folder_lock import LockedError, exclusive
from distserve_planner.machine_facts import MachineFacts, this_machine
from distserve_planner.placement_check import check_placement, is_this_host, rank_bytes
from distserve_planner.placement_file import Placement, read_placement
from distserve_tools.access_files import found
from distserve_tools.apply.apply import Applier, ApplyError, Timeouts
from distserve_tools.apply.instances import Instances, instance_plan
from distserve_tools.apply.nodes import Nodes
from distserve_tools.apply.server import ServerError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `distserve apply`."""
    parser.add_argument("placement", type=Path, help="placement file that the server is to be")
    parser.add_argument("--grpc", required=True, metavar="HOST:PORT", help="of the running server")
    parser.add_argument(
        "--model-repository", type=Path, required=True, metavar="FOLDER", help="that the server runs from"
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="write the placement there once it is in force"
    )
    parser.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="of a server on another machine: its transfer_secret_file",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the steps and change nothing")
    times = Timeouts()
    parser.add_argument("--load-timeout", type=float, default=times.load_s, metavar="S", help="%(default)g")
    parser.add_argument("--drain-timeout", type=float, default=times.drain_s, metavar="S", help="%(default)g")


def run(args: argparse.Namespace) -> int:
    """0: in force; 1: not, and everything is as before; 3: not, and rolling back failed too."""
    file = read_placement(args.placement)
    model = ModelConfig.load(resolve_model(file.placement.model))
    timeouts = Timeouts(load_s=args.load_timeout, drain_s=args.drain_timeout)
    try:
        access = found(args.grpc, args.secret_file)
        nodes = Nodes(file.placement.nodes, args.grpc, access)
        with nodes as server, exclusive(args.model_repository, "changed"):
            machine = with_memory_of(this_machine(), server.engines(), file.placement, model)
            check_placement(file, model, machine)
            applier = Applier(server, args.model_repository, file.placement, timeouts, _say)
            if args.dry_run:
                steps = applier.steps()
                sys.stdout.write("".join(f"{step}\n" for step in steps) or "nothing to change\n")
                return 0
            placement = applier.run()
            if args.save is not None:
                save_placement(args.save, placement)
    except (LockedError, ServerError, ApplyError) as error:
        sys.stderr.write(f"distserve apply: {error}\n")
        return 3 if isinstance(error, ApplyError) and not error.rolled_back else 1
    _say(f"in force: {', '.join(placement.names)}")
    return 0


def with_memory_of(
    machine: MachineFacts, live: Instances, placement: Placement, model: ModelConfig
) -> MachineFacts:
    """As if nothing were live on its cores: what instances hold is theirs, or their successors'."""
    held = 0
    for engine in live.values():
        if is_this_host(engine.node.host) and parse_device(engine.config.devices[0]).kind == "cpu":
            held += len(engine.config.devices) * rank_bytes(placement, model, instance_plan(engine))
    return replace(machine, memory_available_bytes=machine.memory_available_bytes + held)


def save_placement(path: Path, placement: Placement) -> None:
    """Replaces the file in one go, so that a reader sees the old or the new text."""
    descriptor, staging = tempfile.mkstemp(prefix=".new-", dir=path.resolve().parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(placement.dump())
        os.chmod(staging, 0o644)
        os.replace(staging, path)
    except BaseException:
        Path(staging).unlink(missing_ok=True)
        raise


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
