"""How busy devices, memory and links were in a simulation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distserve_planner.simulator.records import Outcome, Times
from distserve_planner.simulator.system import Simulation


@dataclass(frozen=True)
class Usage:
    """Shares of the time from the first arrival to now, 0 to 1; `None` where there is no such instance.

    Devices: time in which a stage computes, mean over instances. KV: token-seconds held over token-seconds
    there, from the times of the requests (prefill: from its start until the KV is pulled; decode: from
    admission to the last token, the context taken at its mean). link: of the busiest port.
    """

    prefill_device: float | None
    decode_device: float | None
    unified_device: float | None
    prefill_kv: float | None
    decode_kv: float | None
    link: float


def usage(run: Simulation, outcome: Outcome, inputs: list[int]) -> Usage:
    """inputs: prompt tokens of the requests of `outcome`, in order."""
    span = run.clock.now - outcome.arrival[0] if len(outcome) else 0.0
    whole = run.clock.now
    system = run.system

    def busy(parts: list[float]) -> float | None:
        return float(np.mean(parts)) / whole if parts and whole > 0 else None

    prompts = np.array(inputs, float)
    served = ~outcome.refused
    contexts = prompts + outcome.output / 2

    def held(tokens: Times, begin: Times, end: Times, capacity: int) -> float | None:
        if not capacity or span <= 0:
            return None
        return float(np.sum((tokens * (end - begin))[served])) / (capacity * span)

    decodes = system.decode + system.unified
    return Usage(
        busy([p.busy_s for p in run.prefill]),
        busy([d.busy_s for d in run.decode]),
        busy([u.busy_s for u in run.unified]),
        held(prompts, outcome.started, outcome.ready, sum(s.kv_tokens for s in system.prefill)),
        held(
            contexts,
            outcome.started if system.unified else outcome.admitted,
            outcome.finish,
            sum(s.kv_tokens for s in decodes),
        ),
        max(run.links.busy_s.values(), default=0.0) / whole if whole > 0 else 0.0,
    )
