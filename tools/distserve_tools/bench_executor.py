"""What a step costs beside the computation when an instance has two ranks: plan, tokens, sums."""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import msgpack
from rich.console import Console
from rich.table import Table

from distserve.core.parsing import ConfigError
from distserve.worker.step import StepInput, StepItem

BLOCK_SIZE = 16
PLAN_LIMIT_MS = 1.0
EXAMPLES = """\
examples:
  distserve bench executor
  distserve bench executor --device cpu:0 cpu:1 --batch 64 --context 2048 --json
"""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one kind of operation."""

    what: str
    p50_ms: float
    p95_ms: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `distserve bench executor`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("--device", nargs=2, help="cores of the two ranks (the first two that may be used)")
    parser.add_argument("--batch", type=int, default=64, help="sequences of a step (%(default)s)")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each (%(default)s)")
    parser.add_argument("--hidden", type=int, default=2048, help="width of a sum (%(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="operations of each kind (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Status 1: the plan takes longer than its limit."""
    for name in ("batch", "context", "hidden", "steps"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name}={getattr(args, name)}: must be at least 1")
    cores = sorted(os.sched_getaffinity(0))
    devices = args.device or [f"cpu:{cores[0]}", f"cpu:{cores[1 % len(cores)]}"]
    timings = measure(devices, args.batch, args.context, args.hidden, args.steps)
    if args.json:
        found = [asdict(timing) for timing in timings]
        print(json.dumps({"schema": "bench-executor/1", "devices": devices, "timings": found}, indent=2))
    else:
        table = Table("two ranks on " + ", ".join(devices), "p50 ms", "p95 ms")
        for timing in timings:
            table.add_row(timing.what, f"{timing.p50_ms:.3f}", f"{timing.p95_ms:.3f}")
        Console().print(table)
    return 0 if timings[0].p50_ms < PLAN_LIMIT_MS else 1


def measure(devices: list[str], batch: int, context: int, hidden: int, steps: int) -> list[Timing]:
    """The plan's round trip first, then sums of one row and of `batch` rows through each kind of group."""
    import torch

    from distserve.core.shapes import Shape
    from distserve.worker.device import bind_device, parse_device
    from distserve.worker.link import Link
    from distserve.worker.process_groups import listening_store
    from distserve.worker.step_codec import StepEncoder, decode_output
    from distserve.worker.wires import close_wires, lay_wires
    from distserve_tools.executor_peer import SHAPE, TIMEOUT_S, Sums, groups_of

    bind_device(parse_device(devices[0]))
    wires = lay_wires(Shape(SHAPE.tp, SHAPE.pp), 0)
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "distserve_tools.executor_peer", "--fd", str(theirs.fileno())]
        peer = subprocess.Popen(command, pass_fds=[theirs.fileno(), *wires[1].fds])
    close_wires(wires[1:])
    link = Link(ours, TIMEOUT_S)
    try:
        store, address = listening_store("127.0.0.1", TIMEOUT_S)
        link.send(msgpack.packb({"devices": devices, "wires": wires[1].to_wire(), "store": address}))
        groups = groups_of(0, devices, wires[0], store, "127.0.0.1")
        link.receive(TIMEOUT_S)
        encoder, plan = StepEncoder(), DecodePlan(batch, context)

        def one_step() -> None:
            link.send(encoder.encode(plan.next()))
            decode_output(link.receive(TIMEOUT_S))

        timings = [_timed(f"plan and tokens, {batch} sequences of {context}", one_step, steps)]
        for rows in (1, batch):
            for kind in ("memory", "gloo"):
                sums = Sums(kind, steps, rows, hidden)
                link.send(msgpack.packb(asdict(sums)))
                tensor = torch.zeros(rows, hidden)
                what = f"sum of [{rows}, {hidden}] fp32, {kind}"
                timings.append(_timed(what, lambda k=kind, t=tensor: groups[k].all_reduce(t), steps))  # type: ignore[misc]
        return timings
    finally:
        link.end()
        try:
            peer.wait(10.0)
        except subprocess.TimeoutExpired:
            peer.kill()
            peer.wait(10.0)
        link.close()


class DecodePlan:
    """Decode steps of the same sequences, one after the other, as the engine would plan them."""

    def __init__(self, batch: int, context: int) -> None:
        self._batch, self._at = batch, context
        blocks = -(-context // BLOCK_SIZE)
        self._tables = [list(range(i * blocks, (i + 1) * blocks)) for i in range(batch)]

    def next(self) -> StepInput:
        if self._at % BLOCK_SIZE == 0:
            for index, table in enumerate(self._tables):
                table.append(100_000 + index)
        items = [StepItem(str(i), [17], self._at, table) for i, table in enumerate(self._tables)]
        self._at += 1
        return StepInput(items)


def _timed(what: str, operation: Callable[[], object], count: int) -> Timing:
    times = []
    for _ in range(count):
        start = time.perf_counter()
        operation()
        times.append((time.perf_counter() - start) * 1e3)
    times.sort()
    return Timing(what, round(statistics.median(times), 4), round(times[int(0.95 * (count - 1))], 4))
