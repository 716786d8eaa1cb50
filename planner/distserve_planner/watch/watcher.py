"""The watch itself: takes requests as they end, and says window by window what should be done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import numpy as np

from distserve_planner.search.deployment import Deployment
from distserve_planner.search.problem import Problem
from distserve_planner.watch.choose import (
    Choice,
    Search,
    best_on_devices,
    fewest_devices,
    recent_problem,
    simulated,
)
from distserve_planner.watch.decision import Comparison, Decision, SwitchRule, decide, switch_cost
from distserve_planner.watch.drift import LENGTH_TESTS, DriftRule, Evidence, drift
from distserve_planner.watch.history import History, Profile, profile
from distserve_planner.workload.trace import Trace

Plan = Callable[[Trace], Search]
"""From the latest requests to what is searched for them."""

_FEWEST = 200  # requests to plan from, if there are as many of one kind
_TREND_WINDOWS = 5
_TREND_Z = 2.0
_FOLLOW_WINDOWS = 20  # after an alarm or a change the rate is followed for so long without an alarm


@dataclass(frozen=True)
class Advice:
    """What the watch found at a moment: why it looked, what it compared, what it decided.

    rate_rps: expected until a change would be in force. Attainments are of the simulation on the latest
    requests, at the rate with the head room that the decision asks for.
    """

    at_s: float
    evidence: tuple[Evidence, ...]
    before: Profile
    latest: Profile
    rate_rps: float
    present: Deployment
    wanted: Deployment
    comparison: Comparison
    decision: Decision
    tried: int

    @property
    def change(self) -> bool:
        return self.decision.change


class Watcher:
    """Watches one server.

    problem: with the objectives and the cluster; its requests are replaced by the latest. present: what
    serves. elastic: the number of devices may change; otherwise the present ones are used in the best way.
    """

    def __init__(
        self,
        problem: Problem,
        present: Deployment,
        drift_rule: DriftRule,
        switch_rule: SwitchRule,
        elastic: bool,
        start_s: float = 0.0,
        plan: Plan | None = None,
    ) -> None:
        self.problem, self.present = problem, present
        self._drift, self._switch, self._elastic = drift_rule, switch_rule, elastic
        self._plan = plan or self._fitted
        self._history = History.empty()
        self._reference_s = start_s  # where the reference period begins
        self._changed_s = start_s
        self._follow_until_s = start_s
        self._retry_s: float | None = None
        self._planned_rps: float | None = None

    def observe(self, requests: History) -> None:
        """Requests that have ended since the last call."""
        self._history = self._history.followed_by(requests)

    def look(self, now_s: float) -> Advice | None:
        """To be called at the end of each window; None: nothing to say. After a change call `changed`."""
        rule = self._drift
        self._trim(now_s)
        evidence = drift(self._history, (self._reference_s, self._reference_end_s), now_s, rule)
        if evidence:
            self._follow_until_s = now_s + _FOLLOW_WINDOWS * rule.window_s
        elif not self._due(now_s):
            return None
        latest_s = self._latest_s(evidence, now_s)
        if not len(self._history.between(now_s - latest_s, now_s).served):
            return None
        advice = self._advise(tuple(evidence), now_s, latest_s)
        self._retry_s = None if advice.decision.retry_s is None else now_s + advice.decision.retry_s
        if evidence and not advice.change:
            self._retry_s = now_s + rule.window_s  # the mix may have turned within the latest window
        self._planned_rps = advice.rate_rps
        if evidence:
            self._reference_s = max(self._reference_s, now_s - min(e.latest_s for e in evidence))
        return advice

    def changed(self, present: Deployment, now_s: float) -> None:
        """Another placement is in force: queues have another length now, so a new reference begins.

        It is short at first and the tests weak, so what made the change necessary is followed meanwhile.
        """
        self.present = present
        self._changed_s = self._reference_s = now_s
        self._follow_until_s = now_s + _FOLLOW_WINDOWS * self._drift.window_s

    def failed(self, now_s: float) -> None:
        """What was advised could not be carried out; it is looked at again after the time to settle."""
        self._retry_s = now_s + self._switch.settle_s

    def _due(self, now_s: float) -> bool:
        """Without an alarm: something that had to wait, or a rate that goes on changing after one."""
        if self._retry_s is not None and now_s >= self._retry_s:
            return True
        if now_s > self._follow_until_s or self._planned_rps is None:
            return False
        expected = self._expected_rps(now_s)
        return abs(expected / self._planned_rps - 1) > self._switch.headroom_up / 2

    def _trim(self, now_s: float) -> None:
        """Keeps the reference period and what "latest" may mean."""
        latest_s = now_s - max(*self._drift.scales, _TREND_WINDOWS) * self._drift.window_s
        end_s = min(self._reference_end_s, latest_s)
        reference = self._history.between(self._reference_s, end_s)
        self._history = reference.followed_by(self._history.between(latest_s, float("inf")))

    @property
    def _reference_end_s(self) -> float:
        return self._reference_s + self._drift.reference * self._drift.window_s

    def _latest_s(self, evidence: list[Evidence], now_s: float) -> float:
        """The shortest period that drifted; longer for enough requests to plan from, but not with such as are
        of another kind: those before lengths drifted, or before the last change."""
        window_s, drifted = self._drift.window_s, [e.latest_s for e in evidence if e.test in LENGTH_TESTS]
        if drifted:
            return min(drifted)
        windows = round(min((e.latest_s for e in evidence), default=window_s) / window_s)
        most = min(max(self._drift.scales), int((now_s - self._reference_s) / window_s))
        while windows < most and len(self._history.between(now_s - windows * window_s, now_s)) < _FEWEST:
            windows += 1
        return windows * window_s

    def _expected_rps(self, now_s: float) -> float:
        """The rate until a change would be in force: never below the mean or the last window, above if it
        clearly rises."""
        window_s = self._drift.window_s
        edges = now_s - window_s * np.arange(_TREND_WINDOWS, -1, -1)
        rates = np.histogram(self._history.arrival_s, edges)[0] / window_s
        x = np.arange(_TREND_WINDOWS) - (_TREND_WINDOWS - 1) / 2
        slope = float(x @ rates / (x @ x))
        left = rates - rates.mean() - slope * x
        error = sqrt(max(float(left @ left) / (_TREND_WINDOWS - 2), rates.mean() / window_s) / float(x @ x))
        ahead = (self._switch.load_s + window_s) / window_s + (_TREND_WINDOWS - 1) / 2
        forecast = float(rates.mean()) + slope * ahead if slope > _TREND_Z * error else 0.0
        return max(float(rates.mean()), float(rates[-1]), forecast, 1e-6)

    def _before(self, latest_s: float) -> Profile:
        end_s = min(self._reference_end_s, latest_s)
        return profile(self._history, self._reference_s, max(self._reference_s + 1.0, end_s))

    def _fitted(self, recent: Trace) -> Search:
        problem = recent_problem(self.problem, recent)
        return Search(problem, simulated(problem))

    def _advise(self, evidence: tuple[Evidence, ...], now_s: float, latest_s: float) -> Advice:
        recent = self._history.between(now_s - latest_s, now_s)
        search = self._plan(recent.trace())
        problem, run = search.problem, search.run
        rate, rule = self._expected_rps(now_s), self._switch
        up, down = rate * (1 + rule.headroom_up), rate * (1 + rule.headroom_down)
        now = run(self.present, up)
        choice: Choice | None = None
        if not now.meets:
            find = fewest_devices if self._elastic else best_on_devices
            choice = find(search, self.present, up)
        elif self._elastic and self.present.devices > 1:
            choice = fewest_devices(search, self.present, down, self.present.devices - 1)
        wanted = choice.deployment if choice is not None else self.present
        switch = switch_cost(self.present, wanted, problem.cluster.num_devices, rule)
        at = run(wanted, up).attainment.both
        smaller = wanted.devices < self.present.devices
        # a verdict allows for the interval of a short simulation, and so must the comparison
        held = max(now.attainment.both, problem.slo.attainment) if now.meets else now.attainment.both
        seen = Comparison(
            problem.slo.attainment,
            held,
            at,
            run(switch.during, rate).attainment.both if switch.during is not None else now.attainment.both,
            self.present.devices,
            wanted.devices,
            switch,
            now_s - self._changed_s,
            run(wanted, down).attainment.both if smaller else None,
        )
        return Advice(
            now_s,
            evidence,
            self._before(now_s - latest_s),
            profile(self._history, now_s - latest_s, now_s),
            rate,
            self.present,
            wanted,
            seen,
            decide(seen, rule),
            choice.tried if choice is not None else 0,
        )
