"""Progress of long steps, as plain lines that read the same in a terminal and in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping


class StepLines:
    """Prints lines to stderr, each with the seconds since the start."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._ready: set[str] = set()

    def say(self, line: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - self._start_s:6.1f} s] {line}\n")
        sys.stderr.flush()

    def models(self, states: Mapping[str, str]) -> None:
        """Progress of `TritonServer`: new ready models, or what it still waits for."""
        ready = [name for name, state in states.items() if state == "ready" and name not in self._ready]
        waiting = [name for name, state in states.items() if state != "ready"]
        self._ready.update(ready)
        for name in ready:
            self.say(f"{name} loaded")
        if waiting and not ready:
            self.say(f"loading {', '.join(waiting)}")
