"""What a real server shows: metrics on Triton's endpoint, JSON logs, the request log; and serving alone."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import BLOCK_SIZE, Deployment, deployed, engine_pid

from distserve.serving.metric_families import FAMILIES
from distserve_planner.workload.readers import read_trace
from distserve_tools.client import RequestError
from model_zoo import CONTEXT, Zoo, prompt

GREEDY = {"temperature": 0.0, "ignore_eos": True}
LENGTH, OUTPUT, COUNT = 40, 8, 5
_SAMPLE = re.compile(r"^(distserve_\w+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def observed(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Path]]:
    """1 prefill + 1 decode instance that log JSON; either may serve alone."""
    folder = tmp_path_factory.mktemp("observed")
    orchestrator = {
        "heartbeat_s": 0.2,
        "stats_s": 0.2,
        "slo_ttft_s": 60.0,
        "slo_tpot_s": 60.0,
        "prefill_may_decode": True,
        "log_format": "json",
        "request_log": str(folder / "requests.jsonl"),
    }
    instances = [{"role": role, "log_format": "json"} for role in ("prefill", "decode")]
    with deployed(folder, zoo("llama"), instances, orchestrator=orchestrator) as deployment:
        yield deployment, folder


def scrape(deployment: Deployment) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Samples by name and labels; those that Triton adds to every metric are left out."""
    connection = http.client.HTTPConnection(deployment.server.metrics_url, timeout=10.0)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    samples = {}
    for name, labels, value in _SAMPLE.findall(text):
        pairs = re.findall(r'(\w+)="([^"]*)"', labels)
        samples[name, frozenset(pairs)] = float(value)
    return samples


def value(deployment: Deployment, name: str, **labels: str) -> float | None:
    return scrape(deployment).get((name, frozenset(labels.items())))


def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.1)


def wait_equal(look: Callable[[], object], expected: object, timeout_s: float = 20.0) -> None:
    """Looks until it sees `expected`; then fails with what it saw last."""
    end = time.monotonic() + timeout_s
    while (found := look()) != expected:
        if time.monotonic() > end:
            assert found == expected
        time.sleep(0.1)


def log_lines(folder: Path) -> list[dict[str, Any]]:
    """Whole lines: the last one may still be on its way."""
    lines = (folder / "tritonserver.log").read_text(errors="replace").split("\n")[:-1]
    return [json.loads(line) for line in lines if line.startswith('{"time"')]


