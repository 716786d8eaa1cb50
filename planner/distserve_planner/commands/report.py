"""Searches one case, or takes a search's result, and writes a page with the paper's figures for it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from distserve.core.parsing import ConfigError
from distserve_planner.commands_output import bars
from distserve_planner.placement_file import read_placement
from distserve_planner.planning_options import (
    add_planning_arguments,
    planning_problem,
    with_planning_values,
)
from distserve_planner.report.arguments import placed_deployment
from distserve_planner.report.build import build, write
from distserve_planner.report.document import document
from distserve_planner.report.effort import Effort
from distserve_planner.report.style import require_matplotlib
from distserve_planner.report.systems import Case, systems
from distserve_planner.search.assignment import assign
from distserve_planner.search.deployment import Deployment
from distserve_planner.search.problem import Problem
from distserve_planner.search.result import Objective
from distserve_planner.search.result_file import from_values
from distserve_planner.search.search import search

EXAMPLES = """\
examples:
  planner report --model opt-13b --device a100-80g --devices-per-node 4 --workload sharegpt \\
      --ttft 0.25 --tpot 0.1 --quick -o report          a first look
  planner report --model opt-66b --device a100-80g --nodes 4 --workload sharegpt --ttft 2.5 --tpot 0.15 \\
      --baseline a100-80g-vllm -o report                 against vLLM's own times
  planner report --model cache:smollm2-135m-instruct --device profile.yaml --devices-per-node 4 \\
      --workload mine.yaml --ttft 1 --tpot 0.1 --placement placement.yaml -o report
  planner report --result result.json -o report          of planner search ... --json > result.json
  planner report ... --json > report.json                the numbers behind every figure

writes OUTPUT/report.html, which needs nothing else, and OUTPUT/figures/*.png
"""


OBJECTIVES = ("per-device", "cluster", "least-devices")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `planner report`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    add_planning_arguments(parser, required=False)
    what = parser.add_argument_group("report")
    what.add_argument("-o", "--output", type=Path, default=Path("report"), help="folder (%(default)s)")
    what.add_argument(
        "--result",
        type=Path,
        metavar="FILE",
        help="case and result of a planner search --json, which is not done again",
    )
    what.add_argument("--objective", choices=OBJECTIVES, help="what is best, see planner search (per-device)")
    what.add_argument("--rate", type=float, metavar="RPS", help="target rate, for least-devices")
    what.add_argument("--placement", type=Path, metavar="FILE", help="draw this placement beside the others")
    what.add_argument("--search-time", action="store_true", help="also measure the search itself (slow)")
    what.add_argument("--json", action="store_true", help="print the numbers as JSON on standard output")


def run(args: argparse.Namespace) -> int:
    """Writes the report; returns the exit code. Raises `ConfigError`."""
    require_matplotlib()
    began = time.monotonic()
    saved = None
    if args.result is not None:
        saved = _saved(args)
        args = with_planning_values(args, saved.get("options"), str(args.result))
    effort = Effort.quick() if args.quick else Effort.full()
    jobs = args.jobs or os.cpu_count() or 1
    problem, workload = planning_problem(args)
    usual = problem.unified_shape
    if saved is not None and usual is not None:
        raise ConfigError(
            f"{args.result}: was searched with --vllm-shape, so the best colocated placement is not known; "
            "search without it"
        )
    own = _given(args.placement, problem)
    console = Console(stderr=True)
    with bars(console) as tell:
        if saved is not None:
            problem, result = from_values(problem, saved.get("result"), f"{args.result}: result")
        else:
            problem = replace(problem, unified_shape=None)  # vLLM++ is the best of all shapes
            objective = Objective(args.objective or "per-device", args.rate)
            result = search(problem, objective, jobs, lambda s, d, n: tell(f"search: {s}", d, n))
        case = Case(problem, result, systems(problem, result, own, usual), workload, jobs)
        report = build(case, effort, jobs if args.search_time else None, tell)
        path = write(report, args.output, _footer(args, effort), tell)
    if args.json:
        sys.stdout.write(
            json.dumps(document(case, report.sections, effort.name), indent=1, allow_nan=False) + "\n"
        )
    pictures = sum(len(section.panels) for section in report.sections)
    console.print(
        f"best: {result.winner.deployment}, {result.winner.figure}", highlight=False, soft_wrap=True
    )
    console.print(
        f"wrote {path} and {pictures} pictures in {time.monotonic() - began:.0f} s",
        highlight=False,
        soft_wrap=True,
    )
    return 0


def _saved(args: argparse.Namespace) -> dict[str, Any]:
    """The file of `--result`. Raises `ConfigError`: not such a file, or options that contradict it."""
    for name in ("objective", "rate"):
        if getattr(args, name) is not None:
            raise ConfigError(
                f"--{name}={getattr(args, name)}: the search of --result had its own; leave it out"
            )
    try:
        values = json.loads(args.result.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{args.result}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{args.result}: not JSON ({error})") from None
    if not isinstance(values, dict) or values.get("schema") != "search/1" or "result" not in values:
        raise ConfigError(f"{args.result}: expected the output of planner search --json (schema: search/1)")
    kind = values["result"].get("objective", {}).get("kind") if isinstance(values["result"], dict) else None
    if kind not in OBJECTIVES:
        raise ConfigError(f"{args.result}: objective={kind}: a report needs one of {', '.join(OBJECTIVES)}")
    return values


def _given(path: Path | None, problem: Problem) -> Deployment | None:
    if path is None:
        return None
    own = placed_deployment(read_placement(path).placement, str(path))
    if assign(own, problem.cluster) is None:
        raise ConfigError(
            f"{path}: {own} needs {own.devices} devices, the cluster has {problem.cluster.num_devices} in "
            f"{problem.cluster.num_nodes} nodes; give a larger cluster (--nodes, --devices-per-node, "
            "--cluster)"
        )
    for role, group in own.groups:
        if not problem.kv_tokens(group.shape):
            raise ConfigError(
                f"{path}: {role} instances of tp={group.shape.tp}, pp={group.shape.pp} leave no memory for "
                "KV; use more devices for each"
            )
    return own


def _footer(args: argparse.Namespace, effort: Effort) -> str:
    shown = {
        k: v
        for k, v in sorted(vars(args).items())
        if v not in (None, False) and k not in ("output", "json", "result")
    }
    options = " ".join(
        f"--{k.replace('_', '-')}" if v is True else f"--{k.replace('_', '-')} {v}" for k, v in shown.items()
    )
    return (
        f"Written by planner report {options} ({effort.name}: {effort.curve_requests} requests per point of "
        "a curve). The paper is DistServe, OSDI'24 (arXiv 2401.09670)."
    )
