"""Evaluates tasks on all cores. Processes are started only if a search turns out to be long."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType

from distserve_planner.search.evaluate import evaluate
from distserve_planner.search.problem import Problem
from distserve_planner.search.tasks import Result, Task

ALONE_S = 1.5  # what starting processes costs; shorter searches stay in this one
STOP_S = 5.0
TASK_S = 1800.0  # no task takes as long; a worker that is stuck must not hold the search for ever

Done = Callable[[Task, Result], None]


class Workers:
    """A context manager; `map` keeps the order of its tasks. Results do not depend on `jobs`."""

    def __init__(self, problem: Problem, jobs: int) -> None:
        self._problem = problem
        self._jobs = jobs
        self._spent_s = 0.0
        self._processes: list[tuple[BaseProcess, Connection]] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, connection in self._processes:
            connection.close()  # the worker's loop ends with its pipe
            process.join(STOP_S if kind is None else 0.1)
            if process.is_alive():
                process.terminate()
                process.join(STOP_S)
        self._processes.clear()

    @property
    def jobs(self) -> int:
        return self._jobs

    def map(self, tasks: Sequence[Task], done: Done | None = None) -> list[Result]:
        """Results in the order of `tasks`; `done` is called as each comes in."""
        results: dict[int, Result] = {}
        rest = list(enumerate(tasks))
        while rest and (self._jobs == 1 or len(rest) == 1 or self._spent_s < ALONE_S):
            index, task = rest.pop(0)
            began = time.monotonic()
            results[index] = evaluate(self._problem, task)
            self._spent_s += time.monotonic() - began
            if done is not None:
                done(task, results[index])
        if rest:
            self._start()
            self._share(rest, results, done)
        return [results[index] for index in range(len(tasks))]

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        while len(self._processes) < self._jobs:
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            ours.send(self._problem)
            self._processes.append((process, ours))

    def _share(self, rest: list[tuple[int, Task]], results: dict[int, Result], done: Done | None) -> None:
        busy: dict[Connection, tuple[int, Task]] = {}
        idle = [connection for _, connection in self._processes]
        while rest or busy:
            while rest and idle:
                connection = idle.pop(0)
                busy[connection] = rest.pop(0)
                connection.send(busy[connection][1])
            done_now = wait(list(busy), TASK_S)
            if not done_now:
                raise TimeoutError(f"no result from {len(busy)} workers within {TASK_S:g} s")
            for ready in done_now:
                assert isinstance(ready, Connection)
                index, task = busy.pop(ready)
                answer = ready.recv()
                if isinstance(answer, Exception):
                    raise answer
                results[index] = answer
                idle.append(ready)
                if done is not None:
                    done(task, answer)


def work(connection: Connection) -> None:
    """Main of a worker process: a problem, then tasks, until the pipe is closed."""
    try:
        problem = connection.recv()
        while True:
            task = connection.recv()
            try:
                answer: Result | Exception = evaluate(problem, task)
            except Exception as error:
                answer = error
            connection.send(answer)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
