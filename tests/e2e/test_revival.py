"""What Triton never brings back: dead stubs, and tritonserver itself. Clients are told, service goes on."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Deployment, deployed, front_end, greedy_mismatches

from distserve_tools.client import RequestError
from distserve_tools.health import server_problem
from distserve_tools.processes import session_members, wait_gone
from distserve_tools.supervise import Supervisor, stubs_by_model
from model_zoo import CONTEXT, Zoo, prompt

GREEDY = {"temperature": 0.0, "ignore_eos": True}
OPENAI = {"model": "llama", "prompt": "abc", "max_tokens": CONTEXT - 20, "ignore_eos": True}
DEADLINE_S = 90.0


@pytest.fixture(scope="module")
def served(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(tmp_path_factory.mktemp("revival"), zoo("llama"), drain_timeout_s=2.0) as deployment:
        yield deployment


@contextmanager
def supervised(deployment: Deployment, hung_s: float = 60.0) -> Iterator[tuple[Supervisor, list[str]]]:
    events: list[str] = []
    supervisor = Supervisor(deployment.server, events.append, hung_s=hung_s)
    supervisor.start()
    try:
        yield supervisor, events
    finally:
        supervisor.stop()


def ready(deployment: Deployment) -> bool:
    try:
        return bool(deployment.client.control("status", timeout_s=3.0)["ready"])
    except RequestError:
        return False


def serves_again(deployment: Deployment) -> None:
    answer = deployment.client.complete(prompt(20), timeout_s=60, max_tokens=20, **GREEDY)
    assert greedy_mismatches(deployment.model, prompt(20), answer.token_ids) == []
    deployment.wait_idle()


def kill_stub(deployment: Deployment, supervisor: Supervisor, name: str, events: list[str]) -> None:
    """Returns when its model has been loaded again."""
    before = supervisor.restarts[name]
    (stub,) = stubs_by_model(deployment.server.pid)[name]
    os.kill(stub.pid, signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE_S
    while supervisor.restarts.get(name, 0) == before or not ready(deployment):
        assert time.monotonic() < deadline, events
        time.sleep(0.1)


def test_a_dead_stub_is_brought_back(served: Deployment) -> None:
    with supervised(served) as (supervisor, events):
        for name in ("decode_0", "prefill_0"):
            kill_stub(served, supervisor, name, events)
            serves_again(served)


def follow(url: str, begun: threading.Semaphore) -> list[dict[str, Any]]:
    """The events of one stream of the front end, to its end."""
    found = []
    with httpx.stream("POST", f"{url}/v1/completions", json={**OPENAI, "stream": True}, timeout=120) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                found.append(json.loads(line[6:]))
                if len(found) == 1:
                    begun.release()
    return found


def test_streams_of_a_killed_orchestrator_are_ended_by_the_front_end(served: Deployment) -> None:
    """Triton never ends them. One front end gives them up by its deadline, which is short; the other, which
    has time, when it sees that the orchestrator is another one."""
    (stub,) = stubs_by_model(served.server.pid)["orchestrator"]
    begun = threading.Semaphore(0)
    with (
        front_end(served, request_timeout_s=5.0) as hasty,
        front_end(served, request_timeout_s=3600.0) as patient,
        ThreadPoolExecutor(4) as pool,
    ):
        silent = engines(served, "decode_0")
        for pid in silent:  # so that they are under way when the orchestrator dies
            os.kill(pid, signal.SIGSTOP)
        streams = {url: pool.submit(follow, url, begun) for url in (hasty, patient)}
        whole = pool.submit(httpx.post, f"{hasty}/v1/completions", json=OPENAI, timeout=120)
        for _ in streams:
            assert begun.acquire(timeout=30)
        assert httpx.get(f"{patient}/health", timeout=10).status_code == 200  # it has seen this one
        os.kill(stub.pid, signal.SIGKILL)
        for pid in silent:
            os.kill(pid, signal.SIGCONT)
        error = streams[hasty].result(60)[-1]["error"]
        assert (error["type"], error["message"]) == ("timeout", "no end within 5 s")
        assert whole.result(60).status_code == 504
        with supervised(served) as (supervisor, events):
            error = streams[patient].result(60)[-1]["error"]
            assert error["type"] == "service_unavailable", events
            assert "was started again" in error["message"]
            assert supervisor.restarts["orchestrator"] == 1
        assert httpx.get(f"{patient}/health", timeout=10).json() == {"ready": True}
        reply = httpx.post(f"{patient}/v1/completions", json={**OPENAI, "max_tokens": 4}, timeout=60)
        assert reply.json()["usage"]["completion_tokens"] == 4
    serves_again(served)


def engines(deployment: Deployment, model: str) -> list[int]:
    (stub,) = stubs_by_model(deployment.server.pid)[model]
    children = [path.read_text().split() for path in Path(f"/proc/{stub.pid}/task").glob("*/children")]
    return [int(pid) for pids in children for pid in pids]


def shared_memory(server_pid: int) -> set[str]:
    """Regions of a server that lives."""
    words = Path(f"/proc/{server_pid}/cmdline").read_text()
    found = re.search(r"shm-region-prefix-name=(\w+)", words)
    assert found is not None
    return {
        name for name in os.listdir("/dev/shm") if name.startswith(found[1]) and not name.endswith("_claim")
    }


def streams(deployment: Deployment, pool: ThreadPoolExecutor, count: int) -> list[Future[Any]]:
    """Requests that have had a token each."""
    begun = threading.Semaphore(0)

    def one(seed: int) -> None:
        chunks = deployment.client.stream(prompt(20, seed), 120, max_tokens=CONTEXT - 20, **GREEDY)
        for number, _ in enumerate(chunks):
            if number == 0:
                begun.release()

    calls = [pool.submit(one, seed) for seed in range(count)]
    for _ in calls:
        assert begun.acquire(timeout=60)
    return calls


def end_server(served: Deployment, number: int, hung_s: float) -> None:
    """Its streams get an error at once, nothing of it stays, and another one serves at the same addresses."""
    server, before = served.server, served.status()["server_restarts"]
    with supervised(served, hung_s) as (_, events), ThreadPoolExecutor(8) as pool:
        for pid in engines(served, "decode_0"):  # so that none ends in time
            os.kill(pid, signal.SIGSTOP)
        calls = streams(served, pool, 8)
        members, files = session_members(server.pid), shared_memory(server.pid)
        assert files
        assert len(members) >= 6  # the server, three stubs, two engines
        os.kill(server.pid, number)
        errors = [call.exception(timeout=DEADLINE_S) for call in calls]
        assert {getattr(error, "code", error) for error in errors} == {"UNAVAILABLE"}
        assert server_problem(server.http_url, 1.0) is not None or len(events) > 1
        deadline = time.monotonic() + DEADLINE_S
        while not ready(served):
            assert time.monotonic() < deadline, events
            time.sleep(0.1)
        assert served.status()["server_restarts"] == before + 1 == server.restarts
        assert wait_gone(members, 10.0) == set()
        assert not files & set(os.listdir("/dev/shm"))
        assert server_problem(server.http_url, 10.0) is None
        serves_again(served)
        until_events(events, "tritonserver: started again")
    page = httpx.get(f"http://{server.metrics_url}/metrics", timeout=10).text
    (count,) = re.findall(r"^distserve_server_restarts_total\S* (\d+)", page, re.MULTILINE)
    assert int(count) == server.restarts


def until_events(events: list[str], text: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not any(text in event for event in events):
        assert time.monotonic() < deadline, events
        time.sleep(0.1)


def test_nobody_calls_it_ready_while_nobody_can_decode(served: Deployment) -> None:
    """Not the orchestrator, not the metrics, not the front end, not the probe of containers; then all do."""

    def said(openai: str) -> set[object]:
        page = httpx.get(f"http://{served.server.metrics_url}/metrics", timeout=10).text
        (metric,) = re.findall(r"^distserve_ready\S* (\d)", page, re.MULTILINE)
        return {
            served.status()["ready"],
            metric == "1",
            httpx.get(f"{openai}/health", timeout=10).json()["ready"],
            server_problem(served.server.http_url, 10.0) is None,
        }

    def until_all_say(ready: bool) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while (found := said(openai)) != {ready}:
            assert time.monotonic() < deadline, found
            time.sleep(0.2)

    with front_end(served) as openai:
        until_all_say(True)
        silent = engines(served, "decode_0")
        for pid in silent:
            os.kill(pid, signal.SIGSTOP)
        try:
            until_all_say(False)
        finally:
            for pid in silent:
                os.kill(pid, signal.SIGCONT)
        until_all_say(True)
    serves_again(served)


def test_a_killed_tritonserver_is_started_again(served: Deployment) -> None:
    with front_end(served) as openai, ThreadPoolExecutor(2) as pool:
        for pid in engines(served, "decode_0"):
            os.kill(pid, signal.SIGSTOP)
        begun = threading.Semaphore(0)
        stream = pool.submit(follow, openai, begun)
        whole = pool.submit(httpx.post, f"{openai}/v1/completions", json=OPENAI, timeout=120)
        assert begun.acquire(timeout=60)
        end_server(served, signal.SIGKILL, hung_s=60.0)
        assert stream.result(60)[-1]["error"]["type"] == "service_unavailable"
        assert whole.result(60).status_code == 503
        reply = httpx.post(f"{openai}/v1/completions", json={**OPENAI, "max_tokens": 4}, timeout=60)
        assert reply.json()["usage"]["completion_tokens"] == 4


@pytest.mark.slow
def test_what_does_not_load_any_more_is_done_without(zoo: Zoo, tmp_path: Path) -> None:
    instances = ({"role": "prefill"}, {"role": "decode"}, {"role": "decode"})
    with deployed(tmp_path, zoo("llama"), instances, drain_timeout_s=2.0) as served:
        config = tmp_path / "repository/decode_1/config.pbtxt"
        config.write_text(config.read_text().replace("cpu:", "cpu:40"))  # its device is gone
        with supervised(served) as (_, events):
            os.kill(served.server.pid, signal.SIGKILL)
            until_events(events, "tritonserver: started again")
            assert len([event for event in events if "trying again" in event]) == 2
            answer = served.client.complete(prompt(20), timeout_s=60, max_tokens=20, **GREEDY)
            assert answer.stage_times["decode_instance"] == "decode_0"
            usable = {entry["instance"]: entry["usable"] for entry in served.status()["instances"]}
            assert usable == {"prefill_0": True, "decode_0": True, "decode_1": False}


@pytest.mark.slow
def test_a_tritonserver_that_does_not_answer_is_replaced(served: Deployment) -> None:
    end_server(served, signal.SIGSTOP, hung_s=5.0)
