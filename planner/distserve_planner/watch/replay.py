"""Policies over a long table of rates, with a mix of lengths that changes with the time of day.

Every step of each policy is simulated as a steady state: a sample of requests at the step's rate (on a grid
of rates) through the deployment in force. Simulations are remembered, so that weeks take minutes. A backlog
is not carried from a step to the next; a step in overload shows as one by the growth of its own queue.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distserve.core.parsing import ConfigError
from distserve_planner.goodput import Requests, Verdict, warm_up_requests
from distserve_planner.search.assignment import assign
from distserve_planner.search.deployment import Deployment
from distserve_planner.search.problem import Problem
from distserve_planner.search.system_spec import system_spec
from distserve_planner.slo import attainment
from distserve_planner.watch.choose import QUICK, REQUESTS, Probe, Search
from distserve_planner.watch.history import Floats, History
from distserve_planner.watch.policies import Policy
from distserve_planner.workload.model import Workload
from distserve_planner.workload.trace import Trace

GRID = 0.05  # neighbouring rates of the simulations differ by so much
_MEASURED = 900


@dataclass(frozen=True, eq=False)
class Rates:
    """Mean requests per second of steps of equal length, in order; a missing one is not in the table."""

    start_s: Floats
    rate_rps: Floats
    step_s: float

    def scaled_to(self, peak_rps: float) -> Rates:
        return replace(self, rate_rps=self.rate_rps * (peak_rps / self.rate_rps.max()))


def read_rates(path: Path, series: str | None = None) -> Rates:
    """A CSV with columns `t_s` and `rate_rps`, and `model` where it has several series. Windows that read 0
    are dropped. Raises `ConfigError`."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise ConfigError(f"--rates {path}: {error.strerror or error}") from None
    if not rows or not {"t_s", "rate_rps"} <= set(rows[0]):
        raise ConfigError(f"--rates {path}: needs columns t_s and rate_rps")
    names = sorted({row["model"] for row in rows}) if "model" in rows[0] else []
    if names and series not in names:
        raise ConfigError(f"--series={series}: {path} has {', '.join(names)}")
    try:
        pairs = [(float(r["t_s"]), float(r["rate_rps"])) for r in rows if not names or r["model"] == series]
    except ValueError as error:
        raise ConfigError(f"--rates {path}: {error}") from None
    table = np.array(sorted(pair for pair in pairs if pair[1] > 0))
    if len(table) < 2:
        raise ConfigError(f"--rates {path}: fewer than two windows with requests")
    return Rates(table[:, 0], table[:, 1], float(np.diff(table[:, 0]).min()))


@dataclass(frozen=True, eq=False)
class Seen:
    """A simulated steady state: per measured request."""

    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    queue_s: Floats
    met: NDArray[np.bool_]
    verdict: Verdict


class SteadyStates:
    """What deployments do under each mix at each rate of the grid, simulated once."""

    def __init__(self, problem: Problem, mixes: Sequence[Workload], seed: int = 0) -> None:
        self.names = [mix.name for mix in mixes]
        self._problems = []
        for mix in mixes:
            trace = mix.resample(seed, 1.0, REQUESTS)
            self._problems.append(
                replace(problem, requests=Requests(trace), precision=QUICK, long_precision=QUICK)
            )
        self._inputs = [float(np.mean(p.requests.inputs)) for p in self._problems]
        self._outputs = [float(np.mean(p.requests.outputs)) for p in self._problems]
        self._seen: dict[tuple[int, Deployment, int], Seen] = {}
        self._searches = [Search(p, self._probe(mix)) for mix, p in enumerate(self._problems)]

    @property
    def simulations(self) -> int:
        return len(self._seen)

    def at(self, mix: int, deployment: Deployment, rate: float) -> Seen:
        exponent = round(log(max(rate, 1e-3)) / log(1 + GRID))
        key = (mix, deployment, exponent)
        if key not in self._seen:
            self._seen[key] = _steady(self._problems[mix], deployment, exp(exponent * log(1 + GRID)))
        return self._seen[key]

    def _probe(self, mix: int) -> Probe:
        return lambda deployment, rate: self.at(mix, deployment, rate).verdict

    def plan(self, recent: Trace) -> Search:
        """For a `Watcher`: the mix that the latest lengths are nearest to, in place of a fit of its own."""
        near = [
            abs(log(recent.input_tokens.mean() / i)) + abs(log(recent.output_tokens.mean() / o))
            for i, o in zip(self._inputs, self._outputs, strict=True)
        ]
        return self._searches[int(np.argmin(near))]

    def search(self, mix: int) -> Search:
        return self._searches[mix]


