"""How the engine loop runs steps, without knowing on how many ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from distserve.core.config import EngineConfig
from distserve.core.model_config import ModelConfig
from distserve.worker.step import StepInput, StepOutput

if TYPE_CHECKING:
    from distserve.worker.kv_cache import KVCache
    from distserve.worker.running import RunningStep


class Executor(Protocol):
    """Runs steps on all ranks of an instance, in the order in which they are submitted.

    Not thread-safe: one owner, the engine loop.
    """

    depth: int
    """Steps in flight that keep every pipeline stage busy."""

    lag: int
    """Decode steps that may begin before the tokens of the one before are collected: 0 or 1. Their items then
    have `LAST_SAMPLED` for a token, and may be of the same sequences."""

    num_blocks: int
    """Blocks of the KV pool, the same on every rank."""

    kv_cache: KVCache
    """The pages of the rank in this process."""

    attention: str
    """Name of the attention implementation, for log and status."""

    def submit(self, step: StepInput) -> None:
        """Starts a step. Steps in flight at the same time must not have a sequence in common, but for `lag`.

        Raises what went wrong in this step; `RankLost` when the instance cannot go on.
        """
        ...

    def collect(self, wait_s: float = 0.0) -> StepOutput | None:
        """What the oldest step in flight has given; None if it has not ended within `wait_s`.

        Raises `RankLost`, also while nothing is in flight.
        """
        ...

    def execute(self, step: StepInput) -> StepOutput:
        """`submit` and `collect`, with nothing else in flight."""
        ...

    def listen(self, on_news: Callable[[], None]) -> None:
        """`on_news` is called, from any thread, when `collect` would say something new."""
        ...

    def close(self) -> None: ...


class LocalExecutor:
    """One rank, in this process: a step has been computed when `submit` returns, or the device is at it."""

    depth = 1

    def __init__(self, config: EngineConfig, model: ModelConfig) -> None:
        from distserve.worker.runner import ModelRunner

        self._runner = ModelRunner(config, model)
        self._runner.allocate(self._runner.affordable_blocks())
        self._running: deque[RunningStep] = deque()
        self.lag = int(self._runner.runs_ahead)
        self.kv_cache = self._runner.kv_cache
        self.num_blocks = self.kv_cache.num_blocks
        self.attention = self._runner.attention_name

    def submit(self, step: StepInput) -> None:
        running = self._runner.begin(step)
        assert running is not None  # a single rank samples
        self._running.append(running)

    def collect(self, wait_s: float = 0.0) -> StepOutput | None:
        """With `lag` only once the device has another step to go on with, or has ended this one."""
        running = self._running
        if running and (len(running) > self.lag or wait_s > 0 or running[0].done()):
            return running.popleft().result()
        return None

    def execute(self, step: StepInput) -> StepOutput:
        output = self._runner.execute(step)
        assert output is not None
        return output

    def listen(self, on_news: Callable[[], None]) -> None:
        """There is no news from elsewhere."""

    def close(self) -> None:
        """Lets the device's memory go: graphs refer to their runner, which refers to them."""
        self._runner.drop()
        del self._runner, self.kv_cache


def make_executor(config: EngineConfig, model: ModelConfig) -> Executor:
    """The executor for the instance's degrees of parallelism. Further ranks die with the calling thread."""
    if config.tp * config.pp == 1:
        return LocalExecutor(config, model)
    from distserve.worker.rank_executor import RankExecutor

    return RankExecutor(config, model)
