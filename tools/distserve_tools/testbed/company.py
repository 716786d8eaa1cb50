"""How much longer steps take while the other core computes, too: the two share their memory and last cache.

`python -m distserve_tools.testbed.company MODEL CORE OTHER_CORE` prints a JSON object. In a process of its
own: it binds itself to a core.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from distserve.core.config import EngineConfig
from distserve.core.model_config import ModelConfig, resolve_model
from distserve.core.parsing import ConfigError
from distserve.worker.step import StepInput

if TYPE_CHECKING:
    from distserve_tools.engine_sweep import EngineSweep

    Step = Callable[[], tuple[StepInput, list[str]]]

PROMPT, BATCH, CONTEXT = 192, 6, 256
ROUNDS, STEPS = 7, 6
START_S, CHANGE_S, TIMEOUT_S = 120.0, 0.2, 600.0
IDLE, DECODING, STOPPED = 0, 1, 2


@dataclass(frozen=True)
class Company:
    """Processor time of a step beside a busy core over that beside an idle one."""

    prefill: float = 1.0
    decode: float = 1.0


ALONE = Company()


def measure_company(model: str, cores: tuple[int, int]) -> Company:
    """Raises `ConfigError` if the measuring process fails."""
    command = [sys.executable, "-m", __name__, model, *map(str, cores)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise ConfigError(f"two cores at once, {model}: measuring ended with code {done.returncode}")
    return Company(**json.loads(done.stdout))


def _engine(model: str, core: int) -> tuple[Any, EngineSweep]:
    from distserve.worker.device import bind_device, parse_device
    from distserve.worker.executor import make_executor
    from distserve_tools.engine_sweep import EngineSweep, SweepPlan

    device = f"cpu:{core}"
    bind_device(parse_device(device))
    block_size = 16
    config = EngineConfig(
        instance="company",
        role="unified",
        model=model,
        devices=(device,),
        num_blocks=2 * BATCH * (CONTEXT // block_size + 1),
        block_size=block_size,
    )
    shape = ModelConfig.load(resolve_model(model))
    executor = make_executor(config, shape)
    return executor, EngineSweep(executor, shape, SweepPlan(), block_size)


def _accompany(model: str, core: int, state: Any, ready: Any) -> None:
    """Decodes on `core` for as long as it is told to."""
    executor, sweep = _engine(model, core)
    ready.set()
    while state.value != STOPPED:
        if state.value == IDLE:
            time.sleep(0.005)
        else:
            _run(executor, lambda: sweep.decode_step(BATCH, CONTEXT))


def _run(executor: Any, make: Step) -> float:
    """Processor seconds of one step."""
    work, keys = make()
    began = time.process_time()
    executor.execute(work)
    taken = time.process_time() - began
    executor.execute(StepInput([], leaving=keys))
    return taken


@contextlib.contextmanager
def _companion(model: str, core: int) -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")
    state, ready = context.Value("i", IDLE), context.Event()
    process = context.Process(target=_accompany, args=(model, core, state, ready), daemon=True)
    process.start()
    try:
        if not ready.wait(START_S):
            raise ConfigError(f"core {core}: the second engine did not start within {START_S:g} s")
        yield state
    finally:
        state.value = STOPPED
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()


def main() -> None:
    model, core, other = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with _companion(model, other) as state:
        executor, sweep = _engine(model, core)

        def factor(make: Step) -> float:
            ratios = []
            for _ in range(ROUNDS):
                medians = []
                for company in (IDLE, DECODING):
                    state.value = company
                    time.sleep(CHANGE_S)
                    medians.append(statistics.median(_run(executor, make) for _ in range(STEPS)))
                ratios.append(medians[1] / medians[0])
            return max(1.0, statistics.median(ratios))

        found = Company(
            factor(lambda: sweep.prefill_step(PROMPT, 1)), factor(lambda: sweep.decode_step(BATCH, CONTEXT))
        )
    sys.stdout.write(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
