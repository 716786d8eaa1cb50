"""Finds the placement with the most goodput, and says why the others lost."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from distserve.core.parsing import ConfigError
from distserve_planner.commands_output import bars, print_diagnosis, slo_line
from distserve_planner.generate import generate
from distserve_planner.placement import nodes_and_devices, placement_of, predicted
from distserve_planner.placement_file import parse_placement
from distserve_planner.planning_options import (
    add_planning_arguments,
    families_of,
    planning_problem,
    planning_values,
)
from distserve_planner.search.problem import FAMILIES, Problem
from distserve_planner.search.result import Objective, SearchResult
from distserve_planner.search.result_file import to_values
from distserve_planner.search.rules import RulesSettings, authors_memory
from distserve_planner.search.rules_search import RulesResult, rules_search
from distserve_planner.search.search import search

EXAMPLES = """\
examples:
  planner search --model opt-13b --device a100-80g --devices-per-node 4 --workload sharegpt \\
      --ttft 0.25 --tpot 0.1
  planner search --model opt-66b --device a100-80g --nodes 4 --workload longbench --ttft 15 --tpot 0.15 \\
      --objective least-devices --rate 10
  planner search --model cache:smollm2-135m-instruct --device profile.yaml --devices-per-node 2 \\
      --workload trace.csv --ttft 1 --tpot 0.1 --objective cluster --save placement.yaml
  planner search ... --save placement.yaml --generate repository     the model repository in one go
  planner search ... --json > result.json                            for planner report --result
  planner search --rules simdistserve --model opt-13b --device a100-80g --devices-per-node 4 \\
      --workload sharegpt --ttft 0.2 --tpot 0.1                      the authors' search and rules

objectives:
  per-device     most requests/s per device (how the paper compares placements)
  cluster        most requests/s on all devices
  least-devices  fewest devices for --rate requests/s
  slo-scale      tightest objectives that all devices meet at --rate requests/s
  throughput     most tokens/s, latency aside (offline use)

