"""How the engine loop runs a step, without knowing on how many ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from distserve.core.config import EngineConfig
from distserve.core.model_config import ModelConfig
from distserve.core.parsing import ConfigError
from distserve.worker.step import StepInput, StepOutput

if TYPE_CHECKING:
    from distserve.worker.kv_cache import KVCache


class Executor(Protocol):
    """Runs steps on all ranks of an instance. Not thread-safe: one owner, the engine loop."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV pool, the same on every rank."""
        ...

    @property
    def kv_cache(self) -> KVCache:
        """The pages of the rank in this process."""
        ...

    @property
    def attention(self) -> str:
        """Name of the attention implementation, for log and status."""
        ...

    def execute(self, step: StepInput) -> StepOutput: ...

    def close(self) -> None: ...


class LocalExecutor:
    """One rank, in this process."""

    def __init__(self, config: EngineConfig, model: ModelConfig) -> None:
        from distserve.worker.parallel import ParallelGroup
        from distserve.worker.runner import ModelRunner

        self._runner = ModelRunner(config, model, ParallelGroup())
        self.kv_cache = self._runner.kv_cache
        self.num_blocks = self.kv_cache.num_blocks
        self.attention = self._runner.attention_name

    def execute(self, step: StepInput) -> StepOutput:
        return self._runner.execute(step)

    def close(self) -> None:
        """Nothing to end: the pages go with the object."""


def make_executor(config: EngineConfig, model: ModelConfig) -> Executor:
    """The executor for the instance's degrees of parallelism."""
    if config.tp * config.pp > 1:
        raise ConfigError(f"tp={config.tp}, pp={config.pp}: one rank per instance is supported so far")
    return LocalExecutor(config, model)
