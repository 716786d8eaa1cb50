"""The watch over simulated days: steady at a steady load, ahead of a sine, roles changed with the mix."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from distserve_planner.cluster import Cluster
from distserve_planner.devices.catalog import device_spec, latency_model
from distserve_planner.goodput import Requests
from distserve_planner.search.deployment import Deployment
from distserve_planner.search.problem import Problem
from distserve_planner.slo import Slo
from distserve_planner.watch.choose import fewest_devices
from distserve_planner.watch.compare import smallest
from distserve_planner.watch.decision import SwitchRule
from distserve_planner.watch.drift import DriftRule
from distserve_planner.watch.policies import Watching
from distserve_planner.watch.replay import Rates, Result, SteadyStates, run_policy
from distserve_planner.watch.watcher import Watcher
from distserve_planner.workload.named import named_workload

MIXES = ("longbench", "sharegpt")
STEP_S = 30.0
SWITCH = SwitchRule(load_s=20.0)


def problem(devices: int = 16) -> Problem:
    spec = device_spec("a100-80g")
    cluster = Cluster.uniform(
        -(-devices // 8), min(8, devices), device="a100-80g", device_memory_bytes=spec.memory_bytes,
        intra=spec.intra, inter=spec.intra,
    )  # fmt: skip
    requests = Requests(named_workload("sharegpt").resample(0, 1.0, 1000))
    return Problem(
        latency_model("a100-80g", "opt-13b", None), cluster, requests, Slo(1.0, 0.1), families=("high",)
    )


@pytest.fixture(scope="module")
def states() -> SteadyStates:
    """Simulations that the tests of this module share."""
    return SteadyStates(problem(), [named_workload(name) for name in MIXES])


def rates_of(values: NDArray[np.float64]) -> Rates:
    return Rates(STEP_S * np.arange(len(values)), values.astype(float), STEP_S)


def watched(states: SteadyStates, rates: Rates, mix: int, begin: Deployment, elastic: bool = True) -> Result:
    watcher = Watcher(
        states.search(mix).problem, begin, DriftRule(window_s=STEP_S), SWITCH, elastic, plan=states.plan
    )
    return run_policy(Watching(watcher), rates, [mix] * len(rates.rate_rps), states)


def planned(states: SteadyStates, mix: int, rate: float) -> Deployment:
    search = states.search(mix)
    found = fewest_devices(search, smallest(search.problem), rate)
    assert found is not None
    assert found.meets
    return found.deployment


@pytest.mark.parametrize("rate", [3.0, 10.0])
def test_a_steady_load_changes_nothing_after_it_was_planned_for(states: SteadyStates, rate: float) -> None:
    """Six hours; the plan is the one for the rate, where a reduction would be nearest."""
    steady = rates_of(np.full(720, rate))
    result = watched(states, steady, 1, planned(states, 1, rate * 1.1))
    assert result.changes == 0
    assert result.below(0.9) == 0


def test_a_plan_that_is_too_large_shrinks_once(states: SteadyStates) -> None:
    """A fall from 12 to 2 requests/s is followed down in at most two changes, and then there is rest."""
    values = np.concatenate([np.full(80, 12.0), np.full(400, 2.0)])
    result = watched(states, rates_of(values), 1, planned(states, 1, 12.0 * 1.1))
    assert 1 <= result.changes <= 2
    assert not any(step.changed for step in result.steps[-300:])
    assert result.steps[-1].devices < result.steps[0].devices
    assert result.below(0.9) == 0


def test_a_sine_from_1_to_24_is_followed_before_ttft_breaks(states: SteadyStates) -> None:
    """One hour up and down, twice."""
    count = int(7200 / STEP_S)
    values = 12.5 - 11.5 * np.cos(2 * np.pi * np.arange(count) * STEP_S / 3600)
    result = watched(states, rates_of(values), 1, planned(states, 1, 2.0))
    devices = np.array([step.devices for step in result.steps])
    assert min(step.attainment for step in result.steps) >= 0.9  # not one window is late
    assert devices.max() >= 6
    assert devices[count // 2 - 5 : count // 2 + 5].min() <= 3  # given back in the valley
    peak = planned(states, 1, 24.0).devices
    assert devices.mean() < 0.85 * peak
