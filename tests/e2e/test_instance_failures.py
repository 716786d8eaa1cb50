"""Instances that die, hang or move while clients stream from a real tritonserver: the text goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from serving import Deployment, deployed, engine_pid

from distserve_tools.chaos.freeze import freeze_at_work
from distserve_tools.client import Chunk, Client, Completion, RequestError, gather
from distserve_tools.processes import ProcessId
from model_zoo import CONTEXT, Zoo, prompt

LENGTH = 20
STREAMS = 12
GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": CONTEXT - LENGTH - 1}


@pytest.fixture(scope="module")
def pair(zoo: Zoo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """1 prefill + 2 decode instances."""
    instances = ({"role": "prefill"}, {"role": "decode"}, {"role": "decode"})
    with deployed(tmp_path_factory.mktemp("failures"), zoo("llama"), instances) as deployment:
        yield deployment


def reference(deployment: Deployment) -> list[tuple[int, ...]]:
    return [deployment.client.complete(prompt(LENGTH, seed=i), **GREEDY).token_ids for i in range(STREAMS)]


def all_usable(deployment: Deployment) -> None:
    end = time.monotonic() + 60.0
    while not all(entry["usable"] for entry in deployment.status()["instances"]):
        assert time.monotonic() < end, deployment.status()["instances"]
        time.sleep(0.1)


class Streams:
    """Clients that send their request again and again until the fault has struck, so that it finds work."""

    def __init__(self, deployment: Deployment, pool: ThreadPoolExecutor) -> None:
        self._deployment = deployment
        self._under_way, self._struck = threading.Event(), threading.Event()
        self._calls = [pool.submit(self._follow, i) for i in range(STREAMS)]

    def freeze(self, pid: int, instance: str) -> None:
        """One of the streams has had its third token, and some are at the instance, which stands still."""
        assert self._under_way.wait(30.0), "the streams did not begin"
        assert freeze_at_work(self._deployment.client, ProcessId.of(pid), instance)
        self._struck.set()

    def recoveries(self, expected: list[tuple[int, ...]]) -> int:
        """Of all streams, when they have ended, each with the text that is expected."""
        answers = [call.result() for call in self._calls]
        for of_client, text in zip(answers, expected, strict=True):
            assert {answer.token_ids for answer in of_client} == {text}
        return sum(answer.stage_times["recoveries"] for of_client in answers for answer in of_client)

    def end(self) -> None:
        self._struck.set()

    def _follow(self, i: int) -> list[Completion]:
        answers = [gather(self._watched(i), time.monotonic())]
        while not self._struck.is_set():
            answers.append(gather(self._watched(i), time.monotonic()))
        return answers

    def _watched(self, i: int) -> Iterator[Chunk]:
        for n, chunk in enumerate(self._deployment.client.stream(prompt(LENGTH, seed=i), **GREEDY)):
            if n == 2:
                self._under_way.set()
            yield chunk


@contextmanager
def streams(deployment: Deployment) -> Iterator[Streams]:
    with ThreadPoolExecutor(STREAMS) as pool:
        load = Streams(deployment, pool)
        try:
            yield load
        finally:
            load.end()


def test_a_killed_decode_engine_is_continued_elsewhere(pair: Deployment) -> None:
    expected, pid = reference(pair), engine_pid(pair, "decode_0")
    with streams(pair) as load:
        load.freeze(pid, "decode_0")
        os.kill(pid, signal.SIGKILL)
        assert load.recoveries(expected) > 0
    all_usable(pair)
    pair.wait_idle()


def test_a_silent_decode_engine_is_continued_elsewhere(pair: Deployment) -> None:
    expected, pid = reference(pair), engine_pid(pair, "decode_1")
    with streams(pair) as load:
        try:
            load.freeze(pid, "decode_1")
            assert load.recoveries(expected) > 0  # while it is silent
        finally:
            os.kill(pid, signal.SIGCONT)
    all_usable(pair)
    pair.wait_idle()


def test_a_killed_prefill_engine_comes_back(pair: Deployment) -> None:
    expected, pid = reference(pair), engine_pid(pair, "prefill_0")
    with streams(pair) as load:
        load.freeze(pid, "prefill_0")
        os.kill(pid, signal.SIGKILL)
        load.recoveries(expected)
    all_usable(pair)
    assert pair.client.complete(prompt(LENGTH, seed=0), **GREEDY).token_ids == expected[0]
    pair.wait_idle()


def test_an_instance_of_another_server_is_reached_over_grpc(pair: Deployment) -> None:
    """The other server is this one, seen from outside."""
    expected = pair.client.complete(prompt(LENGTH), **GREEDY).token_ids
    for name in ("decode_0", "decode_1"):
        pair.client.control("drain", instance=name)
        _until(lambda name=name: _drained(pair.client, name))  # type: ignore[misc]
        pair.client.control("drain", instance=name, remove=True)
    far = {"name": "far", "role": "decode", "address": pair.server.grpc_url, "model": "decode_0"}
    assert pair.client.control("attach", instance=far)["up"] is True
    answer = pair.client.complete(prompt(LENGTH), **GREEDY)
    assert answer.token_ids == expected
    assert answer.stage_times["decode_instance"] == "far"
    pair.client.control("drain", instance="far")
    _until(lambda: _drained(pair.client, "far"))
    pair.client.control("drain", instance="far", remove=True)
    with pytest.raises(RequestError, match="UNAVAILABLE"):
        pair.client.complete(prompt(LENGTH), **GREEDY)
    for name in ("decode_0", "decode_1"):
        assert pair.client.control("attach", instance={"name": name, "role": "decode"})["up"] is True
    assert pair.client.complete(prompt(LENGTH), **GREEDY).token_ids == expected
    pair.wait_idle()


def _drained(client: Client, name: str) -> bool:
    entries = client.control("status")["instances"]
    return any(entry["instance"] == name and entry["drained"] for entry in entries)


def _until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
