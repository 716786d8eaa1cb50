"""Instances that come in any order, a first request that comes before them, and one after long idleness."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import tritonclient.grpc as triton
from serving import Deployment, deployed, greedy_mismatches

from distserve_tools.model_control import GRPC_KEY_HEADER
from model_zoo import Zoo, prompt

GREEDY = {"temperature": 0.0, "ignore_eos": True}
NAMES = ("orchestrator", "prefill_0", "decode_0")
ORDERS = [
    pytest.param(order, marks=() if order[1] == "orchestrator" else pytest.mark.slow)
    for order in itertools.permutations(NAMES)
]
PATIENCE_S = 120.0  # the machine may be slow to load


@pytest.fixture(scope="module")
def patient(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Requests wait for instances as long as it takes."""
    orchestrator = {"heartbeat_s": 0.2, "unavailable_after_s": PATIENCE_S}
    with deployed(tmp_path_factory.mktemp("order"), zoo("llama"), orchestrator=orchestrator) as deployment:
        yield deployment


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_a_first_request_waits_for_what_is_not_there_yet(patient: Deployment, order: tuple[str, ...]) -> None:
    """The first one is sent when the orchestrator is loaded, whatever else is."""
    server = patient.server
    headers = {GRPC_KEY_HEADER: server.access.operator_key}
    with triton.InferenceServerClient(server.grpc_url) as control, ThreadPoolExecutor(1) as pool:
        for name in NAMES:
            control.unload_model(name, headers=headers, client_timeout=PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while any(control.is_model_ready(name) for name in NAMES):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        answer = None
        for name in order:
            control.load_model(name, headers=headers, client_timeout=PATIENCE_S)
            if name == "orchestrator":
                answer = pool.submit(
                    patient.client.complete, prompt(20), timeout_s=PATIENCE_S, max_tokens=20, **GREEDY
                )
        assert answer is not None
        assert greedy_mismatches(patient.model, prompt(20), answer.result().token_ids) == []
    patient.wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_request_after_ten_idle_minutes(patient: Deployment) -> None:
    expected = patient.client.complete(prompt(40), max_tokens=40, **GREEDY).token_ids
    patient.wait_idle()
    time.sleep(600.0)
    answer = patient.client.complete(prompt(40), timeout_s=60, max_tokens=40, **GREEDY)
    assert answer.token_ids == expected
    assert answer.stage_times["recoveries"] == 0
    patient.wait_idle()
