"""`distserve bench serve`: load a running server, or find its goodput."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from distserve.core.model_config import ModelConfig, resolve_model
from distserve.core.parsing import ConfigError
from distserve_planner.slo import Slo, seconds
from distserve_planner.workload import Arrivals, Trace, named_workload, workload_names
from distserve_planner.workload.readers import read_trace
from distserve_tools.load.generator import GeneratorTooSlow, check_lag, make_jobs, run_open_loop
from distserve_tools.load.lengths import scaled
from distserve_tools.load.openai_target import OpenAITarget
from distserve_tools.load.record import Record, write_log
from distserve_tools.load.search import find_goodput
from distserve_tools.load.summary import Summary, summarise
from distserve_tools.load.target import Target
from distserve_tools.load.triton_target import TritonTarget

EXAMPLES = """examples:
  distserve bench serve --url localhost:8001 --model cache:smollm2-135m-instruct --rate 0.5,1,2
  distserve bench serve --url localhost:8001 --model ./m --workload sharegpt --scale 0.25 --find-goodput \\
      --ttft-slo 1.0 --tpot-slo 0.1
  distserve bench serve --target openai --url http://localhost:9000 --url http://localhost:9001 \\
      --model ./m --name m --trace trace.csv --rate 2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--target", choices=("triton", "openai"), default="triton", help="kind of server")
    parser.add_argument(
        "--url", action="append", required=True, help="host:port (gRPC), or http://... (repeat)"
    )
    parser.add_argument(
        "--model", required=True, help="folder of the served model, or cache:NAME (vocabulary)"
    )
    parser.add_argument("--name", default="model", help="model name in OpenAI requests (%(default)s)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--workload", default="sharegpt", help=f"one of {', '.join(workload_names())}")
    source.add_argument("--trace", type=Path, help="trace file; its own arrival times unless --rate is given")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on all lengths (%(default)s)")
    parser.add_argument("--max-context", type=int, help="longer requests are cut (default: the model's)")
    parser.add_argument("--rate", help="requests/s, several separated by commas")
    parser.add_argument("--cv", type=float, default=1.0, help="burstiness; 1 is Poisson (%(default)s)")
    parser.add_argument("--requests", type=int, default=100, help="per run (%(default)s)")
    parser.add_argument("--repeats", type=int, default=1, help="runs per rate, other seeds (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ttft-slo", type=float, default=1.0, help="seconds (%(default)s)")
    parser.add_argument("--tpot-slo", type=float, default=0.1, help="seconds per token (%(default)s)")
    parser.add_argument("--attainment", type=float, default=0.9, help="target share (%(default)s)")
    parser.add_argument("--warmup", type=float, default=0.0, help="seconds left out at the start")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds per request (%(default)s)")
    parser.add_argument("--max-lag-ms", type=float, default=50.0, help="generator lag at P99 (%(default)s)")
    parser.add_argument("--find-goodput", action="store_true", help="bisect over the rate")
    parser.add_argument("--output", type=Path, help="JSON with every run")
    parser.add_argument("--log", type=Path, help="request log (JSON lines) of the last run")
    parser.add_argument("--plots", type=Path, help="folder for PNG files")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    try:
        bench = Bench(args)
        if args.find_goodput:
            bench.search()
        else:
            for rate in bench.rates:
                bench.measure(rate)
    except (ConfigError, GeneratorTooSlow, ValueError) as error:
        print(f"distserve bench serve: {error}", file=sys.stderr)
        return 2
    bench.report()
    return 0