def test_metrics_on_tritons_endpoint(observed: tuple[Deployment, Path]) -> None:
    deployment, _ = observed
    for i in range(COUNT):
        deployment.client.complete(prompt(LENGTH, seed=i), max_tokens=OUTPUT, **GREEDY)
    with pytest.raises(RequestError, match="INVALID_ARGUMENT"):
        deployment.client.complete([1] * 10_000, max_tokens=1)
    decode = {"instance": "decode_0", "role": "decode"}
    expected: dict[tuple[object, ...], float] = {
        ("distserve_requests_total", ("outcome", "length"), ("code", "OK")): COUNT,
        ("distserve_requests_total", ("outcome", "refused"), ("code", "INVALID_ARGUMENT")): 1,
        ("distserve_output_tokens_total",): COUNT * OUTPUT,
        ("distserve_prompt_tokens_total",): COUNT * LENGTH,
        ("distserve_ttft_seconds_count", ("instance", "prefill_0")): COUNT,
        ("distserve_transfer_seconds_count", ("instance", "decode_0")): COUNT,
        ("distserve_transfers_total", *decode.items(), ("outcome", "ok")): COUNT,
        ("distserve_slo_window_requests",): COUNT,
        ("distserve_slo_attainment", ("objective", "both")): 1.0,
        ("distserve_ready",): 1.0,
        ("distserve_hung_calls", ("instance", "decode_0"), ("role", "decode")): 0.0,
        ("distserve_engine_restarts_total", ("instance", "decode_0"), ("role", "decode")): 0.0,
    }
    blocks = -(-LENGTH // BLOCK_SIZE)
    moved = COUNT * blocks * BLOCK_SIZE * 2 * 3 * 64 * 4  # K and V of 3 layers, 64 wide, fp32
    expected[("distserve_transfer_bytes_total", *decode.items())] = moved
    # these tell of what has not happened
    silent = {"distserve_recoveries_total", "distserve_instance_errors_total"}

    def shown() -> tuple[object, object]:
        """Each sample comes by a way of its own, some with the next report of an instance."""
        samples = scrape(deployment)
        found = {key: samples.get((key[0], frozenset(key[1:]))) for key in expected}  # type: ignore[arg-type]
        return found, {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in samples}

    wait_equal(shown, (expected, set(FAMILIES) - silent))
    wire = value(deployment, "distserve_transfer_seconds_total", **decode, part="wire")
    assert wire is not None
    assert 0 < wire < 60


def test_json_logs_have_the_requests_id_at_every_station(observed: tuple[Deployment, Path]) -> None:
    deployment, folder = observed
    # a stop string: the length is open, so nothing says from the start that the end is out of reach
    open_end = {"max_tokens": CONTEXT - 20, "stop": ["never said"], **GREEDY}
    decode = engine_pid(deployment, "decode_0")
    os.kill(decode, signal.SIGSTOP)  # or on a busy machine it may be done before anybody looks at the clock
    try:
        with pytest.raises(RequestError, match=r"DEADLINE_EXCEEDED: no end .* s after its arrival"):
            deployment.client.complete(prompt(20), deadline=0.1, **open_end)
    finally:
        os.kill(decode, signal.SIGCONT)

    def late(*instances: str) -> list[dict[str, Any]]:
        found = [entry for entry in log_lines(folder) if entry.get("code") == "DEADLINE_EXCEEDED"]
        return [entry for entry in found if entry["instance"] in instances]

    # each process writes its line in its own time
    until(lambda: late("orchestrator_0_0"))
    assert {entry["instance"] for entry in log_lines(folder)} >= {"prefill_0", "decode_0"}
    (ours,) = {entry["request"] for entry in late("orchestrator_0_0")}
    assert all(entry["request"].split(".")[0] == ours for entry in late("prefill_0", "decode_0"))
    deployment.wait_idle()


def test_the_request_log_is_a_workload(observed: tuple[Deployment, Path]) -> None:
    deployment, folder = observed
    path = folder / "requests.jsonl"
    until(lambda: path.read_text().count("\n") >= COUNT + 3)
    trace = read_trace(path)
    assert list(trace.input_tokens) == [LENGTH] * COUNT
    assert list(trace.output_tokens) == [OUTPUT] * COUNT
    assert trace.rate_rps > 0
    outcomes = [json.loads(line).get("error", "") for line in path.read_text().splitlines()]
    assert any(error.startswith("INVALID_ARGUMENT") for error in outcomes)
    deployment.wait_idle()


@pytest.mark.parametrize("lost", ["prefill_0", "decode_0"])
def test_one_instance_serves_alone(observed: tuple[Deployment, Path], lost: str) -> None:
    """Tokens are the same; when the other one is back, it is used again."""
    deployment, _ = observed
    left = "decode_0" if lost == "prefill_0" else "prefill_0"
    expected = deployment.client.complete(prompt(LENGTH), max_tokens=32, **GREEDY)
    assert (expected.stage_times["prefill_instance"], expected.stage_times["decode_instance"]) == (
        "prefill_0",
        "decode_0",
    )
    pid = engine_pid(deployment, lost)
    os.kill(pid, signal.SIGSTOP)  # it does not come back before the request is over
    try:
        answer = deployment.client.complete(prompt(LENGTH), max_tokens=32, **GREEDY)
    finally:
        os.kill(pid, signal.SIGKILL)
    assert answer.token_ids == expected.token_ids
    assert answer.stage_times["prefill_instance"] == left
    assert "decode_instance" not in answer.stage_times
    assert deployment.status()["ready"] is True
    until(lambda: all(entry["usable"] for entry in deployment.status()["instances"]), 60.0)
    again = deployment.client.complete(prompt(LENGTH), max_tokens=32, **GREEDY)
    assert again.token_ids == expected.token_ids
    assert again.stage_times["prefill_instance"] == "prefill_0"
    role = lost.partition("_")[0]
    until(lambda: value(deployment, "distserve_engine_restarts_total", instance=lost, role=role) == 1.0)
    deployment.wait_idle()
