"""What an engine tells about itself: its load after every step, and the full status on request."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distserve.serving.schema import LOAD_KEYS


@dataclass(frozen=True, slots=True)
class Load:
    """A moment of the loop, made by its thread and read by others. The first ones are `schema.LOAD_KEYS`."""

    blocks_free: int = 0
    queued: int = 0  # waiting for a prefill here, or for admission to decode
    queued_tokens: int = 0  # of prefill work
    running: int = 0
    leases: int = 0
    transfers_pending: int = 0
    credits: int = 0
    preemptions: int = 0
    prefill_steps: int = 0
    prefill_tokens: int = 0
    prefill_us: int = 0
    taken: int = 0  # submits that the loop has taken out of its inbox, since the start
    taken_tokens: int = 0

    def plus(self, requests: int, tokens: int) -> Load:
        """The same with submits that are still on their way to the loop."""
        if not requests:
            return self
        return dataclasses.replace(
            self,
            queued=self.queued + requests,
            queued_tokens=self.queued_tokens + tokens,
            credits=max(0, self.credits - tokens),
        )

    def to_wire(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in LOAD_KEYS}


@dataclass(slots=True)
class Counters:
    """Totals since the start. Written by the loop thread alone; seconds are of wall time."""

    steps: int = 0
    failed_steps: int = 0
    execute_s: float = 0.0  # inside the executor: with several pipeline stages, the first one's time
    loop_s: float = 0.0  # the loop's own work between two steps; waiting is in neither
    step_began_s: float | None = None  # engine clock, of the oldest step in flight; None while no step runs
    requests: int = 0  # submitted
    submitted_tokens: int = 0  # of prefill work
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0  # prefilled, recomputed ones included
    prefill_steps: int = 0  # that computed some of them
    prefill_s: float = 0.0  # during which such a step ran, and no older one
    output_tokens: int = 0
    transfers: int = 0
    transfers_failed: int = 0
    transfer_bytes: int = 0
    transfer_wait_s: float = 0.0
    transfer_wire_s: float = 0.0

    def to_wire(self, now: float) -> dict[str, Any]:
        out = dataclasses.asdict(self)
        began = out.pop("step_began_s")
        out["busy_s"] = self.execute_s + self.loop_s
        out["step_age_s"] = now - began if began is not None else 0.0
        return out


def status_fields(
    identity: Mapping[str, Any], load: Load, counters: Counters, started_s: float, now: float
) -> dict[str, Any]:
    """The fields of a status reply. `identity`: what stays the same while the engine lives."""
    return {
        **identity,
        **load.to_wire(),
        **counters.to_wire(now),
        "uptime_s": now - started_s,
        "rss_bytes": resident_bytes(),
    }


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
