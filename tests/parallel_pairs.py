"""Prefill and decode engines of any shape, and a driver that takes requests through a pair of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from engine_process import EngineProcess
from model_zoo import ZooModel, prompt

BLOCK = 16
BLOCKS = 96
OUTPUT = 12
LENGTHS = (1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 49)
WAIT_S = 120.0  # many ranks share few cores here
GREEDY: dict[str, Any] = {"ignore_eos": True}


class Shaped:
    """What is said about an instance's ranks: `Shaped(2, 1)` is tp=2."""

    def __init__(self, tp: int, pp: int) -> None:
        self.tp, self.pp = tp, pp

    def __repr__(self) -> str:
        return f"tp{self.tp}pp{self.pp}"

    @property
    def devices(self) -> list[str]:
        """Cores in turns, beginning with the last one that this process may use."""
        cores = sorted(os.sched_getaffinity(0), reverse=True)
        return [f"cpu:{cores[rank % len(cores)]}" for rank in range(self.tp * self.pp)]


def settings(model: ZooModel, instance: str, role: str, shape: Shaped, **more: Any) -> dict[str, Any]:
    return {
        "instance": instance,
        "role": role,
        "model": str(model.folder),
        "devices": shape.devices,
        "tp": shape.tp,
        "pp": shape.pp,
        "block_size": BLOCK,
        "num_blocks": BLOCKS,
        "max_batch_tokens": 64,
        "lease_s": WAIT_S,
        "transfer_timeout_s": WAIT_S,
        **more,
    }


@contextmanager
def started(configs: Mapping[str, dict[str, Any]]) -> Iterator[dict[str, EngineProcess]]:
    """Engines by name, started a few at a time and ended in order."""
    with ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        futures = {name: pool.submit(EngineProcess, **config) for name, config in configs.items()}
        yield {name: stack.enter_context(future.result()) for name, future in futures.items()}


class Driver:
    """Takes the orchestrator's place. Ids are unique over all engines it is used with."""

    def __init__(self, model: ZooModel) -> None:
        self.model = model
        self._count = itertools.count()
        self._expected: dict[tuple[int, ...], list[int]] = {}

    def entries(self, prompts: Sequence[list[int]], max_tokens: int = OUTPUT) -> list[dict[str, Any]]:
        return [
            {"id": f"r{next(self._count)}", "prompt": tokens, "max_tokens": max_tokens, "sampling": GREEDY}
            for tokens in prompts
        ]

    def expected(self, tokens: list[int]) -> list[int]:
        """By transformers, which the engine of one process equals (test_engine_pair)."""
        key = tuple(tokens)
        if key not in self._expected:
            self._expected[key] = self.model.greedy(tokens, OUTPUT)
        return self._expected[key]

    def handed_out(self, p: EngineProcess, entry: dict[str, Any]) -> dict[str, Any]:
        """The entry for decode, once prefill has told the handle."""
        record = p.caller.wait(entry["id"], lambda record: record.event("prefilled") or record.error, WAIT_S)
        assert record.error is None, record.error
        event = record.events[-1]
        return {**entry, "output": [event["token"]], "handle": event["handle"]}

    def through(self, p: EngineProcess, d: EngineProcess, prompts: Sequence[list[int]]) -> list[list[int]]:
        """The tokens of all prompts, which are submitted together."""
        entries = self.entries(prompts)
        p.caller.accept(*entries)
        moved = [self.handed_out(p, entry) for entry in entries]
        d.caller.accept(*moved)
        found = []
        for entry in moved:
            record = d.caller.finish(entry["id"], WAIT_S)
            assert record.error is None, record.error
            found.append(entry["output"] + record.tokens)
        return found


def prompts(count: int) -> list[list[int]]:
    lengths = itertools.islice(itertools.cycle(LENGTHS), count)
    return [prompt(length, seed) for seed, length in enumerate(lengths)]
