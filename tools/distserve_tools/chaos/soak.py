"""Millions of tokens over many streams: no error, and memory that stays flat."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from distserve_tools.chaos.deployment import Deployment
from distserve_tools.chaos.invariants import recover, resident_mb, settle, slope
from distserve_tools.chaos.load import Job, jobs, references
from distserve_tools.chaos.model import random_prompt
from distserve_tools.chaos.outcome import Outcome

STREAMS = 256
MAX_SLOPE_MB = 1.0  # per 1,000 requests, after warm-up
_SAMPLE_S = 2.0
# of the run, before memory counts: what the threads of so many streams keep for themselves fills up during
# about 4,000 requests
_WARM_SHARE = 0.45
_LONGEST_OUTPUT = 400


@dataclass
class _Soak:
    deployment: Deployment
    tokens: int
    checked: dict[Job, tuple[int, ...]]
    done_tokens: int = 0
    done: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


def soak(name: str, deployment: Deployment, seed: int, tokens: int, streams: int = STREAMS) -> Outcome:
    """Streams until `tokens` tokens have come. One request in sixteen is one whose text is known."""
    known = jobs(8, seed, max_tokens=64)
    state = _Soak(deployment, tokens, references(deployment, known))
    began_s = time.monotonic()
    threads = [threading.Thread(target=_stream, args=(state, seed, i), daemon=True) for i in range(streams)]
    for thread in threads:
        thread.start()
    memory: list[tuple[int, dict[str, float]]] = []
    shared: list[tuple[int, float]] = []
    while any(thread.is_alive() for thread in threads):
        time.sleep(_SAMPLE_S)
        memory.append((state.done, resident_mb(deployment)))
        shared.append((state.done, shared_memory_mb()))
    seconds = time.monotonic() - began_s
    aftermath = settle(deployment, recover(deployment, known[0], state.checked[known[0]], time.monotonic()))
    details = {
        "tokens": float(state.done_tokens),
        "tokens_per_s": round(state.done_tokens / seconds, 1),
        "seconds": round(seconds, 1),
        **_slopes(memory, shared),
    }
    notes = [*state.notes]
    for key, value in details.items():
        if key.endswith("mb_per_1000") and value > MAX_SLOPE_MB:
            notes.append(f"{key}={value}: at most {MAX_SLOPE_MB}")
    return Outcome(name, seed, state.counts, aftermath, notes, details)


def _slopes(memory: list[tuple[int, dict[str, float]]], shared: list[tuple[int, float]]) -> dict[str, float]:
    """Megabytes per 1,000 requests, of the last part of the run."""
    memory, shared = memory[int(_WARM_SHARE * len(memory)) :], shared[int(_WARM_SHARE * len(shared)) :]
    names = sorted(memory[-1][1]) if memory else []
    out = {
        f"{name.replace(' ', '_')}_mb_per_1000": round(
            1000 * slope([(done, mb[name]) for done, mb in memory if name in mb]), 3
        )
        for name in names
    }
    return {**out, "dev_shm_mb_per_1000": round(1000 * slope([(d, mb) for d, mb in shared]), 3)}


def _stream(state: _Soak, seed: int, number: int) -> None:
    rng = random.Random(seed * 1000 + number)
    known = list(state.checked)
    while state.done_tokens < state.tokens:
        check = rng.randrange(16) == 0
        job = (
            rng.choice(known)
            if check
            else Job(tuple(random_prompt(rng.randrange(1, 64), rng)), rng.randrange(100, _LONGEST_OUTPUT), 1)
        )
        fate, note, came = "finished", "", 0
        try:
            answer = state.deployment.client.complete(job.prompt, 300.0, **job.sampling)
            came = len(answer.token_ids)
            if answer.stage_times.get("recoveries"):
                fate = "continued"
            if came != job.max_tokens or (check and answer.token_ids != state.checked[job]):
                fate, note = "lost", "wrong text"
        except Exception as error:
            fate, note = "lost", repr(error)
        with state.lock:
            state.counts[fate] += 1
            state.done += 1
            state.done_tokens += came
            if note and note not in state.notes:
                state.notes.append(note)


def shared_memory_mb() -> float:
    """Memory behind the files that servers of this process have in /dev/shm."""
    prefix = f"distserve_{os.getpid()}_"
    blocks = 0
    for name in os.listdir("/dev/shm"):
        if name.startswith(prefix):
            try:
                blocks += os.stat(Path("/dev/shm") / name).st_blocks
            except OSError:
                continue
    return blocks * 512 / 1e6
