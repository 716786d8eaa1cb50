"""A static plan, an autoscaler and the watch over the same table of rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from distserve.core.parsing import ConfigError
from distserve.core.shapes import Shape
from distserve_planner.search.candidates import shapes
from distserve_planner.search.deployment import Deployment, Group
from distserve_planner.search.problem import Problem
from distserve_planner.watch.choose import Choice, fewest_devices
from distserve_planner.watch.decision import SwitchRule
from distserve_planner.watch.drift import DriftRule
from distserve_planner.watch.policies import Autoscaler, Policy, Static, Watching, times
from distserve_planner.watch.replay import GRID, Rates, Result, SteadyStates, run_policy
from distserve_planner.watch.watcher import Watcher

_MOST_STEPS = 200
_STABLE_S = 300.0  # stabilisation of autoscalers before they give something back


def compare(
    states: SteadyStates, rates: Rates, mix_of: Sequence[int], drift: DriftRule, switch: SwitchRule
) -> list[Result]:
    """Each policy over the whole table: the plan for the peak, an autoscaler set up for each mix, and
    the watch, which begins with the plan for the first mix and rate.

    Raises `ConfigError` if the cluster cannot bear the peak.
    """
    peak, first = float(rates.rate_rps.max()), float(rates.rate_rps[0]) * (1 + switch.headroom_up)
    mixes = list(dict.fromkeys(mix_of))
    begin = _planned(states, mixes[0], first).deployment
    problem = states.search(mixes[0]).problem
    # the replay's window is its step, and a day has few of them
    rule = replace(drift, window_s=rates.step_s, reference=12, scales=(1, 2, 4))
    policies: list[Policy] = [
        Static(_for_the_peak(states, mixes, peak)),
        *(_autoscaler(states, mix, first, switch, rates.step_s) for mix in mixes),
        Watching(Watcher(problem, begin, rule, switch, True, float(rates.start_s[0]), states.plan)),
    ]
    return [run_policy(policy, rates, mix_of, states) for policy in policies]


def _planned(states: SteadyStates, mix: int, rate: float) -> Choice:
    search = states.search(mix)
    problem = search.problem
    choice = fewest_devices(search, smallest(problem), rate)
    if choice is None or not choice.meets:
        raise ConfigError(
            f"rate={rate:.3g}: {problem.cluster.num_devices} devices cannot bear it; add some or scale the "
            "rates down (--peak-rate)"
        )
    return choice


def _autoscaler(states: SteadyStates, mix: int, rate: float, switch: SwitchRule, step_s: float) -> Autoscaler:
    """Copies of what was planned for a mix."""
    begin = _planned(states, mix, rate).deployment
    unit = _unit(begin)
    return Autoscaler(
        unit,
        _capacity(states, mix, unit),
        count=max(1, begin.devices // unit.devices),
        most=states.search(mix).problem.cluster.num_devices // unit.devices,
        load_s=switch.load_s,
        hold_steps=max(2, ceil(_STABLE_S / step_s)),
        name=f"autoscaler on averages, set up for {states.names[mix]}",
    )


def smallest(problem: Problem) -> Deployment:
    """One instance of each phase with the fewest devices that hold the model: where a search begins."""
    least = min(shapes(problem).fitting, key=lambda shape: (shape.ranks, shape.pp))
    return Deployment("high", Group(Shape(least.tp, least.pp)), Group(Shape(least.tp, least.pp)))


def _for_the_peak(states: SteadyStates, mixes: Sequence[int], peak: float) -> Deployment:
    """The plan of the hardest mix, enlarged until it meets the peak of each."""
    plans = [_planned(states, mix, peak).deployment for mix in mixes]
    deployment = max(plans, key=lambda d: d.devices)
    for _ in range(_MOST_STEPS):
        verdicts = [states.at(mix, deployment, peak).verdict for mix in mixes]
        worst = min(verdicts, key=lambda v: v.attainment.both)
        if all(v.meets for v in verdicts):
            return deployment
        if deployment.prefill is None or deployment.decode is None:
            deployment = deployment.with_units(deployment.units + 1)
        else:
            first = worst.attainment.missed(states.search(mixes[0]).problem.slo) == "TTFT"
            n, m = deployment.prefill.count, deployment.decode.count
            deployment = deployment.with_counts(n + first, m + (not first))
        if deployment.devices > states.search(mixes[0]).problem.cluster.num_devices:
            break
    raise ConfigError(f"rate={peak:.3g}: no placement of this cluster meets it under every mix")


def _unit(deployment: Deployment) -> Deployment:
    """The ratio that was planned, in the smallest numbers."""
    if deployment.prefill is None or deployment.decode is None:
        return deployment.with_units(1)
    n, m = deployment.prefill.count, deployment.decode.count
    small = min(n, m)
    return deployment.with_counts(max(1, round(n / small)), max(1, round(m / small)))


def _capacity(states: SteadyStates, mix: int, unit: Deployment) -> float:
    """Goodput of a unit under the mix that it was planned for, on the grid."""
    rate = 0.1
    while states.at(mix, times(unit, 1), rate * (1 + GRID)).verdict.meets:
        rate *= 1 + GRID
    return rate
