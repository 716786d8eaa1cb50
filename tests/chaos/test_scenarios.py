"""The scenarios of `distserve chaos`: no request is lost and nothing is left, whatever breaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from distserve_tools.chaos.deployment import PARALLEL, Deployment, deployed
from distserve_tools.chaos.outcome import Outcome
from distserve_tools.chaos.scenarios import STORM_REQUESTS, scenarios

SEED = 5
FEW = 300


def run(name: str, deployment: Deployment, seed: int = SEED, requests: int = FEW) -> Outcome:
    scenario = scenarios(requests)[name]
    assert scenario.run is not None
    outcome = scenario.run(deployment, seed)
    assert outcome.ok, outcome.to_json()
    return outcome


def test_a_killed_decode_engine(two_of_each: Deployment) -> None:
    counts = run("kill-decode-engine", two_of_each).counts
    assert counts["continued"] > 0
    assert counts["refused"] == 0  # the other instances could take everything


def test_bad_handles(two_of_each: Deployment) -> None:
    counts = run("bad-handles", two_of_each).counts
    assert counts["finished"] == 3  # the good ones
    assert counts["refused"] > 45


def test_a_cancel_storm(two_of_each: Deployment) -> None:
    counts = run("cancel-storm", two_of_each).counts
    assert counts["cancelled"] > FEW / 2
    assert counts["finished"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "name",
    [
        "kill-prefill-engine",
        "kill-decode-engine",
        "stop-prefill-engine",
        "stop-decode-engine",
        "kill-prefill-stub",
        "kill-decode-stub",
    ],
)
def test_no_request_is_refused_while_another_instance_lives(
    two_of_each: Deployment, name: str, seed: int
) -> None:
    assert run(name, two_of_each, seed).counts["refused"] == 0


@pytest.mark.slow
def test_kv_of_a_dead_and_of_a_slow_decode_instance(two_of_each: Deployment) -> None:
    counts = run("abandoned-kv", two_of_each).counts
    assert (counts["refused"], counts["finished"]) == (1, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_orchestrator_stub(two_of_each: Deployment) -> None:
    """Its streams are ended by their clients' deadline; the next requests are served again."""
    run("kill-orchestrator-stub", two_of_each)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_rank(tmp_path: Path) -> None:
    with deployed(tmp_path, PARALLEL) as deployment:
        assert run("kill-rank", deployment).counts["refused"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_tritonserver(two_of_each: Deployment) -> None:
    """Its streams get their error at once; the next requests are served again, at the same address."""
    counts = run("kill-tritonserver", two_of_each).counts
    assert counts["refused"] > 0
    assert counts["refused"] + counts["finished"] == counts.total()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["kv-pressure", "long-output", "long-prompt"])
def test_requests_that_are_large_for_the_deployment(tmp_path: Path, name: str) -> None:
    with deployed(tmp_path, scenarios()[name].setting) as deployment:
        run(name, deployment)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_minutes_of_overload(tmp_path: Path) -> None:
    with deployed(tmp_path, scenarios()["overload"].setting) as deployment:
        counts = run("overload", deployment).counts
    assert counts["refused"] > counts["finished"] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_storm(two_of_each: Deployment) -> None:
    assert run("cancel-storm", two_of_each, requests=STORM_REQUESTS).counts.total() >= STORM_REQUESTS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sigterm_with_streams_in_flight(tmp_path: Path) -> None:
    alone = scenarios()["terminate"].alone
    assert alone is not None
    outcome = alone(tmp_path, SEED)
    assert outcome.ok, outcome.to_json()
    assert outcome.counts["finished"] > 0
