"""Drift tests: their level on stationary load, bursty too, and how soon they see a change."""

from __future__ import annotations

import numpy as np
import pytest

from distserve.core.parsing import ConfigError
from distserve_planner.watch.drift import DAY_S, TESTS, DriftRule, Evidence, drift, ks_p, rate_p
from distserve_planner.watch.history import History

WINDOW_S = 60.0


def requests(
    rng: np.random.Generator,
    rate: float,
    start_s: float,
    end_s: float,
    cv: float = 1.0,
    lengths: tuple[float, float] = (6.0, 5.0),
    queue_s: float = 0.05,
    coupled: float = 0.0,
) -> History:
    """Gamma gaps, lognormal lengths (of logarithms with correlation `coupled`), exponential queueing."""
    shape = 1 / cv**2
    count = int(1.5 * rate * (end_s - start_s) + 100 * cv**2)
    arrival = start_s + np.cumsum(rng.gamma(shape, 1 / (shape * rate), count))
    arrival = arrival[arrival < end_s]
    one, other = rng.standard_normal((2, len(arrival)))
    other = coupled * one + np.sqrt(1 - coupled**2) * other
    return History(
        arrival,
        1 + np.exp(lengths[0] + one).astype(np.int64),
        1 + np.exp(lengths[1] + other).astype(np.int64),
        rng.exponential(queue_s, len(arrival)),
        np.ones(len(arrival)),
    )


@pytest.mark.parametrize(("rate", "cv"), [(5.0, 1.0), (5.0, 3.0), (0.5, 2.0)])
def test_false_alarms_stay_below_the_stated_number(rate: float, cv: float) -> None:
    """At a rule loose enough to measure: 72 expected alarms a day are 5 % of the evaluations."""
    rule = DriftRule(false_alarms_per_day=72.0, window_s=WINDOW_S, scales=(1, 5))
    share = rule.false_alarms_per_day * WINDOW_S / DAY_S
    assert rule.level * len(TESTS) * len(rule.scales) == pytest.approx(share)
    rng, trials = np.random.default_rng(1), 150
    alarms = 0
    for _ in range(trials):
        history = requests(rng, rate, 0.0, 35 * WINDOW_S, cv)
        alarms += bool(drift(history, (0.0, 30 * WINDOW_S), 35 * WINDOW_S, rule))
    assert alarms <= trials * share + 3 * np.sqrt(trials * share)


def test_bursts_are_not_taken_for_a_change_of_rate_but_poisson_would() -> None:
    """Counts of gamma gaps with CV 4: a test of Poisson counts alone rejects far too often."""
    rng = np.random.default_rng(2)
    found = []
    for _ in range(120):
        counts = np.histogram(requests(rng, 5.0, 0.0, 1800.0, 4.0).arrival_s, np.arange(0.0, 1801.0, 15.0))[0]
        found.append(rate_p(counts[:100].astype(float), counts[100:].astype(float)))
    assert np.mean(np.array(found) < 0.05) < 0.12
    spread = [c.var() / c.mean() for c in (counts,)]
    assert spread[0] > 4  # what Poisson counts would have 1 of


def test_rate_p_is_the_binomial_one_on_even_counts() -> None:
    assert rate_p([10.0] * 10, [10.0] * 10) == 1.0
    assert rate_p([0.0] * 4, [0.0] * 4) == 1.0
    assert rate_p([10.0] * 40, [20.0] * 4) < 1e-4
    assert rate_p([10.0] * 40, [11.0] * 4) > 0.3


def alarm_after(history: History, change_s: float, rule: DriftRule, until: int) -> tuple[int, list[Evidence]]:
    """Windows from the change to the first alarm."""
    for window in range(1, until + 1):
        now_s = change_s + window * rule.window_s
        evidence = drift(history, (0.0, change_s), now_s, rule)
        if evidence:
            return window, evidence
    pytest.fail(f"no alarm within {until} windows")


@pytest.mark.parametrize(
    ("after", "test", "within"),
    [
        ({"lengths": (7.0, 5.0)}, "input length", 1),
        ({"lengths": (6.0, 6.0)}, "output length", 1),
        ({"coupled": 0.9}, "output / input", 2),  # both marginals as before
        ({"rate": 10.0}, "rate", 1),
        ({"rate": 6.5}, "rate", 6),
        ({"queue_s": 0.5}, "queueing delay", 5),
    ],
)
def test_a_change_is_seen_within_windows(after: dict[str, object], test: str, within: int) -> None:
    """At the default: one false alarm in twenty days."""
    rng, rule, change_s = np.random.default_rng(3), DriftRule(window_s=WINDOW_S), 30 * WINDOW_S
    before = requests(rng, 5.0, 0.0, change_s)
    values = {"rate": 5.0, **after}
    later = requests(rng, start_s=change_s, end_s=change_s + 10 * WINDOW_S, **values)  # type: ignore[arg-type]
    assert drift(before, (0.0, 20 * WINDOW_S), change_s, rule) == []
    window, evidence = alarm_after(before.followed_by(later), change_s, rule, 10)
    assert window <= within
    assert test in {item.test for item in evidence}
    assert all(item.p < item.level for item in evidence)


def test_a_shorter_queue_is_no_alarm() -> None:
    rng, rule = np.random.default_rng(4), DriftRule(window_s=WINDOW_S)
    before = requests(rng, 5.0, 0.0, 1800.0, queue_s=0.5)
    history = before.followed_by(requests(rng, 5.0, 1800.0, 2400.0, queue_s=0.001))
    assert drift(history, (0.0, 1800.0), 2400.0, rule) == []


def test_equal_samples_do_not_differ_and_large_ones_are_thinned() -> None:
    values = np.arange(50_000)
    assert ks_p(values, values) == pytest.approx(1.0)
    assert ks_p(values, values + 10_000) < 1e-9


def test_rules_name_what_is_wrong() -> None:
    with pytest.raises(ConfigError, match="window_s=0"):
        DriftRule(window_s=0.0)
    with pytest.raises(ConfigError, match="scales"):
        DriftRule(scales=())
