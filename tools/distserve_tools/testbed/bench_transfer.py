"""`distserve bench transfer`: KV between two processes beside a plain TCP stream, and steps beside KV."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from distserve.core.model_config import ModelConfig, resolve_model
from distserve_tools.console import StepLines
from distserve_tools.demo_model import DEMO_MODEL, ensure_demo_model
from distserve_tools.testbed.beside_transfer import CHANNELS, BesideTransfer, measure_beside_transfer
from distserve_tools.testbed.report_table import table
from distserve_tools.testbed.systems import cores
from distserve_tools.testbed.transfer_rates import TransferRates, rates_table, transfer_rates

EXAMPLES = """\
examples:
  distserve bench transfer
  distserve bench transfer --model /models/llama --output transfer.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `distserve bench transfer`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("--model", help="whose KV is moved: a folder (the demo model)")
    parser.add_argument("--output", type=Path, help="write the figures there as JSON, too")


def run(args: argparse.Namespace) -> int:
    """Returns 0. Raises `ConfigError` where there are no two cores, or measuring fails."""
    lines = StepLines()
    if args.model is None:
        ensure_demo_model(lines.say)
    rates, beside = measured_transfers(args.model or DEMO_MODEL, lines.say)
    sys.stdout.write(transfers_text(rates, beside))
    if args.output is not None:
        figures = {"rates": [asdict(r) for r in rates], "beside": [asdict(b) for b in beside]}
        args.output.write_text(json.dumps({"schema": "transfer/1", **figures}, indent=2))
    return 0


def measured_transfers(
    model: str, say: Callable[[str], None]
) -> tuple[list[TransferRates], list[BesideTransfer]]:
    """Of the KV of a model, over both channels."""
    say("KV transfers beside a plain TCP stream")
    rates = transfer_rates(ModelConfig.load(resolve_model(model)))
    say("steps beside KV transfers")
    return rates, [measure_beside_transfer(model, cores(), channel) for channel in CHANNELS]


def transfers_text(rates: list[TransferRates], beside: list[BesideTransfer]) -> str:
    """Two tables in Markdown."""
    rows = [
        [
            b.channel,
            f"x {b.decode:.2f}",
            f"{b.decode_bytes_s / 1e9:.2f} GB/s",
            f"x {b.prefill:.2f}",
            f"{b.prefill_bytes_s / 1e9:.2f} GB/s",
        ]
        for b in beside
    ]
    head = ["channel", "decode step, pulling all the time", "rate", "prefill step, pulled from", "rate"]
    return "\n".join([rates_table(rates), "", table(head, rows), ""])