families: high (Algorithm 1), low (Algorithm 2), prefill_first (vLLM), chunked_prefill (Sarathi,
DeepSpeed-MII)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `planner search`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    add_planning_arguments(parser)
    what = parser.add_argument_group("search")
    kinds = ("per-device", "cluster", "least-devices", "slo-scale", "throughput")
    what.add_argument("--objective", choices=kinds, default="per-device", help="see below (%(default)s)")
    what.add_argument("--rate", type=float, metavar="RPS", help="target rate, all devices together")
    what.add_argument("--families", metavar="A,B", help=f"default: {','.join(FAMILIES)}")
    what.add_argument(
        "--rules", choices=("engine", "simdistserve"), default="engine", help="whose event model"
    )
    what.add_argument(
        "--rules-requests", type=int, default=300, metavar="N", help="simdistserve (%(default)s)"
    )
    what.add_argument("--save", type=Path, metavar="FILE", help="write the winner as a placement file")
    what.add_argument("--generate", type=Path, metavar="FOLDER", help="write its model repository, too")
    what.add_argument("--grpc-port", type=int, metavar="PORT", help="of further nodes' tritonservers")
    what.add_argument(
        "--transfer-secret-file",
        metavar="FILE",
        help="that instances on several hosts share, on each of them",
    )
    what.add_argument("--force", action="store_true", help="overwrite generated files that were edited")
    what.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Searches and reports; returns the exit code. Raises `ConfigError`."""
    problem, workload = planning_problem(args)
    problem = replace(problem, families=families_of(args.families))
    jobs = args.jobs or os.cpu_count() or 1
    if args.rules == "simdistserve":
        return _rules(args, problem, jobs)
    objective = Objective(args.objective, args.rate)
    with bars(Console(stderr=True)) as tell:
        result = search(problem, objective, jobs, tell)
    text = None
    if args.save or args.generate:
        text = placement_of(
            problem, result, args.model, workload, args.grpc_port, args.transfer_secret_file
        ).dump()
    if args.json:
        found = {**document(problem, result, workload), "options": planning_values(args)}
        found["result"] = to_values(problem, result)
        sys.stdout.write(json.dumps(found, indent=1, allow_nan=False) + "\n")
    else:
        show(problem, result, workload, Console())
    console = Console(stderr=True)
    if args.save and text is not None:
        args.save.write_text(text, encoding="utf-8")
        console.print(f"{args.save}: written", highlight=False)
    if args.generate and text is not None:
        changed = generate(parse_placement(text), args.generate, machine_check=False, force=args.force)
        console.print(f"{args.generate}: {len(changed)} files written", highlight=False)
    return 0


def document(problem: Problem, result: SearchResult, workload: str) -> dict[str, Any]:
    """`schema: search/1` for `--json`, less what `planner report` reads of it."""
    return {
        "schema": "search/1",
        "winner": {
            **predicted(problem, result, workload),
            "devices": result.winner.deployment.devices,
            "instances": nodes_and_devices(problem, result.placed),
        },
        "families": {family: row.figure for family, row in result.family_best.items()},
        "candidates": [
            {
                "placement": str(row.deployment),
                "devices": row.deployment.devices,
                "figure": row.figure,
                "reason": row.reason,
            }
            for row in result.rows
        ],
        "without_memory": [
            {"tp": shape.tp, "pp": shape.pp, "reason": why} for shape, why in result.shapes.without_memory
        ],
        "statistics": vars(result.statistics) | {"seconds": round(result.statistics.seconds, 2)},
        "notes": list(result.notes),
    }


def show(problem: Problem, result: SearchResult, workload: str, console: Console) -> None:
    """Tables for people."""
    cluster = problem.cluster
    console.print(
        f"{problem.latency.model_name} on {cluster.num_nodes} x {cluster.devices_per_node} {cluster.device}, "
        f"{workload}: {slo_line(problem.slo)}",
        highlight=False,
    )
    table = Table("placement", "devices", "figure", "why", title="best first", title_justify="left")
    for row in sorted(result.rows, key=lambda r: -r.score):
        style = "bold" if row.deployment == result.winner.deployment else None
        table.add_row(str(row.deployment), str(row.deployment.devices), row.figure, row.reason, style=style)
    console.print(table)
    if result.diagnosis is not None:
        print_diagnosis(console, result.diagnosis, problem.slo)
    places = Table("instance", "tp", "pp", "node: devices", title="on the cluster", title_justify="left")
    for item in nodes_and_devices(problem, result.placed):
        where = "; ".join(f"{s['node']}: {','.join(map(str, s['devices']))}" for s in item["stages"])
        places.add_row(item["instance"], str(item["tp"]), str(item["pp"]), where)
    console.print(places)
    if result.shapes.without_memory:
        shape, why = result.shapes.without_memory[0]
        count = len(result.shapes.without_memory)
        console.print(
            f"{count} shapes lack memory, such as tp={shape.tp}, pp={shape.pp}: {why}", highlight=False
        )
    for note in result.notes:
        console.print(f"note: {note}", highlight=False)
    s = result.statistics
    console.print(
        f"{s.candidates} candidates of {s.shapes} shapes, {s.tried} simulated jointly, {s.phases} phases "
        f"alone; {s.seconds:.1f} s, {s.jobs} processes",
        highlight=False,
    )


def _rules(args: argparse.Namespace, problem: Problem, jobs: int) -> int:
    if args.objective != "per-device" or args.save or args.generate:
        raise ConfigError(
            "--rules=simdistserve: compares requests/s per device only, one instance of each phase; "
            "leave out --objective, --save and --generate"
        )
    slo = replace(problem.slo, separate=True)
    rows: list[dict[str, Any]] = []
    table = Table("placement", "devices", "req/s/device", title="authors' rules", title_justify="left")
    for backend in ("distserve", "vllm"):
        settings = RulesSettings(requests=args.rules_requests, backend=backend)
        result: RulesResult = rules_search(authors_memory(replace(problem, slo=slo)), settings, jobs)
        for row in result.rows:
            decode = f" + decode (tp {row.decode.tp}, pp {row.decode.pp})" if row.decode else ""
            name = "prefill" if row.decode else "vllm"
            text = f"{name} (tp {row.prefill.tp}, pp {row.prefill.pp}){decode}"
            rows.append({"placement": text, "devices": row.devices, "rate_per_device": row.rate})
            table.add_row(text, str(row.devices), f"{row.rate:.4g}")
        table.add_section()
    if args.json:
        sys.stdout.write(json.dumps({"schema": "search-simdistserve/1", "rows": rows}, indent=1) + "\n")
    else:
        Console().print(table)
    return 0
