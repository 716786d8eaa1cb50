"""Simulates one placement at one rate: attainment, percentiles, stages, usage, queues."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from distserve.core.parsing import ConfigError
from distserve.core.shapes import Shape
from distserve_planner.commands_output import bars, print_diagnosis, slo_line
from distserve_planner.goodput import Precision, Requests
from distserve_planner.placement import figures, with_limits_of
from distserve_planner.placement_file import read_placement
from distserve_planner.planning_options import add_planning_arguments, planning_problem
from distserve_planner.report.arguments import placed_deployment
from distserve_planner.search.assignment import assign
from distserve_planner.search.deployment import Deployment, Group
from distserve_planner.search.diagnosis import PERCENTILES, diagnose
from distserve_planner.search.problem import Problem
from distserve_planner.search.rules import authors_memory, run_once
from distserve_planner.search.system_spec import system_spec
from distserve_planner.simdistserve import Latencies
from distserve_planner.workload.readers import read_trace

EXAMPLES = """\
examples:
  planner simulate --model opt-13b --device a100-80g --workload sharegpt --ttft 0.25 --tpot 0.1 \\
      --prefill 1:2,1 --decode 2:1,1 --rate 6
  planner simulate ... --unified 4:2,1 --policy chunked_prefill --chunk-tokens 512 --rate 6
  planner simulate ... --placement placement.yaml --rate 6
  planner simulate ... --replay trace.csv --prefill 1:1,1 --decode 1:1,1        a trace as it is
  planner simulate ... --rules simdistserve --prefill 2,1 --decode 1,1 --rate 3  the authors' event model

