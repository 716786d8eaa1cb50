"""Streams one answer of the demo model through a whole deployment, and says where the time went."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from distserve_tools.client import Chunk, Client, Completion, RequestError, gather
from distserve_tools.console import StepLines
from distserve_tools.demo_model import ensure_demo_model
from distserve_tools.demo_placement import demo_placement
from distserve_tools.openai_api.tokenizer import ChatTokenizer
from distserve_tools.repository import NodeRepository, repository_for
from distserve_tools.serve import START_ERRORS, add_server_arguments, server_options, signals_interrupt
from distserve_tools.stack import running

STAGES = (
    ("prefill queue", "prefill_queue_s"),
    ("prefill", "prefill_s"),
    ("decode queue", "decode_queue_s"),
    ("transfer", "transfer_s"),
    ("decode", "decode_s"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `distserve demo`."""
    parser.add_argument("prompt", nargs="?", default="What is the capital of France? Tell me about it.")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0 when the answer came."""
    lines = StepLines()
    try:
        model = ensure_demo_model(lines.say)
        prompt = ChatTokenizer(model).render([{"role": "user", "content": args.prompt}])
        lines.say("generating the model repository: 1 prefill + 1 decode instance on the CPU")
        repository = NodeRepository(repository_for(demo_placement(), "demo"))
        with signals_interrupt(), running(server_options(args, repository), lines) as stack:
            assert stack.client is not None
            completion = _answer(stack.client, args, prompt)
            Console().print(timing_table(completion))
    except (*START_ERRORS, RequestError) as error:
        sys.stderr.write(f"distserve demo: {error}\n")
        return 1
    lines.say("stopped")
    return 0


def _answer(client: Client, args: argparse.Namespace, prompt: list[int]) -> Completion:
    sys.stdout.write(f"\n> {args.prompt}\n")
    sent_s = time.monotonic()
    chunks = client.stream(prompt, max_tokens=args.max_tokens, temperature=args.temperature)
    completion = gather(_echo(chunks), sent_s)
    sys.stdout.write("\n\n")
    return completion


def _echo(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    for chunk in chunks:
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
        yield chunk


def timing_table(completion: Completion) -> Table:
    """TTFT and TPOT as the client saw them, and the five stages as the orchestrator did."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("TTFT", f"{completion.ttft_s * 1e3:.1f} ms")
    table.add_row("TPOT", f"{completion.tpot_s * 1e3:.1f} ms")
    for label, key in STAGES:
        table.add_row(f"  {label}", f"{float(completion.stage_times[key]) * 1e3:.1f} ms")
    table.add_row("prompt tokens", str(completion.prompt_tokens))
    table.add_row("output tokens", f"{completion.completion_tokens} ({completion.finish_reason})")
    return table
