"""Breaks a deployment on purpose and counts what became of the requests.

Starts its own server with a tiny random model (2 prefill + 2 decode instances on this machine's cores), runs
scenarios one after the other, and checks after each that nothing is left behind: a probe request gets the
right text, all KV blocks are free, nothing is pending. Exit code 1 when a request was lost or something is
left.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from distserve.core.parsing import ConfigError, nearest
from distserve_tools.chaos.deployment import deployed
from distserve_tools.chaos.invariants import Aftermath
from distserve_tools.chaos.outcome import Outcome, outcome_table
from distserve_tools.chaos.scenarios import (
    OVERLOAD_S,
    SOAK_TOKENS,
    STORM_REQUESTS,
    Scenario,
    scenarios,
)
from distserve_tools.console import StepLines
from distserve_tools.serve import START_ERRORS, signals_interrupt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `distserve chaos`."""
    parser.add_argument(
        "--scenario", action="append", metavar="NAME", help="may be repeated; default: all but the long ones"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=STORM_REQUESTS, help="of the cancel storm")
    parser.add_argument("--tokens", type=int, default=SOAK_TOKENS, help="of the soak")
    parser.add_argument("--seconds", type=float, default=OVERLOAD_S, help="of each phase of the overload")
    parser.add_argument("--folder", type=Path, help="keep model and logs there (default: temporary)")
    parser.add_argument("--json", action="store_true", help="a JSON line per scenario instead of the table")
    parser.add_argument("--list", action="store_true", help="say what there is")


def run(args: argparse.Namespace) -> int:
    """Returns 0 when no request was lost and nothing was left."""
    known = scenarios(args.requests, args.tokens, args.seconds)
    if args.list:
        for name, scenario in known.items():
            sys.stdout.write(f"{name:24} {scenario.summary}\n")
        return 0
    chosen = args.scenario or [name for name, scenario in known.items() if not scenario.long]
    for name in chosen:
        if name not in known:
            raise ConfigError(f"--scenario {name}: unknown{nearest(name, known)}; --list shows all")
    outcomes: list[Outcome] = []
    lines = StepLines()
    with signals_interrupt(), _folder(args.folder) as folder:
        try:
            for outcome in run_all({name: known[name] for name in chosen}, args.seed, folder, lines):
                outcomes.append(outcome)
                lines.say(f"{outcome.scenario}: {'ok' if outcome.ok else 'FAILED'}")
                if args.json:
                    sys.stdout.write(json.dumps(outcome.to_json()) + "\n")
                    sys.stdout.flush()
        except START_ERRORS as error:
            sys.stderr.write(f"distserve chaos: {error}\n")
            return 1
        finally:
            if not args.json:
                Console().print(outcome_table(outcomes))
    return 0 if all(outcome.ok for outcome in outcomes) else 1


def run_all(chosen: dict[str, Scenario], seed: int, folder: Path, lines: StepLines) -> Iterator[Outcome]:
    """Runs scenarios in order; those that follow each other on the same setting share a server."""
    with ExitStack() as stack:
        served = None
        for name, scenario in chosen.items():
            lines.say(f"{name}: {scenario.summary}")
            if scenario.alone is not None:
                yield _outcome(name, seed, functools.partial(scenario.alone, folder / name, seed))
                continue
            if served != scenario.setting:
                stack.close()
                deployment = stack.enter_context(deployed(folder / f"server-{name}", scenario.setting))
                served = scenario.setting
            assert scenario.run is not None
            yield _outcome(name, seed, functools.partial(scenario.run, deployment, seed))


def _outcome(name: str, seed: int, run: Callable[[], Outcome]) -> Outcome:
    """A scenario that breaks off has failed; the others are run all the same."""
    try:
        return run()
    except START_ERRORS:
        raise
    except Exception as error:
        sys.stderr.write(traceback.format_exc())
        aftermath = Aftermath(0.0, 0, (f"broken off: {error!r}",))
        return Outcome(name, seed, Counter({"lost": 1}), aftermath)


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="distserve-chaos-") as made:
        yield Path(made)
