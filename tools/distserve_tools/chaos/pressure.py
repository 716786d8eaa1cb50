"""Requests that are large for the deployment: KV that does not fit, outputs and prompts of great length."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distserve_tools.chaos.deployment import BLOCK_SIZE, Deployment, Setting
from distserve_tools.chaos.invariants import recover, settle
from distserve_tools.chaos.load import Job, jobs, references, streaming
from distserve_tools.chaos.model import TINY, ModelSize, random_prompt
from distserve_tools.chaos.outcome import Outcome
from distserve_tools.client import Completion, RequestError

NARROW_BLOCKS = 24
NARROW = Setting(
    ({"role": "prefill", "lease_s": 2.0}, {"role": "decode", "num_blocks": NARROW_BLOCKS}),
    {"lease_renew_s": 0.5},
)
_CONTEXT = 32_768
LONG_CONTEXT = Setting(
    (
        {"role": "prefill", "num_blocks": 3 * _CONTEXT // BLOCK_SIZE // 2, "prefill_chunk_tokens": 512},
        {"role": "decode", "num_blocks": 3 * _CONTEXT // BLOCK_SIZE // 2},
    ),
    size=ModelSize(hidden=32, ffn=64, layers=1, heads=2, kv_heads=2, context=_CONTEXT),
)
_STREAMS = 20
_OUTPUT = 200
_LONG_OUTPUT = 100_000
_SHORT = 40  # tokens of output
_LONG_PROMPT = 30_000
_SHORT_PROMPTS = 100
_WAIT_S = 120.0


def kv_pressure(name: str, deployment: Deployment, seed: int) -> Outcome:
    """Far more KV than there is room for: requests wait, with their KV at prefill for longer than a lease,
    are preempted and recomputed, and all get the right text. What can never fit is refused.
    """
    todo = jobs(_STREAMS, seed, _OUTPUT)
    expected = references(deployment, todo)
    before = _preemptions(deployment)
    with streaming(deployment, todo, expected, _STREAMS) as streams:
        pass
    preempted = _preemptions(deployment) - before
    counts, notes = streams.counts, streams.why("lost")
    if not preempted:
        notes.append("nothing was preempted")
    if counts["continued"]:
        notes.append(f"{counts['continued']} requests lost their KV while they waited")
    counts["refused"] += _never_fits(deployment, seed, notes)
    aftermath = settle(deployment, recover(deployment, todo[0], expected[todo[0]], time.monotonic()))
    return Outcome(name, seed, counts, aftermath, notes, {"preemptions": float(preempted)})


def _preemptions(deployment: Deployment) -> int:
    return sum(int(entry["preemptions"] or 0) for entry in deployment.status()["instances"])


def _never_fits(deployment: Deployment, seed: int, notes: list[str]) -> int:
    """How many such requests were refused, as they must be."""
    length = NARROW_BLOCKS * BLOCK_SIZE
    assert length < TINY.context
    prompt, refused = random_prompt(length, random.Random(seed)), 0
    try:
        deployment.client.complete(prompt, 20.0, max_tokens=8)
        notes.append(f"a prompt of {length} tokens was served, there is room for {length}")
    except RequestError as error:
        refused += error.code == "INVALID_ARGUMENT"
        if error.code != "INVALID_ARGUMENT":
            notes.append(f"a prompt that can never fit: {error}")
    return refused


@dataclass
class _Long:
    """A request of great length, followed in a thread of its own."""

    deployment: Deployment
    tokens: int = 0
    first_s: float = 0.0  # to its first token
    error: str = ""
    begun: threading.Event = field(default_factory=threading.Event)
    call: Any = None

    def follow(self, prompt: list[int], at_least: int, **sampling: Any) -> None:
        """`begun` is set after so many tokens."""
        began_s = time.monotonic()
        try:
            for chunk in self.deployment.client.stream(
                prompt, _WAIT_S, on_call=self._started, ignore_eos=True, temperature=0.0, **sampling
            ):
                self.first_s = self.first_s or time.monotonic() - began_s
                self.tokens += len(chunk.token_ids)
                if self.tokens >= at_least:
                    self.begun.set()
        except RequestError as error:
            self.error = str(error)
        finally:
            self.begun.set()

    def _started(self, call: Any) -> None:
        self.call = call


def long_output(name: str, deployment: Deployment, seed: int) -> Outcome:
    """20 short requests while a very long one is decoded: all end, and the long one goes on meanwhile."""
    rng = random.Random(seed)
    todo = [Job(tuple(random_prompt(rng.randrange(8, 64), rng)), _SHORT) for _ in range(_STREAMS)]
    expected = references(deployment, todo)
    long = _Long(deployment)
    thread = threading.Thread(
        target=long.follow, args=(random_prompt(16, rng), 50), kwargs={"max_tokens": _LONG_OUTPUT}
    )
    thread.start()
    long.begun.wait(_WAIT_S)
    before = long.tokens
    with ThreadPoolExecutor(_STREAMS) as pool:
        answers = list(pool.map(lambda job: _complete(deployment, job), todo))
    meanwhile = long.tokens - before
    alive = thread.is_alive()
    if long.call is not None:
        long.call.cancel()
    thread.join(_WAIT_S)
    counts = _judged(todo, answers, expected)
    counts["cancelled"] += 1
    notes = [] if alive and meanwhile > 0 else [f"the long one: {meanwhile} tokens meanwhile, {long.error}"]
    times = [answer.token_s[-1] - answer.sent_s for answer in answers if isinstance(answer, Completion)]
    details = {
        "slowest_short_s": round(max(times, default=0.0), 2),
        "long_tokens_meanwhile": float(meanwhile),
    }
    aftermath = settle(deployment, recover(deployment, todo[0], expected[todo[0]], time.monotonic()))
    return Outcome(name, seed, counts, aftermath, notes, details)


def long_prompt(name: str, deployment: Deployment, seed: int) -> Outcome:
    """100 short prompts behind one of 30,000 tokens, which they may overtake."""
    rng = random.Random(seed)
    todo = [Job(tuple(random_prompt(48, rng)), 2) for _ in range(_SHORT_PROMPTS)]
    expected = references(deployment, todo)
    long = _Long(deployment)
    prompt = random_prompt(_LONG_PROMPT, rng)
    thread = threading.Thread(target=long.follow, args=(prompt, 1), kwargs={"max_tokens": 2})
    thread.start()
    end = time.monotonic() + _WAIT_S
    while not deployment.status()["requests"] and time.monotonic() < end:
        time.sleep(0.01)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda job: _complete(deployment, job), todo))
    thread.join(_WAIT_S)
    counts = _judged(todo, answers, expected)
    counts["finished" if long.tokens == 2 else "lost"] += 1
    times = [answer.ttft_s for answer in answers if isinstance(answer, Completion)]
    p99 = float(np.percentile(times, 99)) if times else 0.0
    notes = [long.error] if long.error else []
    if not p99 < long.first_s / 2:
        notes.append(f"short ones waited {p99:.2f} s, the long one {long.first_s:.2f} s")
    details = {"short_ttft_p99_s": round(p99, 3), "long_ttft_s": round(long.first_s, 2)}
    aftermath = settle(deployment, recover(deployment, todo[0], expected[todo[0]], time.monotonic()))
    return Outcome(name, seed, counts, aftermath, notes, details)


def _complete(deployment: Deployment, job: Job) -> Completion | RequestError:
    try:
        return deployment.client.complete(job.prompt, _WAIT_S, **job.sampling)
    except RequestError as error:
        return error


def _judged(
    todo: list[Job], answers: list[Completion | RequestError], expected: dict[Job, tuple[int, ...]]
) -> Counter[str]:
    right = [
        isinstance(answer, Completion) and answer.token_ids == expected[job]
        for job, answer in zip(todo, answers, strict=True)
    ]
    return Counter({"finished": sum(right), "lost": len(right) - sum(right)})
