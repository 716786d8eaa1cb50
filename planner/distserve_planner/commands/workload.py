"""Statistics of a trace or workload; fits a workload to a trace; resamples new traces."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from distserve.core.parsing import ConfigError, to_mapping
from distserve_planner.workload import Trace, Workload, named_workload, workload_names
from distserve_planner.workload.lengths import with_means
from distserve_planner.workload.readers import read_trace
from distserve_planner.workload.stats import LengthStats, TraceStats, trace_stats

_STATS_REQUESTS = 10_000  # drawn to describe a workload that is not a trace

EXAMPLES = """\
examples:
  planner workload sharegpt                                  statistics of a built-in workload
  planner workload trace.csv --fit mine.yaml                 fit arrivals and lengths
  planner workload mine.yaml --resample new.csv --rate 4 --requests 2000 --seed 1
  planner workload sharegpt.csv --fit s.yaml --mean-input 755.5 --mean-output 200.3 --max-total-tokens 2048
  planner workload azure.csv --sort --drop-invalid --json

traces (told apart by their first line):
  CSV         arrived_at,num_prefill_tokens,num_decode_tokens   (arrived_at may be missing: lengths only)
  CSV         TIMESTAMP,ContextTokens,GeneratedTokens           (Azure)
  JSON lines  timestamp (ms), input_length, output_length       (Mooncake)
  JSON lines  schema: request_log/1                             (this project's request log)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `planner workload`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument(
        "source", help=f"a trace file, a workload file (.yaml), or one of: {', '.join(workload_names())}"
    )
    parser.add_argument("--fit", metavar="FILE", help="write the fitted workload (schema: workload/1)")
    parser.add_argument("--name", help="name of the fitted workload (default: the trace's)")
    parser.add_argument(
        "--mean-input", type=float, metavar="TOKENS", help="keep the shape, move the mean here"
    )
    parser.add_argument("--mean-output", type=float, metavar="TOKENS", help="the same for the answers")
    parser.add_argument(
        "--max-total-tokens", type=int, metavar="N", help="draw again whatever reaches N tokens in all"
    )
    parser.add_argument("--resample", metavar="FILE", help="write a new trace as CSV")
    parser.add_argument("--rate", type=float, metavar="RPS", help="requests per second of the new trace")
    parser.add_argument("--requests", type=int, default=1000, help="requests in the new trace (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the new trace (%(default)s)")
    parser.add_argument("--sort", action="store_true", help="sort the rows by arrival time")
    parser.add_argument("--drop-invalid", action="store_true", help="leave out rows with impossible values")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Runs `planner workload`; raises `ConfigError` for anything refused."""
    trace, workload = _source(args)
    if args.fit:
        workload.save(args.fit)
    if args.resample:
        write_csv(workload.resample(args.seed, args.rate, args.requests), args.resample)
    stats = trace_stats(trace)
    if args.json:
        sys.stdout.write(json.dumps(_document(stats, workload), indent=2) + "\n")
    else:
        _print(stats, workload, args)
    return 0


def write_csv(trace: Trace, path: str | Path) -> None:
    """Writes a trace as `arrived_at,num_prefill_tokens,num_decode_tokens`."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("arrived_at", "num_prefill_tokens", "num_decode_tokens"))
        for when, inputs, outputs in zip(
            trace.arrival_s.tolist(), trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True
        ):
            writer.writerow((f"{when:.6f}", inputs, outputs))


def _source(args: argparse.Namespace) -> tuple[Trace, Workload]:
    is_workload = args.source in workload_names() or args.source.endswith((".yaml", ".yml"))
    if not is_workload and not Path(args.source).is_file():
        named_workload(args.source)  # raises, with the nearest name
    if is_workload:
        workload = _adjusted(named_workload(args.source), args)
        own_rate = workload.arrivals.rate_rps
        drawn = workload.resample(args.seed, own_rate or 1.0, _STATS_REQUESTS)
        return replace(drawn, timed=own_rate is not None), workload
    trace = read_trace(args.source, sort=args.sort, drop_invalid=args.drop_invalid)
    fitted = Workload.fit(trace, name=args.name, max_total_tokens=args.max_total_tokens)
    return trace, _adjusted(fitted, args)


def _adjusted(workload: Workload, args: argparse.Namespace) -> Workload:
    lengths = workload.lengths
    if args.max_total_tokens is not None:
        if args.max_total_tokens < 2:
            raise ConfigError(f"--max-total-tokens={args.max_total_tokens}: must be at least 2")
        lengths = replace(lengths, max_total_tokens=args.max_total_tokens)
    if args.mean_input is not None or args.mean_output is not None:
        lengths = with_means(lengths, args.mean_input, args.mean_output)
    return replace(workload, name=args.name or workload.name, lengths=lengths)


def _document(stats: TraceStats, workload: Workload) -> dict[str, Any]:
    return {
        "schema": "workload_statistics/1",
        "statistics": stats.to_mapping(),
        "workload": to_mapping(workload),
    }


def _print(stats: TraceStats, workload: Workload, args: argparse.Namespace) -> None:
    console = Console()
    table = Table(title=f"{workload.name}: {stats.requests} requests")
    for column in ("tokens", "mean", "p5", "p50", "p90", "p99", "max"):
        table.add_column(column, justify="left" if column == "tokens" else "right")
    for label, lengths in (("input", stats.input), ("output", stats.output)):
        table.add_row(label, *_cells(lengths))
    console.print(table)
    if stats.rate_rps is not None and stats.gap_cv is not None:
        console.print(f"rate {stats.rate_rps:.3f} requests/s, gap CV {stats.gap_cv:.2f}")
    arrivals = workload.arrivals
    rate = f", {arrivals.rate_rps:.3f} requests/s" if arrivals.rate_rps else ", no rate of its own"
    console.print(f"arrivals: {arrivals.process}, CV {arrivals.cv:.2f}{rate}")
    console.print(f"rank correlation of input and output: {stats.correlation:+.3f}")
    for path, what in ((args.fit, "workload"), (args.resample, f"trace of {args.requests} requests")):
        if path:
            console.print(f"wrote {what} to {path}")


def _cells(lengths: LengthStats) -> list[str]:
    return [
        f"{lengths.mean:.1f}",
        *(f"{v:.0f}" for v in (lengths.p5, lengths.p50, lengths.p90, lengths.p99)),
        str(lengths.max),
    ]