instances are COUNT:TP,PP or TP,PP; --paired keeps prefill i and decode i together, as Algorithm 2 does
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `planner simulate`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    add_planning_arguments(parser)
    what = parser.add_argument_group("placement")
    what.add_argument("--placement", type=Path, metavar="FILE", help="schema: placement/1")
    what.add_argument("--prefill", metavar="N:TP,PP", help="prefill instances")
    what.add_argument("--decode", metavar="N:TP,PP", help="decode instances")
    what.add_argument("--unified", metavar="N:TP,PP", help="colocated instances, instead of both")
    what.add_argument("--policy", choices=("prefill_first", "chunked_prefill"), default="prefill_first")
    what.add_argument("--paired", action="store_true", help="segments of a pair share nodes (Algorithm 2)")
    load = parser.add_argument_group("load")
    load.add_argument("--rate", type=float, metavar="RPS", help="requests/s, all devices together")
    load.add_argument("--replay", type=Path, metavar="TRACE", help="this trace instead of new requests")
    load.add_argument("--requests", type=int, default=4000, metavar="N", help="to measure (%(default)s)")
    load.add_argument("--rules", choices=("engine", "simdistserve"), default="engine", help="event model")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Simulates and reports; returns the exit code. Raises `ConfigError`."""
    problem, workload = planning_problem(args)
    if args.requests < 1:
        raise ConfigError(f"--requests={args.requests}: must be at least 1")
    deployment = _deployment(args)
    rate = args.rate
    if args.replay is not None:
        trace = read_trace(args.replay)
        rate = trace.rate_rps if rate is None else rate
        workload = trace.name
        problem = replace(problem, requests=Requests(trace).allowing(problem.assumptions.max_tokens))
    if rate is None or not rate > 0:
        raise ConfigError(f"--rate={rate}: give requests per second above 0, or --replay with a timed trace")
    if args.rules == "simdistserve":
        return _rules(args, problem, deployment, rate)
    placed = assign(deployment, problem.cluster)
    if placed is None:
        raise ConfigError(
            f"{deployment} needs {deployment.devices} devices, tp of one instance within a node; the cluster "
            f"has {problem.cluster.num_devices} in {problem.cluster.num_nodes} nodes (--nodes, "
            "--devices-per-node)"
        )
    for _, group in deployment.groups:
        if problem.kv_tokens(group.shape) < problem.assumptions.block_size:
            raise ConfigError(
                f"tp={group.shape.tp}, pp={group.shape.pp}: the weights leave no memory for KV; use more "
                "devices"
            )
    system = system_spec(problem, deployment, placed)
    if args.placement is not None:
        system = with_limits_of(read_placement(args.placement).placement, problem, system)
    precision = Precision(1, args.requests, 500, seed=args.seed)
    with bars(Console(stderr=True)) as tell:
        look = diagnose(
            system, problem.requests, rate, problem.slo, precision, lambda d, n: tell("requests", d, n)
        )
    if args.json:
        out = {"schema": "simulation/1", "placement": str(deployment), "workload": workload, "rate_rps": rate}
        queues = {
            "times_s": look.queue_times_s, "prefill": look.prefill_queue, "decode": look.decode_queue,
        }  # fmt: skip
        sys.stdout.write(json.dumps({**out, **figures(look), "queues": queues}, indent=1) + "\n")
        return 0
    console = Console()
    console.print(f"{deployment}\n{workload}: {slo_line(problem.slo)}", highlight=False)
    print_diagnosis(console, look, problem.slo)
    return 0


def _deployment(args: argparse.Namespace) -> Deployment:
    if args.placement is not None:
        if args.prefill or args.decode or args.unified:
            raise ConfigError(
                "--placement: describes all instances; leave out --prefill, --decode, --unified"
            )
        for name in ("order", "prefill_chunk_tokens", "max_batch_size", "batch_tokens", "chunk_tokens"):
            if getattr(args, name) is not None:
                option = f"--{name.replace('_', '-')}={getattr(args, name)}"
                raise ConfigError(f"{option}: the placement file says it; change it there")
        return placed_deployment(read_placement(args.placement).placement, str(args.placement))
    if args.unified is not None:
        if args.prefill or args.decode:
            raise ConfigError("--unified: either colocated instances, or --prefill and --decode")
        chunk = int(args.chunk_tokens.split(",")[0]) if args.chunk_tokens else 512
        chunked = args.policy == "chunked_prefill"
        return Deployment(
            args.policy, unified=group(args.unified, "--unified"), chunk_tokens=chunk if chunked else None
        )
    if args.prefill is None or args.decode is None:
        raise ConfigError("--prefill and --decode: give both, or --unified, or --placement FILE")
    prefill, decode = group(args.prefill, "--prefill"), group(args.decode, "--decode")
    if args.paired and prefill.count != decode.count:
        raise ConfigError(
            f"--paired: needs as many decode as prefill instances, not {decode.count} and {prefill.count}"
        )
    return Deployment("low" if args.paired else "high", prefill, decode)


def group(text: str, option: str) -> Group:
    """`COUNT:TP,PP` or `TP,PP`. Raises `ConfigError`."""
    count, _, shape = text.rpartition(":")
    parts = [count or "1", *shape.split(",")]
    if len(parts) != 3 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"{option}={text}: expected COUNT:TP,PP, for example 2:4,1")
    return Group(Shape(int(parts[1]), int(parts[2])), int(parts[0]))


def _rules(args: argparse.Namespace, problem: Problem, deployment: Deployment, rate: float) -> int:
    if any(group.count > 1 for _, group in deployment.groups):
        raise ConfigError("--rules=simdistserve: one instance of each kind; leave out the counts")
    first = deployment.prefill or deployment.unified
    assert first is not None
    decode = deployment.decode.shape if deployment.decode is not None else None
    count = min(args.requests, len(problem.requests))
    seen = run_once(authors_memory(problem), problem.requests, first.shape, decode, rate, count)
    result = _percentiles(seen)
    if args.json:
        sys.stdout.write(
            json.dumps(
                {"schema": "simulation-simdistserve/1", "rate_rps": rate, "requests": count, **result},
                indent=1,
            )
            + "\n"
        )
        return 0
    table = Table("authors' rules", *(f"P{p}" for p in PERCENTILES))
    for name, values in result.items():
        table.add_row(name, *(f"{1000 * v:.4g} ms" for v in values.values()))
    Console().print(table)
    return 0


def _percentiles(seen: Latencies) -> dict[str, Any]:
    return {
        "ttft_s": {f"p{p}": float(np.percentile(seen.ttft_s, p)) for p in PERCENTILES},
        "tpot_s": {f"p{p}": float(np.percentile(seen.tpot_s, p)) for p in PERCENTILES},
    }
