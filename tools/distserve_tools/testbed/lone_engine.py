"""An engine's executor in this process, on one core, whose steps are timed one by one."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from distserve.core.config import EngineConfig
from distserve.core.model_config import ModelConfig, resolve_model
from distserve.core.parsing import ConfigError
from distserve.worker.step import StepInput

PROMPT, BATCH, CONTEXT = 192, 6, 256
BLOCK_SIZE = 16
ROUNDS, STEPS = 7, 6
CHANGE_S, TIMEOUT_S = 0.2, 600.0

Step = tuple[StepInput, list[str]]
Clock = Callable[[], float]


class LoneEngine:
    """Binds this process to the core."""

    def __init__(self, model: str, core: int) -> None:
        from distserve.worker.device import bind_device, parse_device
        from distserve.worker.executor import make_executor
        from distserve_tools.engine_sweep import EngineSweep, SweepPlan

        device = f"cpu:{core}"
        bind_device(parse_device(device))
        config = EngineConfig(
            instance="lone",
            role="unified",
            model=model,
            devices=(device,),
            num_blocks=2 * BATCH * (CONTEXT // BLOCK_SIZE + 1),
            block_size=BLOCK_SIZE,
        )
        self.model = ModelConfig.load(resolve_model(model))
        self._executor = make_executor(config, self.model)
        self._sweep = EngineSweep(self._executor, self.model, SweepPlan(), BLOCK_SIZE)

    def prefill_s(self, clock: Clock = time.perf_counter) -> float:
        """Of one prompt of `PROMPT` tokens."""
        return self._timed(self._sweep.prefill_step(PROMPT, 1), clock)

    def decode_s(self, clock: Clock = time.perf_counter) -> float:
        """Of `BATCH` requests with `CONTEXT` tokens each."""
        return self._timed(self._sweep.decode_step(BATCH, CONTEXT), clock)

    def _timed(self, step: Step, clock: Clock) -> float:
        work, keys = step
        began = clock()
        self._executor.execute(work)
        taken = clock() - began
        self._executor.execute(StepInput([], leaving=keys))
        return taken


def factor(step_s: Callable[[], float], disturb: Callable[[bool], None]) -> float:
    """Time of a step while disturbed over that while not, the two in turns: median of the rounds."""
    ratios = []
    for _ in range(ROUNDS):
        medians = []
        for disturbed in (False, True):
            disturb(disturbed)
            time.sleep(CHANGE_S)
            medians.append(statistics.median(step_s() for _ in range(STEPS)))
        ratios.append(medians[1] / medians[0])
    disturb(False)
    return statistics.median(ratios)


def measured_apart(module: str, *arguments: str) -> Any:
    """What a module that measures prints as JSON, in a process of its own: it binds itself to a core.

    Raises `ConfigError` if it fails.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise ConfigError(f"{' '.join(command[2:])} ended with code {done.returncode}")
    return json.loads(done.stdout)
