"""The open loop itself: every request is sent at its planned time, whatever became of the ones before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np

from distserve_planner.workload import Trace
from distserve_tools.load.record import Record
from distserve_tools.load.target import Job, Target


class GeneratorTooSlow(RuntimeError):
    """The generator could not keep its own schedule, so what it measured is not the server."""


def make_jobs(trace: Trace, vocab_size: int, seed: int) -> list[Job]:
    """Random prompts of the trace's lengths; ids below 10 are left out (special tokens)."""
    rng = np.random.default_rng(seed)
    return [
        Job(rng.integers(10, vocab_size, int(n)).tolist(), int(m))
        for n, m in zip(trace.input_tokens, trace.output_tokens, strict=True)
    ]


async def run_open_loop(
    make_target: Callable[[float], Target],
    trace: Trace,
    jobs: Sequence[Job],
    on_end: Callable[[Record], None] = lambda _: None,
) -> list[Record]:
    """Sends `jobs` at the trace's times and waits for all of them. Returns one record each, in order.

    `make_target` is given the start of the run on the monotonic clock; the target's own timeout ends
    every request.
    """
    start = time.monotonic() + 0.2
    target = make_target(start)
    records = [
        Record(i, float(t), len(job.prompt))
        for i, (t, job) in enumerate(zip(trace.arrival_s, jobs, strict=True))
    ]

    async def one(job: Job, record: Record) -> None:
        await target.send(job, record)
        on_end(record)

    tasks = []
    try:
        for job, record in zip(jobs, records, strict=True):
            delay = start + record.planned_s - time.monotonic()
            await asyncio.sleep(max(0.0, delay))
            tasks.append(asyncio.create_task(one(job, record)))
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await target.close()
    return records


def check_lag(records: Sequence[Record], limit_s: float) -> float:
    """The 99th percentile of the generator's lag. Raises `GeneratorTooSlow` above `limit_s`."""
    lag = float(np.percentile([r.lag_s for r in records], 99))
    if lag > limit_s:
        raise GeneratorTooSlow(
            f"the generator sent 1 % of the requests more than {lag * 1e3:.0f} ms late "
            f"(allowed: {limit_s * 1e3:.0f} ms); lower the rate or give it a core of its own"
        )
    return lag
