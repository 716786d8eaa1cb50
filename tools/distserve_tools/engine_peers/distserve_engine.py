"""This package's engine in `worker.py`."""

from __future__ import annotations

import time
from typing import Any


class Engine:
    """This package's engine: the loop that serves, with scheduler, runner and sampler."""

    def __init__(self, spec: dict[str, Any]) -> None:
        from distserve.core.blocks import BlockManager
        from distserve.core.config import EngineConfig
        from distserve.core.model_config import ModelConfig
        from distserve.core.scheduler import Limits
        from distserve.core.unified_scheduler import UnifiedScheduler
        from distserve.engine.inbox import Inbox
        from distserve.engine.loop import EngineLoop
        from distserve.engine.ops import Op
        from distserve.engine.requests import Owner
        from distserve.engine.roles import UnifiedRole
        from distserve.worker.executor import make_executor

        tokens = spec["sequences"] * (spec["context"] + spec["room"])
        config = EngineConfig(
            instance="bench",
            role="unified",
            model=spec["model"],
            dtype=spec["dtype"],
            num_blocks=tokens // 16 + spec["sequences"] + 1,
            max_batch_tokens=spec["context"],
        )
        self._executor = make_executor(config, ModelConfig.load(spec["model"]))
        blocks = BlockManager(self._executor.num_blocks, config.block_size)
        self._inbox: Inbox[Op] = Inbox()
        role = UnifiedRole(UnifiedScheduler(Limits.of(config), blocks), blocks)
        self._loop = EngineLoop(role, self._executor, self._inbox)
        self._owner = Owner("bench", 1)
        self._room = int(spec["room"])
        self._names = 0
        self._running: tuple[str, ...] = ()

    def describe(self) -> str:
        return f"this engine, attention {self._executor.attention}"

    def publish(self, events: Any, load: Any) -> None:
        """Where the loop's events end: nobody listens here."""

    def prefill(self, prompt: list[int]) -> None:
        self._submit(prompt, 1)
        self._loop.turn(self)

    def start(self, prompts: list[list[int]]) -> None:
        self._running = tuple(self._submit(prompt, self._room) for prompt in prompts)
        for _ in prompts:
            self._loop.turn(self)

    def step(self) -> None:
        self._loop.turn(self)

    def stop(self) -> None:
        from distserve.engine.ops import Manage

        self._inbox.post(Manage("cancel", self._owner, self._running))
        self._loop.turn(self)

    def _submit(self, prompt: list[int], max_tokens: int) -> str:
        from distserve.core.request import Request
        from distserve.engine.ops import Submit
        from distserve.engine.requests import EngineRequest
        from distserve.worker.step import SamplingParams

        self._names += 1
        name = f"r{self._names}"
        request = Request(name, len(prompt), max_tokens, tokens=list(prompt))
        state = EngineRequest(name, self._owner, request, SamplingParams(), time.monotonic())
        self._inbox.post(Submit(state))
        return name
