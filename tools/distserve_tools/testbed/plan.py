"""What a reproduction measures: models, workloads, objectives, rates, how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from distserve_planner.slo import Slo
from distserve_tools.demo_model import DEMO_MODEL

RANDOM_MODEL = "random-llama"
LEAST_REQUESTS = 8  # of a run
LONGEST_PROMPT_S = 0.4  # of the mean prompt alone; slower cores are asked shorter ones
CHUNKS = (32, 64, 128, 256)  # budgets tried (in the simulation) for the chunked baseline


@dataclass(frozen=True)
class ScaledWorkload:
    """One of the paper's workloads, all lengths times `scale`: its ratio of input to output is kept."""

    label: str
    name: str  # of `distserve_planner.workload`
    scale: float

    @property
    def title(self) -> str:
        return f"{self.label} x {self.scale:g}"

    @property
    def sizes(self) -> tuple[ScaledWorkload, ...]:
        """Itself, and what slower cores are asked: halves and quarters of its lengths."""
        return tuple(replace(self, scale=self.scale / part) for part in (1, 2, 4))


WORKLOADS = (
    ScaledWorkload("chat", "sharegpt", 0.25),
    ScaledWorkload("code", "humaneval", 0.5),
    ScaledWorkload("summarization", "longbench", 0.25),
)


@dataclass(frozen=True)
class Objective:
    """Factors on what a lone request takes, or seconds."""

    label: str
    ttft: float
    tpot: float
    relative: bool = True

    def slo(self, lone_ttft_s: float, lone_tpot_s: float) -> Slo:
        if self.relative:
            return Slo(self.ttft * lone_ttft_s, self.tpot * lone_tpot_s)
        return Slo(self.ttft, self.tpot)


OBJECTIVES = (
    Objective("5x TTFT, 2x TPOT", 5.0, 2.0),
    Objective("2.5x TTFT, 1.5x TPOT", 2.5, 1.5),
    Objective("10x TTFT, 3x TPOT", 10.0, 3.0),
    Objective("1 s, 100 ms", 1.0, 0.1, relative=False),
)


@dataclass(frozen=True)
class TestbedPlan:
    """Sizes of a reproduction. Seconds are of offered load per run; the drain comes on top."""

    __test__ = False  # the name is not a test's

    workloads: tuple[ScaledWorkload, ...] = WORKLOADS
    models: tuple[str, ...] = (DEMO_MODEL, RANDOM_MODEL)
    quick_profile: bool = False
    rates: int = 7
    run_s: float = 60.0
    repeats: int = 5  # of the middle rate, to know the noise
    lone_requests: int = 12
    judge: bool = True  # whether predictions must lie within 2 points, or the noise

    @classmethod
    def quick(cls) -> TestbedPlan:
        """Minutes: one workload, one model, short runs."""
        return cls(
            workloads=WORKLOADS[:1],
            models=(DEMO_MODEL,),
            quick_profile=True,
            run_s=22.0,
            repeats=3,
            lone_requests=6,
            judge=False,
        )

    def lasting(self, run_s: float) -> TestbedPlan:
        return replace(self, run_s=run_s)

    def requests(self, rate_rps: float) -> int:
        """Of a run at this rate."""
        return max(LEAST_REQUESTS, round(rate_rps * self.run_s))

    def turns(self, rates: Sequence[float], repeated: float) -> list[tuple[float, int]]:
        """(rate, repeat) in the order of measuring; all systems have their run in each. Repeats come first:
        how far they lie apart is what a prediction can be held against.
        """
        return [(repeated, i) for i in range(self.repeats)] + [
            (rate, 0) for rate in rates if rate != repeated
        ]

    def load_s(self, systems: int) -> float:
        """Seconds of load in all; starts, lone requests and the drain of each run come on top."""
        runs = (self.rates + self.repeats - 1) * systems
        return len(self.models) * len(self.workloads) * runs * self.run_s