class Bench:
    """All runs of one call."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._console = Console(stderr=True)
        self._model = ModelConfig.load(resolve_model(args.model))
        self._slo = Slo(args.ttft_slo, args.tpot_slo, args.attainment)
        self.rates: list[float] = [float(r) for r in args.rate.split(",")] if args.rate else []
        if not self.rates and not (args.trace and not args.find_goodput):
            raise ConfigError("--rate: needed with a workload; for example --rate 1,2,4")
        if not self.rates:
            self.rates = [0.0]  # the trace's own times
        self.runs: list[tuple[float, Summary]] = []
        self.records: dict[float, list[Record]] = {}
        self.goodput_rps: float | None = None

    def measure(self, rate: float) -> list[Summary]:
        out = []
        for repeat in range(self._args.repeats):
            seed = self._args.seed + repeat
            trace = self._trace(rate, seed)
            records = self._run(trace, seed, f"{rate:g}/s" if rate else "trace")
            check_lag(records, self._args.max_lag_ms / 1e3)
            summary = summarise(records, self._slo, self._args.warmup)
            self.records.setdefault(rate, []).extend(records)
            self.runs.append((rate, summary))
            out.append(summary)
        return out

    def search(self) -> None:
        low = self.rates[0]
        high = self.rates[-1] if len(self.rates) > 1 else 2 * low
        self.goodput_rps, _ = find_goodput(self.measure, self._slo.attainment, low, high)

    def report(self) -> None:
        args = self._args
        result: dict[str, Any] = {
            "schema": "bench_serve/1",
            "slo": {"ttft_s": args.ttft_slo, "tpot_s": args.tpot_slo, "attainment": args.attainment},
            "goodput_rps": self.goodput_rps,
            "runs": [{"rate_rps": rate, **summary.to_dict()} for rate, summary in self.runs],
        }
        if args.output:
            args.output.write_text(json.dumps(result, indent=1))
        if args.log:
            write_log(args.log, list(self.records.values())[-1])
        if args.plots:
            from distserve_tools.load.plots import plot_runs

            plot_runs({"server": self.records}, self._slo, args.plots)
        if args.json:
            print(json.dumps(result))
        else:
            Console().print(_table(self.runs, self._slo))
            if self.goodput_rps is not None:
                Console().print(f"goodput: {self.goodput_rps:.3g} requests/s")

    def _trace(self, rate: float, seed: int) -> Trace:
        args = self._args
        if args.trace:
            trace = read_trace(args.trace).head(args.requests)
            trace = trace.at_rate(rate) if rate else trace
        else:
            workload = replace(
                named_workload(args.workload),
                arrivals=Arrivals("poisson" if args.cv == 1.0 else "gamma", args.cv),
            )
            trace = workload.resample(seed, rate, args.requests)
        return scaled(trace, args.scale, args.max_context or self._model.max_context)

    def _run(self, trace: Trace, seed: int, label: str) -> list[Record]:
        jobs = make_jobs(trace, self._model.vocab_size, seed)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task(label, total=len(jobs))
            return asyncio.run(
                run_open_loop(self._make_target(), trace, jobs, lambda _: progress.advance(task))
            )

    def _make_target(self) -> Callable[[float], Target]:
        args = self._args
        if args.target == "triton":
            return lambda start: TritonTarget(args.url[0], start, args.timeout)
        return lambda start: OpenAITarget(args.url, args.name, start, args.timeout)


def _table(runs: Sequence[tuple[float, Summary]], slo: Slo) -> Table:
    table = Table(title=f"TTFT {seconds(slo.ttft_s)}, TPOT {seconds(slo.tpot_s)}")
    for name in (
        "rate",
        "requests",
        "failed",
        "attainment",
        "TTFT p50/p90/p99",
        "TPOT p50/p90/p99",
        "tok/s",
        "lag",
    ):
        table.add_column(name, justify="right")
    for rate, run in runs:
        table.add_row(
            f"{rate:g}" if rate else f"{run.offered_rps:.3g}",
            str(run.requests),
            str(run.failed),
            f"{100 * run.attainment:.1f} % [{100 * run.attainment_low:.0f}-{100 * run.attainment_high:.0f}]",
            _three(run.ttft_s),
            _three(run.tpot_s),
            f"{run.output_tokens_per_s:.0f}",
            seconds(run.generator_lag_p99_s),
        )
    return table


def _three(values: Any) -> str:
    return " / ".join(seconds(values[p]) for p in ("p50", "p90", "p99")) if values else "-"
