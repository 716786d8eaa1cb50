"""Checks the planner against the paper: Table 3, the ablation of Fig. 11, and speed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from distserve.core.parsing import ConfigError
from distserve_planner.bench.ablation import PAPER_ORDER, ablation, ablation_cases
from distserve_planner.bench.paper import CASES
from distserve_planner.bench.speed import (
    THEIR_CPU_S,
    authors_problem,
    bounded_engine,
    exhaustive_engine,
    exhaustive_rules,
    large_search,
)
from distserve_planner.bench.table3 import Table3Row, table3
from distserve_planner.commands_output import bars
from distserve_planner.search.search import Progress

EXAMPLES = """\
examples:
  planner bench speed                       the authors' search of OPT-13B on 1 x 4, and OPT-175B on 4 x 8
  planner bench table3                      the five rows (six with the artifact's objectives)
  planner bench table3 --only 66B --switches --quick     how each assumption moves the winner
  planner bench ablation                    vLLM, vLLM++, DistServe-Low, DistServe-High

times are the authors' A100 coefficients; those of OPT-175B come from their history and are partly predicted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `planner bench`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("check", choices=("table3", "ablation", "speed"))
    parser.add_argument("--only", default="", metavar="TEXT", help="rows of table3 whose name contains this")
    parser.add_argument("--switches", action="store_true", help="table3 under every other assumption, too")
    parser.add_argument("--quick", action="store_true", help="fewer requests; figures within some %%")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: all cores)")
    parser.add_argument(
        "--their-cpu-s", type=float, default=THEIR_CPU_S, help="their search on this machine (%(default)g s)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Runs one check; returns the exit code. Raises `ConfigError`."""
    if args.jobs is not None and args.jobs < 1:
        raise ConfigError(f"--jobs={args.jobs}: must be at least 1")
    jobs = args.jobs or os.cpu_count() or 1
    if args.check == "speed":
        rows, table = _speed(args, jobs)
    else:
        with bars(Console(stderr=True)) as tell:
            rows, table = (_table3 if args.check == "table3" else _ablation)(args, jobs, tell)
    if args.json:
        sys.stdout.write(
            json.dumps({"schema": "bench/1", "check": args.check, "rows": rows}, indent=1) + "\n"
        )
    else:
        Console().print(table)
    return 0


def _table3(args: argparse.Namespace, jobs: int, tell: Progress) -> tuple[list[dict[str, Any]], Table]:
    cases = tuple(case for case in CASES if args.only.lower() in case.name.lower())
    if not cases:
        raise ConfigError(f"--only={args.only}: no row; rows are {', '.join(c.name for c in CASES)}")
    err = Console(stderr=True)  # lines stay, bars do not

    def done(row: Table3Row) -> None:
        err.print(
            f"{row.case.name}, {row.assumption}: {row.ours.deployment} ({row.seconds:.0f} s)", highlight=False
        )

    found = table3(cases, jobs, quick=args.quick, switches=args.switches, done=done, progress=tell)
    table = Table(
        "row", "assumption", "ours", "req/s/device", "paper's choice", "req/s/device", "it is limited by"
    )
    rows = []
    for row in found:
        ours, paper = str(row.ours.deployment), str(row.case.unit)
        table.add_row(
            row.case.name, row.assumption, "the same" if row.same else ours, f"{row.ours_rate:.3f}", paper,
            f"{row.paper_rate:.3f}", row.why,
        )  # fmt: skip
        rows.append(
            {
                "row": row.case.name,
                "assumption": row.assumption,
                "same": row.same,
                "ours": ours,
                "ours_rate_per_device": row.ours_rate,
                "paper": paper,
                "paper_rate_per_device": row.paper_rate,
                "limit": row.why,
                "seconds": row.seconds,
            }
        )
    return rows, table


def _ablation(args: argparse.Namespace, jobs: int, tell: Progress) -> tuple[list[dict[str, Any]], Table]:
    table = Table(
        "objectives", "system", "best placement", "req/s/device", "to Low", caption=f"paper: {PAPER_ORDER}"
    )
    rows = []
    for case in ablation_cases():
        name = f"{case.ttft_s:g} s / {case.tpot_s:g} s"
        for bar in ablation(case, jobs, args.quick, tell):
            table.add_row(name, bar.system, bar.placement, f"{bar.rate:.3f}", f"{bar.ratio:.2f}")
            rows.append({"objectives": name, **vars(bar)})
        table.add_section()
    return rows, table


def _speed(args: argparse.Namespace, jobs: int) -> tuple[list[dict[str, Any]], Table]:
    problem = authors_problem()
    table = Table("search", "seconds", "to theirs", "found")
    rows = []
    exhaustive_engine(problem)  # imports and tables are not what is timed
    err = Console(stderr=True)  # a line per search: the thread of a bar would be timed, too
    for measure in (exhaustive_engine, exhaustive_rules, bounded_engine):
        timing = measure(problem)
        err.print(f"{timing.name}: {timing.cpu_s:.2f} s", highlight=False)
        ratio = args.their_cpu_s / timing.cpu_s
        name = f"OPT-13B 1 x 4, {timing.name} (CPU)"
        table.add_row(name, f"{timing.cpu_s:.3f}", f"1/{ratio:.0f}", timing.detail)
        rows.append({"search": name, "seconds": timing.cpu_s, "ratio": ratio, "found": timing.detail})
    wall, cpu, text = large_search(jobs)
    text = f"{cpu:.1f} CPU-s with start-up of the processes; {text}"
    name = f"OPT-175B 4 x 8, low affinity, {jobs} processes (wall)"
    table.add_row(name, f"{wall:.1f}", "", text)
    rows.append({"search": name, "seconds": wall, "found": text})
    return rows, table
