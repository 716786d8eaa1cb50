"""More than the deployment can do, for minutes: goodput holds, memory is bounded, and service recovers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distserve_planner.workload import Trace
from distserve_tools.chaos.deployment import Deployment, Setting
from distserve_tools.chaos.invariants import recover, resident_mb, settle
from distserve_tools.chaos.load import jobs, references
from distserve_tools.chaos.model import VOCAB, ModelSize
from distserve_tools.chaos.outcome import Outcome
from distserve_tools.client import RequestError
from distserve_tools.load.generator import make_jobs, run_open_loop
from distserve_tools.load.record import Record
from distserve_tools.load.triton_target import TritonTarget

TTFT_SLO_S = 1.5
COSTLY_PROMPTS = Setting(
    ({"role": "prefill"}, {"role": "decode"}),
    {"slo_ttft_s": TTFT_SLO_S, "refuse_late": True},
    ModelSize(hidden=384, ffn=1024, layers=8, heads=6, kv_heads=6),
)
TIMES = (2.0, 5.0)  # the capacity
_PROMPT, _OUTPUT = 240, 3
_BURST = 24
_SAMPLE_S = 1.0
_TIMEOUT_S = 120.0
_LEAST_GOODPUT = 0.5  # of the capacity, which is that of a short burst
_LEAST_AFTERWARDS = 0.8  # of the requests at half the capacity
_MAX_GROWTH_MB = 64.0


def overload(name: str, deployment: Deployment, seed: int, seconds: float) -> Outcome:
    """Open loop at 2 and 5 times the capacity, and after each at half of it."""
    probe = jobs(1, seed, max_tokens=8)[0]
    expected = references(deployment, [probe])[probe]
    _burst(deployment, 8, seed)  # what is made at first use is no part of the capacity
    capacity = _burst(deployment, _BURST, seed)
    counts: Counter[str] = Counter()
    notes: list[str] = []
    details = {"capacity_rps": round(capacity, 1)}
    for times in TIMES:
        over, seen = _phase(deployment, times * capacity, seconds, seed, counts, notes)
        goodput = _met(over) / max(record.planned_s for record in over)
        after, _ = _phase(deployment, capacity / 2, seconds / 2, seed, counts, notes)
        share = _met(after) / len(after)
        details |= _details(f"x{times:g}", over, seen, goodput, share)
        if goodput < _LEAST_GOODPUT * capacity:
            notes.append(f"{times:g}x: goodput {goodput:.1f}/s of {capacity:.1f}/s")
        if share < _LEAST_AFTERWARDS:
            notes.append(f"after {times:g}x: {share:.0%} in time at half the capacity")
        if seen.grown_mb > _MAX_GROWTH_MB:
            notes.append(f"{times:g}x: {seen.grown} grew by {seen.grown_mb:.0f} MB")
    aftermath = settle(deployment, recover(deployment, probe, expected, time.monotonic()))
    return Outcome(name, seed, counts, aftermath, notes, details)


@dataclass
class _Seen:
    """What was looked at once a second."""

    first_mb: dict[str, float] = field(default_factory=dict)
    last_mb: dict[str, float] = field(default_factory=dict)
    most_queued: int = 0

    @property
    def grown(self) -> str:
        return max(self.last_mb, key=lambda name: self.last_mb[name] - self.first_mb.get(name, np.inf))

    @property
    def grown_mb(self) -> float:
        return self.last_mb[self.grown] - self.first_mb[self.grown] if self.last_mb else 0.0


@contextmanager
def _looking(deployment: Deployment) -> Iterator[_Seen]:
    seen, stop = _Seen(resident_mb(deployment)), threading.Event()

    def look() -> None:
        while not stop.wait(_SAMPLE_S):
            seen.last_mb = resident_mb(deployment)
            try:
                seen.most_queued = max(seen.most_queued, int(deployment.status(10.0)["queued"]))
            except RequestError:
                continue

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join(15.0)


def _phase(
    deployment: Deployment, rate: float, seconds: float, seed: int, counts: Counter[str], notes: list[str]
) -> tuple[list[Record], _Seen]:
    count = max(4, int(rate * seconds))
    with _looking(deployment) as seen:
        records = _offer(deployment, np.arange(count) / rate, seed)
    for record in records:
        fate = "finished" if record.ok else "refused" if _is_refusal(record) else "lost"
        counts[fate] += 1
        if fate == "lost" and record.error not in notes:
            notes.append(record.error or "no token")
    return records, seen


def _is_refusal(record: Record) -> bool:
    return (record.error or "").startswith("RESOURCE_EXHAUSTED: ")


def _offer(deployment: Deployment, arrivals: NDArray[np.float64], seed: int) -> list[Record]:
    count = len(arrivals)
    trace = Trace(arrivals, np.full(count, _PROMPT, np.int64), np.full(count, _OUTPUT, np.int64))
    url = deployment.server.grpc_url
    todo = make_jobs(trace, VOCAB, seed)
    return asyncio.run(run_open_loop(lambda start: TritonTarget(url, start, _TIMEOUT_S), trace, todo))


def _burst(deployment: Deployment, count: int, seed: int) -> float:
    """Requests per second that come to their first token when `count` are there at once."""
    records = [record for record in _offer(deployment, np.zeros(count), seed) if record.ok]
    if not records:
        raise AssertionError(f"none of {count} requests was served by an undisturbed server")
    return len(records) / (max(r.token_s[0] for r in records) - min(r.sent_s for r in records))


def _met(records: list[Record]) -> int:
    return sum(record.ok and record.ttft_s <= TTFT_SLO_S for record in records)


def _details(
    at: str, over: list[Record], seen: _Seen, goodput: float, share_afterwards: float
) -> Mapping[str, Any]:
    waits = sorted(record.end_s - record.sent_s for record in over if not record.ok) or [0.0]
    return {
        f"{at}_requests": len(over),
        f"{at}_refused": sum(not record.ok for record in over),
        f"{at}_goodput_rps": round(goodput, 1),
        f"{at}_refused_after_p50_s": round(waits[len(waits) // 2], 3),
        f"{at}_refused_after_p99_s": round(waits[int(0.99 * len(waits))], 3),
        f"{at}_most_queued": seen.most_queued,
        f"{at}_grown_mb": round(seen.grown_mb, 1),
        f"{at}_then_half_in_time": round(share_afterwards, 3),
    }
