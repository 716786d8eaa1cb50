"""What the watch is compared with over a table of rates: a static plan, and an autoscaler on averages."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Protocol

from distserve_planner.search.deployment import Deployment
from distserve_planner.watch.decision import Switch
from distserve_planner.watch.history import History
from distserve_planner.watch.watcher import Watcher


class Policy(Protocol):
    """Decides once per step of the replay."""

    name: str

    @property
    def present(self) -> Deployment: ...

    def step(self, start_s: float, end_s: float, seen: History) -> tuple[Deployment, Switch] | None:
        """After the requests of a step: what to change to, if anything, and what the change takes."""


@dataclass
class Static:
    """One placement for the peak."""

    present: Deployment
    name: str = "static for the peak"

    def step(self, start_s: float, end_s: float, seen: History) -> tuple[Deployment, Switch] | None:
        return None


@dataclass
class Autoscaler:
    """Copies of a unit (prefill and decode in the ratio that was planned), by the mean rate of the last step.

    As replica autoscalers do: wanted = mean rate / (capacity of a unit x utilisation aimed at), nothing
    within 10 % of the present, and down only to the most that was wanted over the last steps (stabilisation).
    It knows no lengths and no queues; `capacity_rps` is the unit's goodput on the mix it was planned for.
    """

    unit: Deployment
    capacity_rps: float
    count: int
    most: int
    load_s: float
    utilisation: float = 0.8
    hold_steps: int = 2
    name: str = "autoscaler on averages"
    _wanted: list[int] = field(default_factory=list)

    @property
    def present(self) -> Deployment:
        return times(self.unit, self.count)

    def step(self, start_s: float, end_s: float, seen: History) -> tuple[Deployment, Switch] | None:
        mean = len(seen) / (end_s - start_s)
        load = mean / (self.count * self.capacity_rps * self.utilisation)
        wanted = self.count if abs(load - 1) <= 0.1 else ceil(self.count * load)
        self._wanted.append(min(max(1, wanted), self.most))
        count = max(self._wanted[-self.hold_steps :]) if self._wanted[-1] < self.count else self._wanted[-1]
        if count == self.count:
            return None
        added = (count - self.count) * self.unit.devices
        self.count = count
        return self.present, Switch(self.load_s if added > 0 else 0.0, None, max(0, added))


@dataclass
class Watching:
    """This project's watch, applying what it advises."""

    watcher: Watcher
    name: str = "planner watch"

    @property
    def present(self) -> Deployment:
        return self.watcher.present

    def step(self, start_s: float, end_s: float, seen: History) -> tuple[Deployment, Switch] | None:
        self.watcher.observe(seen)
        advice = self.watcher.look(end_s)
        if advice is None or not advice.change:
            return None
        self.watcher.changed(advice.wanted, end_s)
        return advice.wanted, advice.comparison.switch


def times(unit: Deployment, count: int) -> Deployment:
    """Every group `count` times."""
    if unit.prefill is None or unit.decode is None:
        return unit.with_units(unit.units * count)
    return unit.with_counts(unit.prefill.count * count, unit.decode.count * count)
