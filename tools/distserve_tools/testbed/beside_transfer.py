"""How much longer steps take while KV is moved: decoding beside its own pulls, prefill beside a decode's.

`python -m distserve_tools.testbed.beside_transfer MODEL CORE OTHER_CORE CHANNEL` prints a JSON object. The
pulls follow each other without a pause, which is the most that transfers can cost.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from distserve.core.model_config import ModelConfig
from distserve.transfer.measure import KVShape, Pulls, serve_pulls
from distserve_tools.testbed.lone_engine import LoneEngine, factor, measured_apart

TOKENS = 512
CHANNELS = ("memory", "gloo")
STOP_S = 10.0


@dataclass(frozen=True)
class BesideTransfer:
    """Wall time of a step while KV moves over that while none does, and what the transfers got meanwhile."""

    channel: str
    decode: float
    decode_bytes_s: float
    prefill: float
    prefill_bytes_s: float


def measure_beside_transfer(model: str, cores: tuple[int, int], channel: str) -> BesideTransfer:
    """channel: one of `CHANNELS`. Raises `ConfigError` if the measuring process fails."""
    return BesideTransfer(**measured_apart(__name__, model, *map(str, cores), channel))


def _pull(peer: Connection, model: ModelConfig, channel: str, on: Any, pulled: Any) -> None:
    """Pulls for as long as `on` is above zero; ends when it is below. Adds up bytes and seconds."""
    shape = KVShape.of(model)
    pulls = Pulls(peer, shape, _blocks(shape), channel == "memory")
    size = _blocks(shape) * shape.block_bytes
    pulls.pull_s(TOKENS)  # the pair is made
    try:
        while on.value >= 0:
            if not on.value:
                time.sleep(0.005)
                continue
            began = time.monotonic()
            pulls.pull_s(TOKENS)
            pulled[0] += size
            pulled[1] += time.monotonic() - began
    finally:
        pulls.close()


def _blocks(shape: KVShape) -> int:
    return -(-TOKENS // shape.block_size)


def _elsewhere(core: int, work: Callable[..., None], *arguments: Any) -> None:
    os.sched_setaffinity(0, {core})
    work(*arguments)


def _serve(peer: Connection, model: ModelConfig) -> None:
    shape = KVShape.of(model)
    serve_pulls(peer, shape, _blocks(shape))


@contextlib.contextmanager
def _pulled(model: ModelConfig, other: int, channel: str, here: bool) -> Iterator[tuple[Any, Any]]:
    """Pulls that can be switched on and off: by this process (`here`) or out of it. Gives the switch and what
    was moved (bytes, seconds).
    """
    context = multiprocessing.get_context("spawn")
    on, pulled = context.Value("i", 0), context.Array("d", 2)
    pulling, serving = context.Pipe()
    pull, serve = (_pull, (pulling, model, channel, on, pulled)), (_serve, (serving, model))
    ours, theirs = (pull, serve) if here else (serve, pull)
    process = context.Process(target=_elsewhere, args=(other, theirs[0], *theirs[1]), daemon=True)
    process.start()
    (serving if here else pulling).close()
    thread = threading.Thread(target=ours[0], args=ours[1], daemon=True)
    thread.start()
    try:
        yield on, pulled
    finally:
        on.value = -1
        thread.join(STOP_S)
        process.join(STOP_S)
        if process.is_alive():
            process.kill()
            process.join()


def main() -> None:
    model, core, other, channel = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    engine = LoneEngine(model, core)
    found = []
    for step_s, here in ((engine.decode_s, True), (engine.prefill_s, False)):
        with _pulled(engine.model, other, channel, here) as (on, pulled):

            def disturb(disturbed: bool, on: Any = on) -> None:
                on.value = int(disturbed)

            found += [factor(step_s, disturb), pulled[0] / max(pulled[1], 1e-9)]
    sys.stdout.write(json.dumps(asdict(BesideTransfer(channel, *found))))


if __name__ == "__main__":
    main()
