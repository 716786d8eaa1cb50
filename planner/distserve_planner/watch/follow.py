"""Drives a watch along a request log: one that a server is writing, or one that is complete."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from distserve_planner.placement_file import read_placement
from distserve_planner.report.arguments import placed_deployment
from distserve_planner.search.deployment import Deployment
from distserve_planner.search.problem import Problem
from distserve_planner.watch.decision import SwitchRule
from distserve_planner.watch.drift import DriftRule
from distserve_planner.watch.log_tail import LogTail
from distserve_planner.watch.watcher import Advice, Watcher

_PAUSE_S = 1.0
_SETTLE = 0.5  # windows: requests of one end after it

Act = Callable[[Advice], bool]
"""Told of every advice. False: it was to be carried out and could not be."""


@dataclass(frozen=True)
class Follow:
    """What is followed, and how. `elastic`: the number of devices may change."""

    log: Path
    placement: Path
    problem: Problem
    drift: DriftRule
    switch: SwitchRule
    elastic: bool

    def to_the_end(self, act: Act) -> None:
        """Over a complete log, window by window, by its own clock."""
        with LogTail(self.log, self.problem.slo) as tail:
            seen = tail.read()
            if not len(seen):
                return
            start_s = float(seen.arrival_s[0])
            watcher = self._watcher(start_s)
            watcher.observe(seen)
            window_s = self.drift.window_s
            windows = int((tail.end_s - start_s) / window_s - _SETTLE)
            for number in range(1, windows + 1):
                self._look(watcher, start_s + number * window_s, act)

    def for_ever(self, act: Act) -> None:
        """Over a log that grows. Of what is there already the last reference period is kept, and nothing is
        advised on it; windows that end while a change goes on are looked at together."""
        window_s = self.drift.window_s
        with LogTail(self.log, self.problem.slo) as tail:
            seen = tail.read()
            while not len(seen):
                time.sleep(_PAUSE_S)
                seen = tail.read()
            start_s = max(float(seen.arrival_s[0]), tail.end_s - self.drift.reference * window_s)
            watcher = self._watcher(start_s)
            behind_s = float("inf")  # the log's clock, behind this machine's
            looked_s = start_s + window_s * int((tail.end_s - start_s) / window_s)
            while True:
                watcher.observe(seen)
                if len(seen):
                    behind_s = min(behind_s, time.time() - tail.end_s)
                windows = int((time.time() - behind_s - looked_s) / window_s - _SETTLE)
                if windows > 0:
                    looked_s += windows * window_s
                    self._look(watcher, looked_s, act)
                time.sleep(_PAUSE_S)
                seen = tail.read()

    def _watcher(self, start_s: float) -> Watcher:
        problem, rules = self.problem, (self.drift, self.switch)
        return Watcher(problem, self._served(), *rules, elastic=self.elastic, start_s=start_s)

    def _look(self, watcher: Watcher, now_s: float, act: Act) -> None:
        # the file says what serves; it changes when advice is carried out, by this watch or by a person
        present = self._served()
        if present != watcher.present:
            watcher.changed(present, now_s)
        advice = watcher.look(now_s)
        if advice is not None and not act(advice):
            watcher.failed(now_s)

    def _served(self) -> Deployment:
        return placed_deployment(read_placement(self.placement).placement, str(self.placement))
