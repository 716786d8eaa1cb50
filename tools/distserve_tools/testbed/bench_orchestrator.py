"""`distserve bench orchestrator`: tokens/s that it sustains, what a token costs, what a hop adds."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from distserve.core.model_config import ModelConfig, resolve_model
from distserve.core.parsing import ConfigError
from distserve_planner.workload import Trace
from distserve_tools.console import StepLines
from distserve_tools.demo_model import DEMO_MODEL, ensure_demo_model
from distserve_tools.load.generator import run_open_loop
from distserve_tools.load.record import Record
from distserve_tools.load.target import Job
from distserve_tools.load.triton_target import TritonTarget
from distserve_tools.serve import START_ERRORS, signals_interrupt
from distserve_tools.testbed.cpu_account import ORCHESTRATOR, PARTS, CpuSeconds, processor_time
from distserve_tools.testbed.replay_engine import GAP_UNIT_S, age_s
from distserve_tools.testbed.replay_server import replay_server

PROMPT_TOKENS = 128
LONE_GAP_S = 0.05
TIMEOUT_S = 120.0
TABLE_WIDTH = 170
SUSTAINED_SHARE = 0.97  # of the offered tokens/s
SUSTAINED_AGE_S = 0.1  # P99, from the engine's event to the client


@dataclass(frozen=True)
class OrchestratorLoad:
    """One run. Ages: from the making of a token in the engine process to its arrival at the client.

    ITL added: time between two messages of a stream at the client, less that between steps of the engine.
    """

    orchestrators: int
    text: bool
    streams: int
    offered_tokens_per_s: float
    tokens_per_s: float
    tokens_per_message: float
    ttft_s: dict[str, float]
    age_s: dict[str, float]
    itl_added_s: dict[str, float] | None  # None: one token each
    cpu_us_per_token: dict[str, float]  # by part
    other_processes_cores: float

    @property
    def sustained(self) -> bool:
        enough = self.tokens_per_s >= SUSTAINED_SHARE * self.offered_tokens_per_s
        return enough and self.age_s["p99"] <= SUSTAINED_AGE_S


class AgeTarget(TritonTarget):
    """Reads the moment at which each token was made out of its id."""

    def __init__(self, url: str, start_s: float, vocab_size: int, text: bool, ages: list[float]) -> None:
        super().__init__(url, start_s, TIMEOUT_S, text=text)
        self._vocab_size = vocab_size
        self._ages = ages

    def book(self, response: Any, record: Record) -> None:
        now = time.monotonic()
        for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
            if tensor.name == "output_ids":
                ids = np.frombuffer(raw, np.int32).tolist()
                self._ages += [age_s(token, now, self._vocab_size) for token in ids]
        super().book(response, record)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `distserve bench orchestrator`."""
    parser.add_argument("--model", default=DEMO_MODEL, help="vocabulary and tokenizer (%(default)s)")
    parser.add_argument("--streams", type=int, default=64, help="requests at once (%(default)s)")
    parser.add_argument(
        "--tokens-per-s", default="1000,3000,5000,6000,8000", help="offered, ascending (%(default)s)"
    )
    parser.add_argument("--orchestrators", default="1,2", help="instances of the model (%(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run (%(default)s)")
    parser.add_argument("--output", type=Path, help="JSON with every run")


def run(args: argparse.Namespace) -> int:
    """Returns 0 when everything was measured."""
    lines = StepLines()
    paces = [float(part) for part in args.tokens_per_s.split(",")]
    results: list[OrchestratorLoad] = []
    try:
        if args.model == DEMO_MODEL:
            ensure_demo_model(lines.say)
        vocab = ModelConfig.load(resolve_model(args.model)).vocab_size
        with signals_interrupt(), tempfile.TemporaryDirectory(prefix="distserve-replay-") as folder:
            for count in [int(part) for part in args.orchestrators.split(",")]:
                lines.say(f"starting {count} orchestrator(s) on load-only instances")
                with replay_server(Path(folder) / f"repository-{count}", args.model, count) as server:
                    results.append(_lone(server.grpc_url, server.pid, count, vocab))
                    for text in (False, True):
                        results += _rising(server.grpc_url, server.pid, count, vocab, args, text, paces)
                        lines.say(f"{results[-1].tokens_per_s:.0f} tokens/s, {'text' if text else 'ids'}")
    except START_ERRORS as error:
        sys.stderr.write(f"distserve bench orchestrator: {error}\n")
        return 1
    if args.output:
        document = {"schema": "bench_orchestrator/1", "runs": [asdict(result) for result in results]}
        args.output.write_text(json.dumps(document, indent=1))
    console = Console()
    console.width = max(console.width, TABLE_WIDTH)
    console.print(result_table(results))
    return 0


