"""Maps a function over tasks on all cores; processes are started only if there is enough to do."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

ALONE_S = 2.0  # about what starting the processes costs
TASK_S = 1800.0


def map_tasks(
    function: Callable[[T], R],
    tasks: Sequence[T],
    jobs: int,
    done: Callable[[int, int], None] | None = None,
) -> list[R]:
    """Results in the order of `tasks`. `function` must be picklable; `done` is told (finished, all)."""
    results: dict[int, R] = {}
    rest = list(range(len(tasks)))
    began = time.monotonic()

    def finished(index: int, result: R) -> None:
        results[index] = result
        if done is not None:
            done(len(results), len(tasks))

    while rest and (jobs == 1 or len(rest) == 1 or time.monotonic() - began < ALONE_S):
        index = rest.pop(0)
        finished(index, function(tasks[index]))
    if rest:
        pool = ProcessPoolExecutor(min(jobs, len(rest)), multiprocessing.get_context("spawn"))
        try:
            futures = {pool.submit(function, tasks[index]): index for index in rest}
            for future in as_completed(futures, TASK_S):
                finished(futures[future], future.result())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    return [results[index] for index in range(len(tasks))]
