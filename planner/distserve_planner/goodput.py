"""Goodput: the highest rate per device at which enough requests meet their objectives.

Bisection over rate on the simulation. All rates and all candidates see the same requests with the same,
scaled, gaps (common random numbers). Each rate is simulated only as long as its verdict is open: requests are
added until the interval on attainment is clear of the target, or `max_requests` is reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

import numpy as np

from distserve.core.parsing import ConfigError
from distserve_planner.simulator.spec import SystemSpec
from distserve_planner.simulator.system import Simulation
from distserve_planner.slo import Attainment, Slo, attainment
from distserve_planner.workload.trace import Trace

LONE_REQUESTS = 200  # simulated one at a time, to see what is reachable without any load
LONE_GAP_S = 1e5


@dataclass(frozen=True)
class Precision:
    """How long to simulate. `step` is the grid of rates (a factor of 1 + step between neighbours).

    patient: a rate is accepted after `max_requests` only. Just above what a decode instance can do its batch
    grows for thousands of requests before TPOT is missed, while the interval has long been clear.
    """

    min_requests: int = 1000
    max_requests: int = 4000
    chunk: int = 500
    z: float = 2.58
    step: float = 0.02
    seed: int = 0
    patient: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.min_requests <= self.max_requests:
            raise ConfigError(
                f"min_requests={self.min_requests}: must be from 1 to max_requests={self.max_requests}"
            )
        if not 0 < self.step < 1:
            raise ConfigError(f"step={self.step}: must be between 0 and 1")


class Requests:
    """The requests that every rate and candidate is tested with, at one request per second.

    Longer than any single run needs; each run takes a prefix.
    """

    __slots__ = ("inputs", "max_tokens", "mean_input", "mean_output", "mean_square", "outputs", "times")

    def __init__(self, trace: Trace) -> None:
        """trace: at any rate. Clients allow what each request will generate, see `allowing`."""
        gaps = trace.at_rate(1.0).arrival_s if len(trace) > 1 else trace.arrival_s
        self.times = np.asarray(gaps, np.float64)
        self.inputs: list[int] = trace.input_tokens.tolist()
        self.outputs: list[int] = trace.output_tokens.tolist()
        self.max_tokens = self.outputs
        self.mean_input = float(trace.input_tokens.mean())
        self.mean_output = float(trace.output_tokens.mean())
        self.mean_square = float((trace.input_tokens.astype(float) ** 2).mean())

    def __len__(self) -> int:
        return len(self.inputs)

    def allowing(self, max_tokens: int | None) -> Requests:
        """The same requests, whose clients allow `max_tokens` (None: what each will generate)."""
        if max_tokens is None:
            return self
        other = copy(self)
        other.max_tokens = [max(output, max_tokens) for output in self.outputs]
        return other

    def simulation(self, system: SystemSpec, rate: float, count: int) -> Simulation:
        """The first `count` requests at `rate` per second."""
        times = (self.times[:count] / rate).tolist()
        return Simulation(system, times, self.inputs[:count], self.outputs[:count], self.max_tokens[:count])


@dataclass(frozen=True)
class Verdict:
    """Whether a system meets the objectives at a rate (requests per second, all devices together)."""

    rate: float
    meets: bool
    attainment: Attainment


@dataclass(frozen=True)
class Goodput:
    """Highest rate that meets the objectives, and the first that does not.

    rate: requests per second of the whole system, 0 if none; `at`: there; `above`: at the next rate of the
    grid. `lone`: without any load, the best that this system can reach.
    """

    rate: float
    at: Attainment | None
    above: Attainment | None
    lone: Attainment | None = None
    probes: int = 0


def probe(system: SystemSpec, requests: Requests, rate: float, slo: Slo, precision: Precision) -> Verdict:
    """Simulates `rate` until the verdict is clear."""
    warm_up = warm_up_requests(requests, rate, slo)
    most = most_requests(requests, warm_up, precision)
    if most < min(precision.min_requests, precision.chunk):
        raise ConfigError(
            f"requests={len(requests)}: too few for {rate:.3g} requests/s; about "
            f"{2 * warm_up + precision.min_requests} are needed"
        )
    run = requests.simulation(system, rate, 2 * warm_up + most)
    done = 0
    while True:
        done = min(most, done + (precision.chunk if done else min(precision.min_requests, most)))
        run.run(warm_up + done)
        seen = attainment(run.outcome(warm_up, warm_up + done), slo, precision.z)
        if seen.high < slo.attainment:
            return Verdict(rate, False, seen)
        if done < most and (precision.patient or seen.low < slo.attainment):
            continue
        # a queue that still grows shows in the later half first
        later = attainment(run.outcome(warm_up + done // 2, warm_up + done), slo, precision.z)
        if done == most:
            return Verdict(rate, min(seen.both, later.both) >= slo.attainment, seen)
        if later.low >= slo.attainment:
            return Verdict(rate, True, seen)


def warm_up_requests(requests: Requests, rate: float, slo: Slo) -> int:
    """Requests before (and again after) the measured ones: two stays in a system at its objectives.

    At most a third of the requests there are: those of objectives without end (offline use), or of rates far
    above what a trace of this length is for.
    """
    stay_s = slo.ttft_s + requests.mean_output * slo.tpot_s
    return int(min(max(50.0, 2 * rate * stay_s), len(requests) / 3))


def most_requests(requests: Requests, warm_up: int, precision: Precision) -> int:
    """How many are measured at most: `max_requests`, or what arrives in one stay, which fills the system."""
    return min(max(precision.max_requests, warm_up // 2), len(requests) - 2 * warm_up)


def lone(system: SystemSpec, requests: Requests, slo: Slo) -> Attainment:
    """Attainment when every request has the system to itself."""
    count = min(LONE_REQUESTS, len(requests))
    times = [LONE_GAP_S * i for i in range(count)]
    run = Simulation(
        system, times, requests.inputs[:count], requests.outputs[:count], requests.max_tokens[:count]
    )
    run.run()
    return attainment(run.outcome(), slo)


def goodput(
    system: SystemSpec,
    requests: Requests,
    slo: Slo,
    precision: Precision,
    *,
    devices: int,
    ceiling: float,
    floor: float = 0.0,
    first_step: int = 16,
) -> Goodput:
    """Bisects on a fixed grid of rates per device, so that the result does not depend on the bracket.

    ceiling: an optimistic bound on the rate. floor: a rate per device that must be met to be of interest;
    if it is not, the result has rate 0 and `above` says how it missed. first_step: how far below the ceiling
    the result is expected, in points of the grid; the search goes down from there by doubling steps.
    """
    probes = 0

    def test(exponent: int) -> Verdict:
        nonlocal probes
        probes += 1
        return probe(system, requests, devices * grid_rate(exponent, precision), slo, precision)

    at: Attainment | None = None
    if floor > 0:
        low = grid_exponent(floor, precision)
        first = test(low)
        if not first.meets:
            return Goodput(0.0, None, first.attainment, None, probes)
        at = first.attainment
    else:
        alone = lone(system, requests, slo)
        if alone.both < slo.attainment:
            return Goodput(0.0, None, None, alone, probes)
        low = None
    high = grid_exponent(ceiling / devices, precision) + 1
    return _bisect(test, low, at, high, precision, devices, first_step, lambda: probes)


def _bisect(
    test: Callable[[int], Verdict],
    low: int | None,
    at: Attainment | None,
    high: int,
    precision: Precision,
    devices: int,
    step: int,
    probes: Callable[[], int],
) -> Goodput:
    above: Attainment | None = None
    limit = high + round(math.log(2) / math.log1p(precision.step))
    while low is None or high - low > 1:
        # go down until a rate is met, then bisect
        middle = (low + high) // 2 if low is not None else high - step
        if low is None:
            step *= 2
        verdict = test(middle)
        if verdict.meets:
            low, at = middle, verdict.attainment
            if above is None and high - low <= 1 and high < limit:
                high += step  # the bound was met: it was not one
        else:
            high, above = middle, verdict.attainment
            if low is None and grid_rate(middle, precision) * devices < 1e-6:
                return Goodput(0.0, None, above, None, probes())
    return Goodput(devices * grid_rate(low, precision), at, above, None, probes())


def grid_rate(exponent: int, precision: Precision) -> float:
    """Rate per device at a point of the grid."""
    return float((1 + precision.step) ** exponent)


def grid_exponent(rate: float, precision: Precision) -> int:
    """The highest point of the grid that is not above `rate`."""
    return math.floor(math.log(rate) / math.log1p(precision.step) + 1e-9)
