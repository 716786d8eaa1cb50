"""What a search is asked, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from distserve.core.parsing import ConfigError
from distserve_planner.search.assignment import Placed
from distserve_planner.search.candidates import Shapes
from distserve_planner.search.deployment import Deployment
from distserve_planner.search.diagnosis import Diagnosis
from distserve_planner.search.problem import Family
from distserve_planner.search.ranking import Ranked

Kind = Literal["per-device", "cluster", "least-devices", "slo-scale", "throughput"]


@dataclass(frozen=True)
class Objective:
    """What is best.

    per-device: most requests/s per device, as the paper compares placements. cluster: most requests/s on all
    devices. least-devices: fewest devices for `rate` requests/s. slo-scale: tightest objectives at `rate` on
    all devices. throughput: most output tokens/s, latency aside.
    """

    kind: Kind = "per-device"
    rate: float | None = None

    def __post_init__(self) -> None:
        needs = self.kind in ("least-devices", "slo-scale")
        if needs and self.rate is None:
            raise ConfigError(f"objective={self.kind}: needs a target rate in requests per second (--rate)")
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"rate={self.rate}: must be above 0 requests per second")


@dataclass(frozen=True)
class Row:
    """One candidate for the table. score: by the objective, larger is better; `figure` says it in words."""

    deployment: Deployment
    score: float
    figure: str
    reason: str
    entry: Ranked | None = None


@dataclass(frozen=True)
class Statistics:
    """What the search did: phases sized, candidates, how many were simulated, and in what time."""

    shapes: int
    phases: int
    candidates: int
    tried: int
    seconds: float
    jobs: int


@dataclass(frozen=True)
class SearchResult:
    """The winner with its devices and a closer look, then each family's best and its runners-up."""

    objective: Objective
    winner: Row
    placed: tuple[Placed, ...]
    diagnosis: Diagnosis | None
    rows: tuple[Row, ...]
    family_best: dict[Family, Row]
    shapes: Shapes
    statistics: Statistics
    notes: tuple[str, ...] = ()
