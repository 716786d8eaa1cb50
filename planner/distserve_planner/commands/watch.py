"""Watches the request log of a running server: advises, or applies, another placement when the load changes.

Or, with --rates, replays a table of rates and compares the watch with a static plan and an autoscaler.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from distserve.core.parsing import ConfigError
from distserve_planner.folder_lock import LockedError, exclusive
from distserve_planner.placement_file import read_placement
from distserve_planner.planning_options import add_planning_arguments, families_of, planning_problem
from distserve_planner.report.document import plain
from distserve_planner.search.problem import Problem
from distserve_planner.watch import advice as advices
from distserve_planner.watch.carry_out import placement_for
from distserve_planner.watch.compare import compare
from distserve_planner.watch.decision import SwitchRule
from distserve_planner.watch.drift import DriftRule
from distserve_planner.watch.follow import Follow
from distserve_planner.watch.replay import Result, SteadyStates, finer, mixes_by_hour, read_rates
from distserve_planner.watch.watcher import Advice
from distserve_planner.workload.named import named_workload

EXAMPLES = """\
examples:
  planner watch --model opt-13b --device a100-80g --workload sharegpt --ttft 0.25 --tpot 0.1 \\
      --placement placement.yaml --log requests.jsonl --advice advice            advice.json and advice.html
  planner watch ... --apply --grpc 127.0.0.1:8001 --model-repository repository   and changes the server
  planner watch ... --log old.jsonl --until-end                                   over a log that is complete
  planner watch ... --rates rates.csv --mixes longbench,sharegpt --peak-rate 24   compares policies
