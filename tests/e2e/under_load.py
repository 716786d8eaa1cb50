"""Load on a deployment while it is being changed, and what it must come to."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from serving import BLOCK_SIZE, BLOCKS, HEARTBEAT_S, Deployment, greedy_mismatches

from model_zoo import prompt

GREEDY = {"temperature": 0.0, "ignore_eos": True}
PREFILL_HEAVY = (120, 6)  # tokens in, tokens out
DECODE_HEAVY = (16, 60)
PROMPTS = 3  # distinct ones of each mix: every distinct answer is checked against transformers


@dataclass
class Load:
    """Requests of a few clients; `mix` may be changed on the way."""

    mix: tuple[int, int] = PREFILL_HEAVY
    answers: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@contextmanager
def loaded(
    deployment: Deployment,
    clients: int = 4,
    rate_rps: float = float("inf"),
    mix: tuple[int, int] = PREFILL_HEAVY,
) -> Iterator[Load]:
    """Each client sends its next request when it has its answer, and not above its share of the rate."""
    load, stop = Load(mix), threading.Event()

    def client(seed: int) -> None:
        due_s = time.monotonic() + seed / rate_rps
        while not stop.wait(max(0.0, due_s - time.monotonic())):
            seed, due_s = seed + clients, due_s + clients / rate_rps
            length, output = load.mix
            ids = prompt(length, seed=seed % PROMPTS)
            try:
                answer = deployment.client.complete(ids, timeout_s=60, max_tokens=output, **GREEDY)
                load.answers.append((tuple(ids), answer.token_ids))
            except Exception as error:  # every kind of loss counts
                load.errors.append(repr(error))

    threads = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        stop.set()
        for thread in threads:
            thread.join(90)


def wait_for(load: Load, more: int, timeout_s: float = 60.0) -> None:
    enough, deadline = len(load.answers) + more, time.monotonic() + timeout_s
    while len(load.answers) < enough and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(load.answers) >= enough, load.errors[:3]


def assert_no_loss(deployment: Deployment, load: Load) -> None:
    """No request failed, and all answers to one prompt are the same, greedy one."""
    assert load.errors == []
    distinct = set(load.answers)
    assert len(distinct) == len({ids for ids, _ in distinct})
    for ids, tokens in distinct:
        assert greedy_mismatches(deployment.model, ids, tokens) == []


def placement_file(
    path: Path, deployment: Deployment, instances: Sequence[Mapping[str, Any]], **top: Any
) -> Path:
    cores = sorted(os.sched_getaffinity(0))
    listed = []
    for index, instance in enumerate(instances):
        ranks = instance.get("tp", 1) * instance.get("pp", 1)
        devices = [f"cpu:{cores[(index + rank) % len(cores)]}" for rank in range(ranks)]
        listed.append({"devices": devices, "num_blocks": BLOCKS, "heartbeat_s": HEARTBEAT_S, **instance})
    values = {
        "schema": "placement/1",
        "model": str(deployment.model.folder),
        "block_size": BLOCK_SIZE,
        "oversubscribe": True,
        "orchestrator": {"heartbeat_s": HEARTBEAT_S},
        "instances": listed,
        **top,
    }
    path.write_text(yaml.safe_dump(values))
    return path


def roles(deployment: Deployment) -> dict[str, str]:
    return {e["instance"]: e["role"] for e in deployment.status()["instances"] if e["usable"]}
