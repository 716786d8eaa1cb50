"""Watches the request log of a running server: advises, or applies, another placement when the load changes.

Or, with --rates, replays a table of rates and compares the watch with a static plan and an autoscaler.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from distserve.core.parsing import ConfigError
from distserve_planner.placement_file import read_placement
from distserve_planner.planning_options import add_planning_arguments, families_of, planning_problem
from distserve_planner.report.arguments import placed_deployment
from distserve_planner.report.document import plain
from distserve_planner.search.problem import Problem
from distserve_planner.watch import advice as advices
from distserve_planner.watch.carry_out import placement_for
from distserve_planner.watch.compare import compare
from distserve_planner.watch.decision import SwitchRule
from distserve_planner.watch.drift import DriftRule
from distserve_planner.watch.history import LogTail
from distserve_planner.watch.replay import Result, SteadyStates, finer, mixes_by_hour, read_rates
from distserve_planner.watch.watcher import Advice, Watcher
from distserve_planner.workload.named import named_workload

EXAMPLES = """\
examples:
  planner watch --model opt-13b --device a100-80g --workload sharegpt --ttft 0.25 --tpot 0.1 \\
      --placement placement.yaml --log requests.jsonl --advice advice            advice.json and advice.html
  planner watch ... --apply --grpc 127.0.0.1:8001 --model-repository repository   and changes the server
  planner watch ... --log old.jsonl --until-end                                   over a log that is complete
  planner watch ... --rates rates.csv --mixes longbench,sharegpt --peak-rate 24   compares policies
"""
_PAUSE_S = 1.0
_APPLY_S = 3600.0


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
    present = placed_deployment(read_placement(args.placement).placement, str(args.placement))
    watcher = Watcher(problem, present, drift, switch, elastic=not args.fixed_devices)
    return _Watch(args, problem, watcher, drift).run()


@dataclass
class _Watch:
    """The loop of the command: windows end by the clock of the log."""

    args: argparse.Namespace
    problem: Problem
    watcher: Watcher
    drift: DriftRule

    def run(self) -> int:
        """Ends at the end of the log if that was asked for, else when it is interrupted."""
        args = self.args
        tail = LogTail(args.log, self.problem.slo)
        settle_s = self.drift.window_s / 2  # requests of a window end after it
        now_s = self.drift.window_s
        while True:
            new = tail.read()
            self.watcher.observe(new)
            while now_s + settle_s <= tail.end_s:
                self._see_placement(now_s)
                advice = self.watcher.look(now_s)
                if advice is not None:
                    self._act(advice, now_s)
                now_s += self.drift.window_s
            if args.until_end and not len(new):
                return 0
            if not len(new):
                time.sleep(_PAUSE_S)

    def _see_placement(self, now_s: float) -> None:
        """The file says what serves; it changes when advice is carried out, by this watch or by a person."""
        path = self.args.placement
        present = placed_deployment(read_placement(path).placement, str(path))
        if present != self.watcher.present:
            self.watcher.changed(present, now_s)

    def _act(self, advice: Advice, now_s: float) -> None:
        args, slo = self.args, self.problem.slo
        document = advices.document(advice, slo)
        sys.stdout.write((json.dumps(document) if args.json else advices.summary(advice)) + "\n")
        sys.stdout.flush()
        if args.advice is not None:
            args.advice.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
            title = f"Advice for {args.placement.name} at {now_s:.0f} s"
            args.advice.with_suffix(".html").write_text(advices.page(advice, slo, title))
        if advice.change and args.apply:
            self._apply(advice)

    def _apply(self, advice: Advice) -> None:
        """The applier writes the placement file once the change is in force; if it failed, and all is as
        before, the watch goes on with what there is."""
        args = self.args
        placement = placement_for(self.problem, read_placement(args.placement).placement, advice.wanted)
        wanted = args.placement.with_name(args.placement.name + ".next")
        wanted.write_text(placement.dump())
        applier = (
            shlex.split(args.applier) if args.applier else [sys.executable, "-m", "distserve_tools", "apply"]
        )
        words = [str(wanted), "--grpc", args.grpc, "--model-repository", str(args.model_repository)]
        try:
            done = subprocess.run([*applier, *words, "--save", str(args.placement)], timeout=_APPLY_S)
        except OSError as error:
            raise ConfigError(f"--applier {applier[0]}: {error.strerror}") from None
        wanted.unlink(missing_ok=True)
        if done.returncode == 3:
            raise ConfigError(f"{args.placement}: could not be applied nor rolled back; see above")


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
