"""One engine in one process, timed step by step: `python worker.py SPEC`, requests and replies as JSON lines.

Run by path, so that it works in a peer's own virtual environment: it imports nothing of this package but the
one engine's module beside it, `NAME_engine`, whose `Engine` is timed. Requests on stdin: {"op": "prefill"},
{"op": "start", "batch"}, {"op": "steps", "count"}, {"op": "stop"}. Each reply is one line on a descriptor of
its own.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

VOCAB_LOW = 100  # prompts leave out the special tokens below


class Engine(Protocol):
    """What is timed. Prompts are random ids; decoding goes on for as long as it is stepped."""

    def describe(self) -> str:
        """Version and settings, for the report."""
        ...

    def prefill(self, prompt: list[int]) -> None:
        """Computes one prompt and its first token, and forgets it."""
        ...

    def start(self, prompts: list[list[int]]) -> None:
        """Brings these sequences to the point where the next step decodes all of them."""
        ...

    def step(self) -> None:
        """One token for every sequence."""
        ...

    def stop(self) -> None:
        """Forgets the sequences."""
        ...


def timed(call: Callable[[], None]) -> dict[str, float]:
    """Seconds of one call: by the clock on the wall, and of processor time of all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def serve(spec: dict[str, Any], engine: Engine) -> None:
    """Answers requests until stdin ends. Replies go to the file descriptor `spec["reply_fd"]`."""
    rng = random.Random(0)
    with os.fdopen(spec["reply_fd"], "w") as replies:

        def prompt() -> list[int]:
            return [rng.randrange(VOCAB_LOW, spec["vocab"]) for _ in range(spec["context"])]

        def reply(value: object) -> None:
            replies.write(json.dumps(value) + "\n")
            replies.flush()

        reply({"about": engine.describe()})
        for line in sys.stdin:
            request = json.loads(line)
            if request["op"] == "prefill":
                ids = prompt()
                reply([timed(lambda ids=ids: engine.prefill(ids))])  # type: ignore[misc]
            elif request["op"] == "start":
                engine.start([prompt() for _ in range(request["batch"])])
                reply([])
            elif request["op"] == "steps":
                reply([timed(engine.step) for _ in range(request["count"])])
            else:
                engine.stop()
                reply([])


def main() -> None:
    spec = json.loads(sys.argv[1])
    os.sched_setaffinity(0, spec["cores"])
    os.environ["OMP_NUM_THREADS"] = str(len(spec["cores"]))
    import torch

    torch.set_num_threads(len(spec["cores"]))
    serve(spec, importlib.import_module(f"{spec['engine']}_engine").Engine(spec))


if __name__ == "__main__":
    main()
