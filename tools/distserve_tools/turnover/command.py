"""A load that turns from long prompts to long answers, with and without `planner watch`: attainment of both.

The same requests go to the same placement twice. Meanwhile `planner watch --apply` reads the server's request
log, notices the change, and turns an instance from prefill to decode.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from distserve_planner.profile_file import Profile
from distserve_planner.slo import Slo
from distserve_tools.console import StepLines
from distserve_tools.demo_model import DEMO_MODEL, ensure_demo_model
from distserve_tools.load.record import Record
from distserve_tools.serve import START_ERRORS, signals_interrupt
from distserve_tools.testbed.profiling import profile_on_a_core
from distserve_tools.turnover.run import Pass, run_pass
from distserve_tools.turnover.scenario import Scenario


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `distserve bench watch`."""
    usual = {field.name: field.default for field in fields(Scenario)}
    parser.add_argument("--output", type=Path, default=Path("build/turnover"), help="folder (%(default)s)")
    parser.add_argument("--profile", type=Path, help="step times of the model, instead of measuring")
    for name, what in (
        ("window_s", "of the watch"),
        ("first_s", "of long prompts"),
        ("second_s", "of long answers"),
    ):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(
            option, type=float, default=usual[name], metavar="S", help=f"{what} (%(default)g)"
        )
    parser.add_argument("--only-watched", action="store_true", help="leave the pass without the watch out")


def run(args: argparse.Namespace) -> int:
    """Returns 0 if the placement was changed and no request failed."""
    lines = StepLines()
    args.output.mkdir(parents=True, exist_ok=True)
    passes: dict[str, Pass] = {}
    try:
        with signals_interrupt():
            ensure_demo_model(lines.say)
            profile = args.profile or profile_on_a_core(DEMO_MODEL, args.output / "profile.yaml", lines.say)
            lasting = {"window_s": args.window_s, "first_s": args.first_s, "second_s": args.second_s}
            scenario = Scenario.sized(DEMO_MODEL, Profile.load(profile), **lasting)
            for name, watched in (("watched", True), ("left alone", False)):
                if watched or not args.only_watched:
                    lines.say(f"{name}: the placement is {'changed when it pays' if watched else 'kept'}")
                    folder = args.output / name.replace(" ", "-")
                    passes[name] = run_pass(scenario, profile, folder, watched, lines.say)
    except START_ERRORS as error:
        sys.stderr.write(f"distserve bench watch: {error}\n")
        return 1
    document = _document(scenario, passes)
    (args.output / "results.json").write_text(json.dumps(document, indent=1) + "\n")
    _show(scenario, passes)
    lines.say(f"wrote {args.output / 'results.json'}; {args.output / 'watched' / 'advice.html'}")
    failed = sum(r.error is not None for p in passes.values() for r in p.records)
    return 0 if not failed and passes["watched"].change_s is not None else 1


@dataclass(frozen=True)
class Phase:
    """A part of the load, by the time of arrival."""

    name: str
    start_s: float
    end_s: float

    def of(self, records: Sequence[Record]) -> list[Record]:
        return [r for r in records if self.start_s <= r.planned_s < self.end_s]


def phases(scenario: Scenario, change_s: tuple[float, float] | None) -> list[Phase]:
    """Cut where the mix turns, where the change begins, and where it is in force."""
    end_s = scenario.first_s + scenario.second_s
    begin, there = change_s or (end_s, end_s)
    cuts = [0.0, scenario.first_s, begin, there, end_s]
    names = ("long prompts", "long answers, before", "during the change", "long answers, after")
    return [Phase(name, a, b) for name, a, b in zip(names, cuts, cuts[1:], strict=False) if b > a]


def attainment(records: Sequence[Record], slo: Slo) -> float:
    """Share that meets both; NaN without requests."""
    return sum(r.met(slo) for r in records) / len(records) if records else float("nan")


def _document(scenario: Scenario, passes: dict[str, Pass]) -> dict[str, Any]:
    change = passes["watched"].change_s
    return {
        "schema": "turnover/1",
        "rate_rps": scenario.rate_rps,
        "slo": {"ttft_s": scenario.slo.ttft_s, "tpot_s": scenario.slo.tpot_s},
        "turned_s": scenario.first_s,
        "change_s": change,
        "passes": {
            name: {
                "placed": done.placed,
                "told": done.told.splitlines(),
                "attainment": {
                    phase.name: attainment(phase.of(done.records), scenario.slo)
                    for phase in phases(scenario, change)
                },
                "requests": [record.to_log() for record in done.records],
            }
            for name, done in passes.items()
        },
    }


def _show(scenario: Scenario, passes: dict[str, Pass]) -> None:
    change = passes["watched"].change_s
    table = Table("load", "from", "to", "requests", *passes, "failed")
    slo = scenario.slo
    limits = f"TTFT {slo.ttft_s:.2f} s, TPOT {1e3 * slo.tpot_s:.0f} ms"
    table.title = f"{scenario.rate_rps:.2f} requests/s; both objectives met ({limits})"
    for phase in phases(scenario, change):
        parts = [phase.of(done.records) for done in passes.values()]
        failed = sum(r.error is not None for part in parts for r in part)
        shares = [f"{100 * attainment(part, slo):.1f} %" for part in parts]
        span = (f"{phase.start_s:.0f} s", f"{phase.end_s:.0f} s")
        table.add_row(phase.name, *span, str(len(parts[0])), *shares, str(failed))
    Console().print(table)
    for name, done in passes.items():
        placed = ", ".join(f"{count} {role}" for role, count in done.placed.items())
        sys.stdout.write(f"{name}: ends with {placed}\n")
        sys.stdout.writelines(f"  {line}\n" for line in done.told.splitlines())
