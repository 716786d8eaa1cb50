"""Speed of this engine beside its peers: prefill and decode on one model, one core, one run."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from distserve.core.model_config import ModelConfig, cache_folder, resolve_model
from distserve.core.parsing import ConfigError, nearest
from distserve_tools.engine_peers.environments import PEERS, peer_python
from distserve_tools.engine_peers.process import EngineWorker, WorkerError, WorkerSpec
from distserve_tools.engine_peers.random_llama import random_llama

OURS = "distserve"
START_TIMEOUT_S = 600.0  # vLLM compiles
STEP_TIMEOUT_S = 120.0
DECODE_BATCHES = (1, 8, 32)
LEVEL = (1.0, 1.0, 1.0, 1.0)
# ours over the peer's tokens/s, by dtype: prefill, then DECODE_BATCHES
BARS: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "fp32": {
        "transformers": (1.0, 1.1, 2.0, 2.6),
        "llama_cpp": LEVEL,
        "ctranslate2": LEVEL,
        "vllm": LEVEL,
    },
    "bf16": {"transformers": LEVEL, "llama_cpp": LEVEL, "ctranslate2": LEVEL, "vllm": LEVEL},
}
EXAMPLES = """\
examples:
  distserve bench engine
  distserve bench engine --peers transformers,llama_cpp,ctranslate2,vllm --rounds 7
  distserve bench engine --peers vllm --peer-python vllm=/opt/vllm/bin/python --dtype bf16 --json