"""
_APPLY_S = 3600.0
_NOT_ROLLED_BACK = 3  # exit code of the applier


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `planner watch`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    add_planning_arguments(parser)
    drift, switch = DriftRule(), SwitchRule()
    what = parser.add_argument_group("watching")
    what.add_argument("--log", type=Path, metavar="FILE", help="schema: request_log/1; may still grow")
    what.add_argument("--placement", type=Path, metavar="FILE", help="what serves now (schema: placement/1)")
    what.add_argument("--families", metavar="F,F", help="of high, prefill_first, chunked_prefill (all)")
    what.add_argument("--fixed-devices", action="store_true", help="never use more or fewer devices")
    what.add_argument("--until-end", action="store_true", help="stop at the end of the log")
    what.add_argument("--advice", type=Path, metavar="PATH", help="write PATH.json and PATH.html")
    what.add_argument("--window-s", type=float, default=drift.window_s, metavar="S", help="%(default)g")
    what.add_argument(
        "--false-alarms-per-day", type=float, default=drift.false_alarms_per_day, metavar="N",
        help="at most so many are expected (%(default)g)",
    )  # fmt: skip
    what.add_argument("--horizon-s", type=float, default=switch.horizon_s, metavar="S", help="%(default)g")
    what.add_argument("--settle-s", type=float, default=switch.settle_s, metavar="S", help="%(default)g")
    what.add_argument(
        "--load-s", type=float, default=switch.load_s, metavar="S", help="loading (%(default)g)"
    )
    what.add_argument("--drain-s", type=float, default=switch.drain_s, metavar="S", help="%(default)g")
    act = parser.add_argument_group("applying")
    act.add_argument("--apply", action="store_true", help="carry out what is advised")
    act.add_argument("--grpc", metavar="HOST:PORT", help="of the running server")
    act.add_argument("--model-repository", type=Path, metavar="FOLDER", help="that it runs from")
    act.add_argument(
        "--secret-file", type=Path, metavar="FILE", help="of a server on another machine, for the applier"
    )
    act.add_argument(
        "--applier",
        metavar="COMMAND",
        help="program that applies a placement file (default: distserve apply)",
    )
    replay = parser.add_argument_group("replay of rates")
    replay.add_argument("--rates", type=Path, metavar="CSV", help="columns t_s, rate_rps, and perhaps model")
    replay.add_argument("--series", metavar="NAME", help="of the column model")
    replay.add_argument("--mixes", default="longbench,sharegpt", help="workloads of the day (%(default)s)")
    replay.add_argument("--peak-rate", type=float, default=24.0, metavar="RPS", help="%(default)g")
    replay.add_argument("--parts", type=int, default=1, metavar="N", help="steps per window (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print results as JSON")


def run(args: argparse.Namespace) -> int:
    """Watches until it is stopped; returns the exit code. Raises `ConfigError`."""
    problem, _ = planning_problem(args)
    problem = replace(problem, families=families_of(args.families))
    drift = DriftRule(args.false_alarms_per_day, args.window_s)
    switch = SwitchRule(
        horizon_s=args.horizon_s, settle_s=args.settle_s, load_s=args.load_s, drain_s=args.drain_s
    )
    if args.rates is not None:
        return _replay(args, problem, drift, switch)
    if args.log is None or args.placement is None:
        raise ConfigError("--log and --placement: give both, or --rates for a replay")
    if args.apply and (args.grpc is None or args.model_repository is None):
        raise ConfigError("--apply: needs --grpc and --model-repository of the running server")
    nodes = read_placement(args.placement).placement.nodes
    if args.apply and len(nodes) > 1:
        raise ConfigError(
            f"--apply: {args.placement} has {len(nodes)} nodes; there the watch advises, and `distserve "
            "apply` carries out the placement that you write"
        )
    follow = Follow(args.log, args.placement, problem, drift, switch, elastic=not args.fixed_devices)
    with _alone(args):
        (follow.to_the_end if args.until_end else follow.for_ever)(lambda advice: _act(args, problem, advice))
    return 0


@contextlib.contextmanager
def _alone(args: argparse.Namespace) -> Iterator[None]:
    """One watch changes a server. Another one that only advises may look on."""
    if not args.apply:
        yield
        return
    try:
        with exclusive(args.model_repository, "watched"):
            yield
    except LockedError as error:
        raise ConfigError(f"--model-repository {error}; one watch may apply what it advises") from None


def _act(args: argparse.Namespace, problem: Problem, advice: Advice) -> bool:
    document = advices.document(advice, problem.slo)
    sys.stdout.write((json.dumps(document) if args.json else advices.summary(advice)) + "\n")
    sys.stdout.flush()
    if args.advice is not None:
        args.advice.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
        title = f"Advice for {args.placement.name} at {advices.moment(advice.at_s)}"
        args.advice.with_suffix(".html").write_text(advices.page(advice, problem.slo, title))
    return _apply(args, problem, advice) if advice.change and args.apply else True


def _apply(args: argparse.Namespace, problem: Problem, advice: Advice) -> bool:
    """The applier writes the placement file once the change is in force. False: all is as before."""
    applier = (
        shlex.split(args.applier) if args.applier else [sys.executable, "-m", "distserve_tools", "apply"]
    )
    with tempfile.TemporaryDirectory(prefix="distserve-watch-") as folder:
        wanted = Path(folder) / args.placement.name
        try:
            present = read_placement(args.placement).placement
            wanted.write_text(placement_for(problem, present, advice.wanted).dump())
        except ConfigError as error:
            sys.stderr.write(f"planner watch: not applied: {error}\n")
            return False
        words = [str(wanted), "--grpc", args.grpc, "--model-repository", str(args.model_repository)]
        words += ["--secret-file", str(args.secret_file)] if args.secret_file is not None else []
        try:
            done = subprocess.run([*applier, *words, "--save", str(args.placement)], timeout=_APPLY_S)
        except OSError as error:
            raise ConfigError(f"--applier {applier[0]}: {error.strerror}") from None
    if done.returncode == _NOT_ROLLED_BACK:
        raise ConfigError(f"{args.placement}: could not be applied nor rolled back; see above")
    return done.returncode == 0


def _replay(args: argparse.Namespace, problem: Problem, drift: DriftRule, switch: SwitchRule) -> int:
    if not args.peak_rate > 0 or args.parts < 1:
        raise ConfigError(f"--peak-rate={args.peak_rate}, --parts={args.parts}: must be above 0")
    names = args.mixes.split(",")
    rates = finer(read_rates(args.rates, args.series).scaled_to(args.peak_rate), args.parts)
    states = SteadyStates(problem, [named_workload(name) for name in names], args.seed)
    results = compare(states, rates, mixes_by_hour(rates, len(names)), drift, switch)
    if args.json:
        rows = [
            {
                "policy": r.name, "device_hours": r.device_hours, "attainment": r.attainment,
                "steps_below_target": r.below(problem.slo.attainment), "changes": r.changes,
                "steps": plain(r.steps),
            }
            for r in results
        ]  # fmt: skip
        out = {"schema": "watch_replay/1", "simulations": states.simulations, "policies": rows}
        sys.stdout.write(json.dumps(out) + "\n")
        return 0
    Console().print(_table(results, problem.slo.attainment))
    return 0


def _table(results: list[Result], target: float) -> Table:
    steps = len(results[0].steps)
    table = Table("policy", "device-hours", "attainment", f"steps below {100 * target:g} %", "changes")
    table.title = f"{steps} steps of {results[0].step_s:g} s"
    for r in results:
        below = f"{100 * r.below(target):.1f} %"
        table.add_row(r.name, f"{r.device_hours:.0f}", f"{100 * r.attainment:.2f} %", below, str(r.changes))
    return table