def _steady(problem: Problem, deployment: Deployment, rate: float) -> Seen:
    placed = assign(deployment, problem.cluster)
    if placed is None:
        raise ValueError(f"{deployment} does not fit the cluster")
    requests = problem.requests
    warm_up = warm_up_requests(requests, rate, problem.slo)
    count = min(max(_MEASURED, warm_up // 2), len(requests) - 2 * warm_up)
    run = requests.simulation(system_spec(problem, deployment, placed), rate, 2 * warm_up + count)
    run.run(warm_up + count)
    outcome = run.outcome(warm_up, warm_up + count)
    met = (outcome.ttft_s <= problem.slo.ttft_s) & (outcome.tpot_s <= problem.slo.tpot_s)
    stages = outcome.stages_s()
    queue = np.full(count, np.nan)
    queue[~outcome.refused] = stages["prefill queue"] + stages["decode queue"]
    seen = attainment(outcome, problem.slo, QUICK.z)
    part = slice(warm_up, warm_up + count)
    return Seen(
        np.array(requests.inputs[part], np.int64),
        np.array(requests.outputs[part], np.int64),
        queue,
        met,
        Verdict(rate, seen.both >= problem.slo.attainment, seen),
    )


@dataclass(frozen=True)
class Step:
    """One step of a replay; `attainment` of its requests, `devices` held on average."""

    start_s: float
    rate_rps: float
    mix: int
    placement: str
    devices: float
    attainment: float
    changed: bool


@dataclass(frozen=True)
class Result:
    """What a policy did over the whole table."""

    name: str
    steps: tuple[Step, ...]
    step_s: float

    @property
    def device_hours(self) -> float:
        return sum(step.devices for step in self.steps) * self.step_s / 3600

    @property
    def attainment(self) -> float:
        """Of all requests."""
        weights = [step.rate_rps for step in self.steps]
        return float(np.average([step.attainment for step in self.steps], weights=weights))

    def below(self, target: float) -> float:
        """Share of the steps whose attainment is below the target."""
        return float(np.mean([step.attainment < target for step in self.steps]))

    @property
    def changes(self) -> int:
        return sum(step.changed for step in self.steps)


def run_policy(
    policy: Policy, rates: Rates, mix_of: Sequence[int], states: SteadyStates, seed: int = 0
) -> Result:
    """Drives a policy through the table: it sees the requests of a step after that step, and what it changes
    takes effect after the change's time within the next ones."""
    rng = np.random.default_rng(seed)
    steps: list[Step] = []
    before: Deployment | None = None  # what serves until the change is through
    left_s, extra = 0.0, 0
    changed = False
    for start, rate, mix in zip(rates.start_s, rates.rate_rps, mix_of, strict=True):
        now = policy.present
        settled = states.at(mix, now, rate)
        part_s = min(left_s, rates.step_s)
        share = part_s / rates.step_s
        met = settled.verdict.attainment.both
        devices = float(now.devices)
        if before is not None and share > 0:
            met = share * states.at(mix, before, rate).verdict.attainment.both + (1 - share) * met
            held = max(now.devices, before.devices + extra)
            devices = share * held + (1 - share) * devices
        steps.append(Step(float(start), float(rate), mix, str(now), devices, met, changed))
        left_s = max(0.0, left_s - rates.step_s)
        found = policy.step(
            float(start), float(start) + rates.step_s, _requests(settled, start, rate, rates.step_s, rng)
        )
        changed = found is not None
        if found is not None:
            before = found[1].during or now
            left_s, extra = found[1].seconds, found[1].extra_devices
    return Result(policy.name, tuple(steps), rates.step_s)


def _requests(seen: Seen, start: float, rate: float, step_s: float, rng: np.random.Generator) -> History:
    """What the log would have gained: Poisson arrivals, and requests drawn from the steady state."""
    count = int(rng.poisson(rate * step_s))
    chosen = rng.integers(0, len(seen.met), count)
    return History(
        np.sort(start + step_s * rng.random(count)),
        seen.input_tokens[chosen],
        seen.output_tokens[chosen],
        seen.queue_s[chosen],
        seen.met[chosen].astype(np.float64),
    )


def finer(rates: Rates, parts: int) -> Rates:
    """Each window cut into `parts`, with rates on the line between the middles of its neighbours."""
    step = rates.step_s / parts
    offsets = (np.arange(parts) + 0.5) * step
    middles = (rates.start_s[:, None] + offsets).ravel()
    values = np.interp(middles, rates.start_s + rates.step_s / 2, rates.rate_rps)
    return Rates(middles - step / 2, values, step)


def mixes_by_hour(rates: Rates, count: int) -> list[int]:
    """Which of `count` mixes each step has: the day in equal parts, so that two change at noon."""
    hours = (rates.start_s % 86_400.0) / 86_400.0
    return [min(count - 1, int(h * count)) for h in hours]