"""


@dataclass(frozen=True)
class Case:
    """One column: a prompt of `context` tokens (`batch` 0), or decode steps of `batch` such sequences."""

    batch: int
    context: int

    @property
    def name(self) -> str:
        return f"decode, batch {self.batch}" if self.batch else f"prefill {self.context}"

    @property
    def tokens(self) -> int:
        """Tokens of one timed step."""
        return self.batch or self.context


@dataclass(frozen=True)
class Ratio:
    """Ours over a peer's tokens/s: the median of the rounds, and the range they span."""

    median: float
    low: float
    high: float
    bar: float | None

    @property
    def met(self) -> bool | None:
        """At or above the bar, or not distinguishable from it; None without a bar."""
        return None if self.bar is None else self.high >= self.bar if self.median < self.bar else True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `distserve bench engine`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument(
        "--peers", default="transformers", help=f"comma-separated: {', '.join(PEERS)} (%(default)s)"
    )
    parser.add_argument("--model", help="a Hugging Face folder or cache:NAME (a random LLaMA of 125M)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="(%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="cores for each engine, from --core on (1)")
    parser.add_argument("--core", type=int, default=0, help="first core (0)")
    parser.add_argument("--context", type=int, default=512, help="tokens in every prompt (512)")
    parser.add_argument("--rounds", type=int, default=5, help="engines take turns so many times (5)")
    parser.add_argument("--steps", type=int, default=6, help="decode steps of a turn (6)")
    parser.add_argument(
        "--clock",
        choices=("cpu", "wall"),
        help="cpu: processor time, which other programs on the machine hardly change (one thread: cpu)",
    )
    parser.add_argument(
        "--peer-python", action="append", default=[], metavar="PEER=PATH", help="Python that has the peer"
    )
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")


def run(args: argparse.Namespace) -> int:
    """Runs the command; 1 where a peer did not start. Raises `ConfigError` for anything refused."""
    peers = _peers(args.peers)
    console = Console(stderr=True)
    model = (
        resolve_model(args.model) if args.model else random_llama(cache_folder() / "models/bench-llama-125m")
    )
    clock = args.clock or ("cpu" if args.threads == 1 else "wall")
    cases = [Case(0, args.context), *(Case(batch, args.context) for batch in DECODE_BATCHES)]
    given = dict(_pair(text) for text in args.peer_python)
    pythons = {OURS: sys.executable}
    for peer in peers:
        pythons[peer] = peer_python(peer, given, cache_folder() / "peers", console.print)
    spec = WorkerSpec(
        engine=OURS,
        model=str(model),
        dtype=args.dtype,
        cores=tuple(range(args.core, args.core + args.threads)),
        context=args.context,
        room=args.rounds * args.steps + 8,
        sequences=max(DECODE_BATCHES),
        vocab=ModelConfig.load(model).vocab_size,
    )
    try:
        about, seconds = _measure(spec, pythons, cases, args, clock, console)
    except WorkerError as error:
        raise ConfigError(str(error)) from None
    bars = BARS[args.dtype] if args.model is None and args.threads == 1 else {}
    ratios = compare(seconds, cases, bars)
    if args.json:
        sys.stdout.write(json.dumps(_as_json(args, clock, about, cases, seconds, ratios), indent=2) + "\n")
    else:
        _report(
            Console(), f"{args.dtype}, {args.threads} thread(s), {clock} time", about, cases, seconds, ratios
        )
    return 0 if len(ratios) == len(peers) else 1


Seconds = dict[str, list[list[float]]]
"""Engine -> case -> round -> median seconds of a step."""


def _measure(
    spec: WorkerSpec,
    pythons: Mapping[str, str],
    cases: Sequence[Case],
    args: argparse.Namespace,
    clock: str,
    console: Console,
) -> tuple[dict[str, str], Seconds]:
    """Case by case, round by round, the engines in turn: what disturbs the machine disturbs all of them."""
    seconds: Seconds = {name: [[] for _ in cases] for name in pythons}
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers: dict[str, EngineWorker] = {}
        for name, python in pythons.items():
            with console.status(f"loading {name}"):
                one = WorkerSpec(**(vars(spec) | {"engine": name}))
                try:
                    worker = EngineWorker(one, python, logs / f"{name}.log", START_TIMEOUT_S)
                except WorkerError as error:
                    if name == OURS:
                        raise
                    console.print(f"left out: {error}", style="yellow", markup=False)
                    del seconds[name]
                    continue
                workers[name] = stack.enter_context(worker)
        for column, case in enumerate(cases):
            for name, worker in workers.items():
                with console.status(f"{case.name}: {name} gets ready"):
                    _prepare(worker, case)
            for turn in range(args.rounds):
                for name, worker in workers.items():
                    with console.status(f"{case.name}: round {turn + 1} of {args.rounds}, {name}"):
                        steps = _turn(worker, case, args.steps)
                    seconds[name][column].append(statistics.median(step[clock] for step in steps))
            for worker in workers.values():
                if case.batch:
                    worker.ask(STEP_TIMEOUT_S, op="stop")
        return {name: worker.about for name, worker in workers.items()}, seconds


def _prepare(worker: EngineWorker, case: Case) -> None:
    """Warms up; for decoding, brings the sequences into the cache."""
    if not case.batch:
        worker.ask(STEP_TIMEOUT_S, op="prefill")
        return
    worker.ask(STEP_TIMEOUT_S * case.batch, op="start", batch=case.batch)
    worker.ask(STEP_TIMEOUT_S, op="steps", count=2)


def _turn(worker: EngineWorker, case: Case, steps: int) -> list[dict[str, float]]:
    if case.batch:
        return worker.ask(STEP_TIMEOUT_S, op="steps", count=steps)
    return [worker.ask(STEP_TIMEOUT_S, op="prefill")[0] for _ in range(2)]


def compare(
    seconds: Seconds, cases: Sequence[Case], bars: Mapping[str, Sequence[float]]
) -> dict[str, list[Ratio]]:
    """Ours against each peer, round by round: both sides of a ratio were measured within seconds."""
    ratios: dict[str, list[Ratio]] = {}
    for peer in seconds:
        if peer == OURS:
            continue
        ratios[peer] = []
        for column in range(len(cases)):
            pairs = zip(seconds[peer][column], seconds[OURS][column], strict=True)
            rounds = [theirs / ours for theirs, ours in pairs]
            bar = bars[peer][column] if peer in bars else None
            ratios[peer].append(Ratio(statistics.median(rounds), min(rounds), max(rounds), bar))
    return ratios


def _report(
    console: Console,
    title: str,
    about: Mapping[str, str],
    cases: Sequence[Case],
    seconds: Seconds,
    ratios: Mapping[str, Sequence[Ratio]],
) -> None:
    table = Table("tokens/s \\[ms per step]", *(case.name for case in cases), title=title)
    for name, columns in seconds.items():
        medians = [statistics.median(rounds) for rounds in columns]
        cells = [
            f"{case.tokens / median:.1f} [dim]\\[{1e3 * median:.1f}][/]"
            for case, median in zip(cases, medians, strict=True)
        ]
        table.add_row(name, *cells)
    for peer, row in ratios.items():
        table.add_section()
        table.add_row(
            f"ours / {peer}", *(f"[bold]{r.median:.2f}[/] ({r.low:.2f} to {r.high:.2f})" for r in row)
        )
        if any(r.bar is not None for r in row):
            marks = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}
            table.add_row("  bar", *(f"{r.bar:.1f} {marks[r.met]}" for r in row))
    console.print(table)
    for name, text in about.items():
        console.print(f"{name}: {text}", style="dim", highlight=False)


def _as_json(
    args: argparse.Namespace,
    clock: str,
    about: Mapping[str, str],
    cases: Sequence[Case],
    seconds: Seconds,
    ratios: Mapping[str, Sequence[Ratio]],
) -> dict[str, object]:
    names = [case.name for case in cases]
    return {
        "schema": "bench-engine/1",
        "dtype": args.dtype,
        "threads": args.threads,
        "clock": clock,
        "engines": dict(about),
        "step_s": {name: dict(zip(names, rounds, strict=True)) for name, rounds in seconds.items()},
        "tokens_per_step": {case.name: case.tokens for case in cases},
        "ratios": {
            peer: {name: asdict(r) | {"met": r.met} for name, r in zip(names, row, strict=True)}
            for peer, row in ratios.items()
        },
    }


def _peers(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"peers={name!r}: not known{nearest(name, PEERS)}")
    return list(dict.fromkeys(names))


def _pair(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not equals or name not in PEERS or not Path(path).is_file():
        raise ConfigError(f"peer-python={text!r}: must be PEER=PATH with an existing Python")
    return name, path
