"""What worker processes are asked, and what they answer: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from distserve.core.shapes import Shape
from distserve_planner.goodput import Goodput, Verdict
from distserve_planner.search.deployment import Deployment
from distserve_planner.search.diagnosis import Diagnosis
from distserve_planner.simulator.usage import Usage
from distserve_planner.slo import Attainment


@dataclass(frozen=True)
class PhaseTask:
    """Goodput of one phase alone on one instance (`simu_prefill`, `simu_decode`)."""

    role: Literal["prefill", "decode"]
    shape: Shape
    cross_hops: int = 0


@dataclass(frozen=True)
class DeploymentTask:
    """Joint goodput of a deployment.

    floor: requests/s per device that it must reach to be of interest. ceiling: optimistic requests/s of all;
    first_step: how far below it the result is expected, in points of the grid of rates.
    """

    deployment: Deployment
    floor: float = 0.0
    ceiling: float = inf
    long: bool = False
    first_step: int = 16


@dataclass(frozen=True)
class RateTask:
    """Whether a deployment meets the objectives at one rate (requests/s)."""

    deployment: Deployment
    rate: float
    long: bool = False


@dataclass(frozen=True)
class ScaleTask:
    """The tightest scale of the objectives that a deployment meets at one rate."""

    deployment: Deployment
    rate: float
    long: bool = False


@dataclass(frozen=True)
class OfflineTask:
    """Throughput when all requests are there from the start."""

    deployment: Deployment
    requests: int = 2000


@dataclass(frozen=True)
class DiagnosisTask:
    """A closer look at a deployment at one rate."""

    deployment: Deployment
    rate: float
    long: bool = False


@dataclass(frozen=True)
class RulesTask:
    """Best rate per device under the authors' rules."""

    prefill: Shape
    decode: Shape | None
    requests: int
    max_rate: float
    stop: float


Task = PhaseTask | DeploymentTask | RateTask | ScaleTask | OfflineTask | DiagnosisTask | RulesTask


@dataclass(frozen=True)
class ScaleResult:
    """scale: factor on both objectives at which the target attainment is just met; `at`: there."""

    scale: float
    at: Attainment


@dataclass(frozen=True)
class OfflineResult:
    """Requests and output tokens per second, without the start and the tail; and how busy what was."""

    requests_s: float
    tokens_s: float
    usage: Usage | None = None


Result = Goodput | Verdict | ScaleResult | OfflineResult | Diagnosis | float
