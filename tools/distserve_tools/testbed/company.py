"""How much longer steps take while the other core computes, too: the two share their memory and last cache.

`python -m distserve_tools.testbed.company MODEL CORE OTHER_CORE` prints a JSON object.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from distserve.core.parsing import ConfigError
from distserve_tools.testbed.lone_engine import LoneEngine, factor, measured_apart

START_S = 120.0
IDLE, DECODING, STOPPED = 0, 1, 2


@dataclass(frozen=True)
class Company:
    """Processor time of a step beside a busy core over that beside an idle one."""

    prefill: float = 1.0
    decode: float = 1.0


ALONE = Company()


def measure_company(model: str, cores: tuple[int, int]) -> Company:
    """Raises `ConfigError` if the measuring process fails."""
    return Company(**measured_apart(__name__, model, *map(str, cores)))


def _accompany(model: str, core: int, state: Any, ready: Any) -> None:
    """Decodes on `core` for as long as it is told to."""
    engine = LoneEngine(model, core)
    ready.set()
    while state.value != STOPPED:
        if state.value == IDLE:
            time.sleep(0.005)
        else:
            engine.decode_s()


@contextlib.contextmanager
def _companion(model: str, core: int) -> Iterator[Callable[[bool], None]]:
    context = multiprocessing.get_context("spawn")
    state, ready = context.Value("i", IDLE), context.Event()
    process = context.Process(target=_accompany, args=(model, core, state, ready), daemon=True)
    process.start()

    def decode(on: bool) -> None:
        state.value = DECODING if on else IDLE

    try:
        if not ready.wait(START_S):
            raise ConfigError(f"core {core}: the second engine did not start within {START_S:g} s")
        yield decode
    finally:
        state.value = STOPPED
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()


def main() -> None:
    model, core, other = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with _companion(model, other) as decode:
        engine = LoneEngine(model, core)
        prefill_factor = factor(lambda: engine.prefill_s(time.process_time), decode)
        decode_factor = factor(lambda: engine.decode_s(time.process_time), decode)
    found = Company(max(1.0, prefill_factor), max(1.0, decode_factor))
    sys.stdout.write(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
