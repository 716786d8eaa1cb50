"""Whatever a client sends, the server lives, answers each request exactly once and says what is wrong."""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest
from fuzzing import check_grpc, check_http, grpc_requests, http_bodies, open_stub
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy
from serving import Deployment, greedy_mismatches

from distserve_tools.processes import ProcessId, descendants
from model_zoo import prompt

PER_ROUND = 40
PATHS = ("generate", "generate_stream")


def fuzz(strategy: SearchStrategy[Any], check: Callable[[Any], None], first_seed: int, seconds: float) -> int:
    """Rounds of examples until the time is up; every round has its own seed. Returns how many there were."""
    examples, round_seed, end = 0, first_seed, time.monotonic() + seconds

    while time.monotonic() < end:

        @seed(round_seed)
        @settings(
            max_examples=PER_ROUND,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def run_round(example: Any) -> None:
            nonlocal examples
            examples += 1
            check(example)

        run_round()
        round_seed += 1
    return examples


def attack(deployment: Deployment, first_seed: int, seconds: float) -> int:
    """Both ends, then a look at the server: the same processes, the right text. Returns how much was sent."""
    before = processes(deployment)
    channel, stub = open_stub(deployment.server.grpc_url)
    with closing(channel):
        sent = fuzz(grpc_requests(), partial(check_grpc, stub), first_seed, 0.7 * seconds)
    for path in PATHS:
        check = partial(check_http, deployment.server.http_url, f"/v2/models/orchestrator/{path}")
        sent += fuzz(http_bodies(), check, first_seed, 0.15 * seconds)
    assert sent > 3 * seconds
    assert processes(deployment) == before
    deployment.wait_idle()
    answer = deployment.client.complete(prompt(20), max_tokens=24, temperature=0.0, ignore_eos=True)
    assert len(answer.token_ids) == 24
    assert greedy_mismatches(deployment.model, prompt(20), answer.token_ids) == []
    return sent


def processes(deployment: Deployment) -> set[ProcessId]:
    return {process for process in descendants(deployment.server.pid) if process.alive()}


def test_anything_a_client_may_send(
    deployment: Deployment, record_property: Callable[[str, object], None]
) -> None:
    record_property("requests", attack(deployment, 0, 30.0))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_anything_a_client_may_send_for_long(
    deployment: Deployment, record_property: Callable[[str, object], None]
) -> None:
    record_property("requests", attack(deployment, 1_000_000, 600.0))


def test_model_names_lead_nowhere_else(deployment: Deployment) -> None:
    """Neither endpoint takes a model's name for a path."""
    names = (
        "../orchestrator",
        "..%2f..%2fetc",
        "%2e%2e/orchestrator",
        "orchestrator%00",
        "/etc/passwd",
        "a" * 5000,
    )
    for name in names:
        for method, path in (("GET", f"/v2/models/{name}/config"), ("POST", f"/v2/models/{name}/generate")):
            connection = http.client.HTTPConnection(deployment.server.http_url, timeout=10)
            with closing(connection):
                connection.request(method, path, b"{}" if method == "POST" else None)
                response = connection.getresponse()
                text = response.read().decode(errors="replace")
            assert response.status in (400, 404, 405, 500), (name, text)
            assert "root:" not in text