def _rising(
    url: str,
    pid: int,
    orchestrators: int,
    vocab: int,
    args: argparse.Namespace,
    text: bool,
    paces: Sequence[float],
) -> list[OrchestratorLoad]:
    """Up to the first pace that is not sustained."""
    out: list[OrchestratorLoad] = []
    for pace in paces:
        gap = max(1, round(args.streams / pace / GAP_UNIT_S))
        if gap >= vocab:
            lowest = args.streams / ((vocab - 1) * GAP_UNIT_S)
            raise ConfigError(
                f"--tokens-per-s={pace:g}: at least {lowest:.0f} for {args.streams} streams and this "
                f"vocabulary of {vocab} tokens"
            )
        tokens = max(2, round(args.seconds / (gap * GAP_UNIT_S)))
        jobs = [Job([gap, *range(20, 20 + PROMPT_TOKENS - 1)], tokens) for _ in range(args.streams)]
        offered = args.streams / (gap * GAP_UNIT_S)
        out.append(_measure(url, pid, orchestrators, vocab, jobs, 0.0, text, offered))
        if not out[-1].sustained:
            break
    return out


def _lone(url: str, pid: int, orchestrators: int, vocab: int) -> OrchestratorLoad:
    """One request at a time: what the path adds to the first token."""
    jobs = [Job([1, *range(20, 20 + PROMPT_TOKENS - 1)], 1) for _ in range(40)]
    return _measure(url, pid, orchestrators, vocab, jobs, LONE_GAP_S, False, 1 / LONE_GAP_S, streams=1)


def _measure(
    url: str,
    pid: int,
    orchestrators: int,
    vocab: int,
    jobs: Sequence[Job],
    gap_s: float,
    text: bool,
    offered: float,
    streams: int | None = None,
) -> OrchestratorLoad:
    ages: list[float] = []
    count = len(jobs)
    lengths = np.full(count, PROMPT_TOKENS, np.int64)
    trace = Trace(np.arange(count) * gap_s, lengths, np.array([j.output_tokens for j in jobs], np.int64))
    before = processor_time([pid])
    records = asyncio.run(run_open_loop(lambda start: AgeTarget(url, start, vocab, text, ages), trace, jobs))
    cpu = processor_time([pid]).since(before)
    failed = [r.error for r in records if not r.ok]
    if failed:
        raise RuntimeError(f"{len(failed)} of {count} requests failed: {failed[0]}")
    return _result(orchestrators, text, streams or count, offered, records, ages, cpu)


def _result(
    orchestrators: int,
    text: bool,
    streams: int,
    offered: float,
    records: Sequence[Record],
    ages: Sequence[float],
    cpu: CpuSeconds,
) -> OrchestratorLoad:
    tokens = sum(r.output_tokens for r in records)
    messages = sum(len(r.token_s) for r in records)
    gaps = np.array([gap for r in records for gap in r.gaps_s])
    begin, end = min(r.token_s[0] for r in records), max(r.token_s[-1] for r in records)
    return OrchestratorLoad(
        orchestrators=orchestrators,
        text=text,
        streams=streams,
        offered_tokens_per_s=offered,
        tokens_per_s=tokens / max(end - begin, 1e-9),
        tokens_per_message=tokens / messages,
        ttft_s=_percentiles([r.ttft_s for r in records]),
        age_s=_percentiles(ages),
        itl_added_s=_percentiles(gaps - streams / offered) if len(gaps) else None,
        cpu_us_per_token={part: 1e6 * cpu.parts[part] / tokens for part in PARTS},
        other_processes_cores=cpu.others / cpu.wall if cpu.wall else 0.0,
    )


def _percentiles(values: Sequence[float] | NDArray[np.float64]) -> dict[str, float]:
    return {f"p{p}": float(np.percentile(values, p)) for p in (50, 90, 99)}


def result_table(results: Sequence[OrchestratorLoad]) -> Table:
    """For people."""
    table = Table(title="orchestrator on load-only instances")
    for name in (
        "orchestrators",
        "output",
        "streams",
        "offered tok/s",
        "tok/s",
        "per message",
        "TTFT p50/p99 (ms)",
        "age p50/p99 (ms)",
        "ITL added p50/p99 (ms)",
        "orchestrator us/token",
        "everything us/token",
        "others (cores)",
    ):
        table.add_column(name, justify="right")
    for r in results:
        table.add_row(
            str(r.orchestrators),
            "text + ids" if r.text else "ids",
            str(r.streams),
            f"{r.offered_tokens_per_s:.0f}",
            f"{r.tokens_per_s:.0f}{'' if r.sustained else ' (late)'}",
            f"{r.tokens_per_message:.2f}",
            f"{1e3 * r.ttft_s['p50']:.1f} / {1e3 * r.ttft_s['p99']:.1f}",
            f"{1e3 * r.age_s['p50']:.2f} / {1e3 * r.age_s['p99']:.2f}",
            f"{1e3 * r.itl_added_s['p50']:.2f} / {1e3 * r.itl_added_s['p99']:.2f}" if r.itl_added_s else "-",
            f"{r.cpu_us_per_token[ORCHESTRATOR]:.0f}",
            f"{sum(r.cpu_us_per_token.values()):.0f}",
            f"{r.other_processes_cores:.2f}",
        )
    return table
