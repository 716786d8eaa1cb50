"""Times steps of a real executor: prompts by length and number, pieces of prompts by length and what lies
before them, decode steps by batch and context."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from distserve.core.model_config import ModelConfig
from distserve.worker.executor import Executor
from distserve.worker.step import LAST_SAMPLED, Joining, SamplingParams, StepInput, StepItem
from distserve_planner.fit import DecodePoint, PiecePoint, PrefillPoint

STEADY_STEPS, WARM_STEPS = 19, 3  # of decoding in a row, the first ones not timed


@dataclass(frozen=True)
class SweepPlan:
    """What is measured. Points that do not fit the KV pool or the context are left out.

    step_limit_s: once a step takes longer, larger ones of its kind are not tried.
    """

    lengths: tuple[int, ...] = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
    prompts: tuple[int, ...] = (1, 2, 4, 8)
    max_prefill_tokens: int = 4096
    pieces: tuple[int, ...] = (8, 16, 32, 64, 128, 256)
    before: tuple[int, ...] = (256, 1024)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64)
    contexts: tuple[int, ...] = (32, 128, 256, 512, 1024, 2048)
    repeats: int = 5
    step_limit_s: float = 4.0

    @classmethod
    def quick(cls) -> SweepPlan:
        """A coarse sweep, for a first look."""
        return cls(
            lengths=(8, 16, 32, 64, 128, 256, 512, 1024),
            prompts=(1, 4),
            max_prefill_tokens=1024,
            pieces=(8, 16, 32, 64),
            before=(256,),
            batches=(1, 2, 4, 8, 16, 32),
            contexts=(32, 256, 1024),
            repeats=3,
            step_limit_s=1.5,
        )

    def prefill_points(self, max_context: int, pool_tokens: int) -> list[tuple[int, int]]:
        """(length, prompts), shorter first."""
        most = min(self.max_prefill_tokens, pool_tokens)
        pairs = itertools.product(self.lengths, self.prompts)
        return [(n, k) for n, k in pairs if n <= max_context and n * k <= most]

    def piece_points(self, max_context: int, pool_tokens: int) -> list[tuple[int, int]]:
        """(length, tokens before it), shorter first."""
        most = min(max_context, pool_tokens)
        return [
            (n, before) for n, before in itertools.product(self.pieces, self.before) if n + before <= most
        ]

    def decode_points(self, max_context: int, pool_tokens: int) -> list[tuple[int, int]]:
        """(batch, context of each request), smaller first."""
        pairs = itertools.product(self.batches, self.contexts)
        return [(b, c) for b, c in pairs if c <= max_context and b * (c + 16) <= pool_tokens]


class EngineSweep:
    """Runs the points of a plan on one executor, which it does not close."""

    def __init__(self, executor: Executor, model: ModelConfig, plan: SweepPlan, block_size: int) -> None:
        self._executor = executor
        self._model = model
        self._plan = plan
        self._block_size = block_size
        self._names = itertools.count()

    @property
    def pool_tokens(self) -> int:
        return self._executor.num_blocks * self._block_size

    def prefill(self, points: Sequence[tuple[int, int]], done: Callable[[], None]) -> list[PrefillPoint]:
        """Median seconds of each (length, prompts); `done` is called after each point, measured or not."""
        found: list[PrefillPoint] = []
        slowest = _Limits(self._plan.step_limit_s)
        for length, prompts in points:
            if slowest.allows(prompts):
                seconds = self._median(lambda length=length, n=prompts: self.prefill_step(length, n))  # type: ignore[misc]
                slowest.saw(prompts, seconds)
                found.append(PrefillPoint(length * prompts, length * length * prompts, prompts, seconds))
            done()
        return found

    def pieces(self, points: Sequence[tuple[int, int]], done: Callable[[], None]) -> list[PiecePoint]:
        """Each (length, tokens before it), as the last of its prompt and as one that goes on, by turns."""
        found: list[PiecePoint] = []
        for length, before in points:
            times: dict[bool, list[float]] = {True: [], False: []}
            for last in (True, False) * (self._plan.repeats + 1):
                times[last].append(self._seconds(self._step(1, before + length, before, sample=last)))
            ends, goes_on = (statistics.median(times[last][1:]) for last in (True, False))
            squares = (before + length) ** 2 - before**2
            found.append(PiecePoint(length, squares, ends, goes_on))
            done()
        return found

    def decode(self, points: Sequence[tuple[int, int]], done: Callable[[], None]) -> list[DecodePoint]:
        """Median seconds of each (batch, context)."""
        found: list[DecodePoint] = []
        for batch, context in points:
            if self._executor.lag and context > STEADY_STEPS:
                seconds = self._steady_decode_s(batch, context)
            else:
                seconds = self._median(lambda batch=batch, c=context: self.decode_step(batch, c))  # type: ignore[misc]
            found.append(DecodePoint(batch, batch * context, seconds))
            done()
        return found

    def _steady_decode_s(self, batch: int, context: int) -> float:
        """Seconds of a step of sequences that go on, each begun before the last one's tokens are read: as
        executors with `lag` decode. The last one is at `context`.
        """
        executor = self._executor
        first, keys = self.decode_step(batch, context)
        executor.execute(StepInput([], first.joining))
        began = 0.0
        for count in range(STEADY_STEPS):
            if count == WARM_STEPS:
                executor.collect(wait_s=1.0)
                began = time.perf_counter()
            start, token = context - STEADY_STEPS + count, LAST_SAMPLED if count else 11
            executor.submit(StepInput([replace(item, tokens=[token], start=start) for item in first.items]))
            if count not in (0, WARM_STEPS):
                executor.collect()
        executor.collect(wait_s=1.0)
        seconds = (time.perf_counter() - began) / (STEADY_STEPS - WARM_STEPS)
        executor.execute(StepInput([], leaving=keys))
        return seconds

    def _median(self, step: Callable[[], tuple[StepInput, list[str]]]) -> float:
        """Median over the plan's repeats, after one that is not counted; fewer for steps near the limit."""
        times: list[float] = []
        for _ in range(self._plan.repeats + 1):
            times.append(self._seconds(step()))
            if sum(times) > 2 * self._plan.step_limit_s and len(times) > 1:
                break
        return statistics.median(times[1:])

    def _seconds(self, step: tuple[StepInput, list[str]]) -> float:
        work, keys = step
        start = time.perf_counter()
        self._executor.execute(work)
        took = time.perf_counter() - start
        self._executor.execute(StepInput([], leaving=keys))
        return took

    def prefill_step(self, length: int, prompts: int) -> tuple[StepInput, list[str]]:
        """New prompts, whole: the step, and the keys to leave by."""
        return self._step(prompts, length, 0)

    def decode_step(self, batch: int, context: int) -> tuple[StepInput, list[str]]:
        """The last token of each of `batch` sequences: the step, and the keys to leave by."""
        return self._step(batch, context, context - 1)

    def _step(
        self, sequences: int, length: int, start: int, *, sample: bool = True
    ) -> tuple[StepInput, list[str]]:
        """`sequences` new sequences of `length` tokens that compute from `start` on."""
        per_sequence = -(-length // self._block_size)
        blocks = iter(range(self._executor.num_blocks))
        items: list[StepItem] = []
        joining: list[Joining] = []
        for name in self._keys(sequences):
            ids = [(7 * position + 11) % self._model.vocab_size for position in range(length)]
            table = list(itertools.islice(blocks, per_sequence))
            items.append(StepItem(name, ids[start:], start, table, sample))
            joining.append(Joining(name, SamplingParams(), length, ids))
        return StepInput(items, joining), [item.key for item in items]

    def _keys(self, count: int) -> Iterator[str]:
        return (f"profile-{next(self._names)}" for _ in range(count))


class _Limits:
    """Remembers from which number of prompts on steps got too slow."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._slow: int | None = None

    def allows(self, prompts: int) -> bool:
        return self._slow is None or prompts < self._slow

    def saw(self, prompts: int, seconds: float) -> None:
        if seconds > self._limit_s and (self._slow is None or prompts < self._slow):
            self._slow = prompts
