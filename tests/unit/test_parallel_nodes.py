"""Ranks on other nodes: who keeps their processes, strangers at the port, frames between hosts."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from distserve.core.config import EngineConfig
from distserve.core.model_config import ModelConfig
from distserve.core.parsing import ConfigError
from distserve.core.rank_host_config import RankHostConfig
from distserve.serving.schema import ServingError, decode_reply, encode
from distserve.transfer.errors import TransferError
from distserve.worker import remote_ranks
from distserve.worker.link import Link
from distserve.worker.parallel import RankLost
from distserve.worker.rank_executor import RankExecutor
from distserve.worker.rank_host import RankHost
from distserve.worker.remote_ranks import call_ranks, come_to
from distserve.worker.sharing import sharers
from distserve.worker.step import Joining, SamplingParams, StepInput, StepItem
from model_zoo import Zoo, prompt

SERVER = "127.0.0.2:1"
SECRET = b"0123456789abcdef"


def config(model: str = "m", **changes: Any) -> EngineConfig:
    core = f"cpu:{min(os.sched_getaffinity(0))}"
    values = {"instance": "t", "role": "unified", "model": model, "pp": 2, "devices": [core, core]}
    return EngineConfig.load({**values, "num_blocks": 32, "rank_servers": ["", SERVER], **changes})


def asked(host: RankHost, message: bytes) -> bytes:
    answers: list[bytes] = []
    host.call(message, answers.append)
    return answers[0]


def call(host: RankHost, op: str, **fields: Any) -> dict[str, Any]:
    return decode_reply(asked(host, encode({"op": op, **fields})))


@pytest.fixture
def host() -> Iterator[RankHost]:
    host = RankHost(RankHostConfig("t", (1,)))
    host.start()
    yield host
    host.stop()


def pid(host: RankHost) -> int | None:
    found = call(host, "status")["pids"].get("1")
    return None if found is None else int(found)


@contextmanager
def running(
    zoo: Zoo, host: RankHost, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> Iterator[RankExecutor]:
    def ask(server: str, model: str, message: bytes) -> bytes:
        assert (server, model) == (SERVER, "t_ranks")
        return asked(host, message)

    monkeypatch.setattr(remote_ranks, "ask_server", ask)
    folder = zoo("llama").folder
    executor = RankExecutor(config(str(folder), **changes), ModelConfig.load(folder))
    try:
        yield executor
    finally:
        executor.close()


def eventually(done: Any, timeout_s: float = 30.0) -> Any:
    until = time.monotonic() + timeout_s
    while not (found := done()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return found


def tokens(executor: RankExecutor, count: int) -> list[int]:
    known, blocks = prompt(20), [3, 1, 4, 0]
    params = SamplingParams()
    for index in range(count):
        new = known if index == 0 else known[-1:]
        joining = [Joining("a", params, 20, list(new))] if index == 0 else []
        item = StepItem("a", list(new), len(known) - len(new), blocks[: -(-len(known) // 16)])
        known = known + executor.execute(StepInput([item], joining)).tokens
    executor.execute(StepInput([], leaving=["a"]))
    return known[20:]


def test_a_rank_of_another_node_comes_and_comes_again(
    zoo: Zoo, host: RankHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo("llama")
    expected = model.greedy(prompt(20), 4)
    with running(zoo, host, monkeypatch) as executor:
        assert tokens(executor, 4) == expected
        first = pid(host)
        assert first is not None
        os.kill(first, signal.SIGKILL)
        with pytest.raises(RankLost, match=rf"rank 1 of {SERVER} is gone"):
            executor.collect(20.0)
    with running(zoo, host, monkeypatch) as executor:
        assert tokens(executor, 4) == expected
        assert pid(host) not in (None, first)
    eventually(lambda: pid(host) is None)  # it ends with its rank 0


def test_slices_of_one_stage_on_two_nodes(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    core = f"cpu:{min(os.sched_getaffinity(0))}"
    host = RankHost(RankHostConfig("t", (1, 3)))
    host.start()
    shape = {"tp": 2, "pp": 2, "devices": [core] * 4, "rank_servers": ["", SERVER, "", SERVER]}
    try:
        with running(zoo, host, monkeypatch, **shape) as executor:
            assert tokens(executor, 4) == zoo("llama").greedy(prompt(20), 4)
            assert [rank.server for rank in executor.ranks] == [SERVER, "", SERVER]
    finally:
        host.stop()


def test_what_a_rank_of_another_node_refuses_is_a_refusal(
    zoo: Zoo, host: RankHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_ranks, "ask_server", lambda _server, _model, message: asked(host, message))
    folder = zoo("llama").folder
    bad = config(str(folder), devices=[f"cpu:{min(os.sched_getaffinity(0))}", "cpu:4096"])
    with pytest.raises(ConfigError, match=r"rank 1: .*no core 4096"):
        RankExecutor(bad, ModelConfig.load(folder))


def test_strangers_are_sent_away_and_ranks_come_in(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []
    links: list[Link] = []

    def ask(server: str, model: str, message: bytes) -> bytes:
        call = msgpack.unpackb(message)
        for secret, visit in ((b"another secret..", call["visit"]), (None, call["visit"])):
            with pytest.raises(TransferError) as caught:
                come_to(call["leader"], visit, 1, secret, 5.0)
            refused.append(caught.value.reason)
        links.extend(come_to(call["leader"], "an earlier visit", 1, SECRET, 5.0).values())
        if len(refused) > 2:
            links.extend(come_to(call["leader"], call["visit"], 1, SECRET, 5.0).values())
        return encode({"ok": True})

    monkeypatch.setattr(remote_ranks, "ask_server", ask)
    ((rank, server, found),) = call_ranks(config(), SECRET, 30.0)
    assert (rank, server, sorted(found)) == (1, SERVER, ["side", "steps"])
    assert refused == ["unauthenticated"] * 4
    found["steps"].send(b"to the rank")
    assert links[-2].receive(5.0) == b"to the rank"
    for link in (*links, *found.values()):
        link.close()


def test_nodes_that_do_not_come_are_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(server: str, model: str, message: bytes) -> bytes:
        raise ServingError("UNAVAILABLE", "connection refused")

    monkeypatch.setattr(remote_ranks, "ask_server", ask)
    message = rf"not there after 0.3 s: ranks \[1\] of {SERVER} \(connection refused\)"
    with pytest.raises(RankLost, match=message):
        call_ranks(config(), None, 0.3)
    with pytest.raises(ConfigError, match=r"transfer_host='10.1.2.3': only loopback"):
        call_ranks(config(transfer_host="10.1.2.3"), None, 0.3)


def test_a_host_keeps_the_ranks_of_the_last_visit(host: RankHost) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # who comes waits there
        leader = f"127.0.0.1:{silent.getsockname()[1]}"
        join = {"instance": "t", "ranks": [1], "leader": leader}
        call(host, "join", visit="one", **join)
        first = eventually(lambda: pid(host))
        call(host, "join", visit="one", **join)  # it is asked until they have come
        time.sleep(0.1)
        assert pid(host) == first
        call(host, "join", visit="two", **join)
        second = eventually(lambda: pid(host) not in (first, None) and pid(host))
        assert not Path(f"/proc/{first}").exists()
        os.kill(second, signal.SIGKILL)
        eventually(lambda: pid(host) is None)
        call(host, "join", visit="two", **join)
        assert eventually(lambda: pid(host)) != second
    for fields, message in (
        ({"instance": "u"}, "instance='u': 't' is hosted here"),
        ({"ranks": [1, 2]}, r"ranks=\[1, 2\]: \[1\] is hosted here"),
        ({"leader": "nowhere"}, "leader: address='nowhere'"),
    ):
        with pytest.raises(ServingError, match=message):
            call(host, "join", visit="three", **{**join, **fields})
    with pytest.raises(ServingError, match="op='poll': must be 'join' or 'status'"):
        call(host, "poll")


def test_a_frame_that_was_changed_or_sent_twice_ends_the_link() -> None:
    tapped, wire = socket.socketpair()
    original = Link(tapped, 1.0, send_key=b"k" * 32)
    original.send(b"one")
    frame = wire.recv(100)
    changed = frame[:4] + b"t" + frame[5:]
    for sent in (frame + frame, changed):
        ours, theirs = socket.socketpair()
        receiver = Link(theirs, 1.0, receive_key=b"k" * 32)
        ours.sendall(sent)
        with pytest.raises(EOFError, match="wrong authentication tag"):
            receiver.receive(1.0)
        ours.close()
        receiver.close()
    original.close()
    wire.close()


def test_a_silent_leader_ends_the_wait_of_all_ranks() -> None:
    """Values of a rank that never come: the others hear of it at once."""
    from distserve.worker.link_store import RankStore, Serving, Values

    values = Values(20.0)
    pairs = [socket.socketpair() for _ in range(2)]
    serving = Serving(values, [(r, Link(ours, 9)) for r, (ours, _) in enumerate(pairs, 1)], 20.0)
    waiting = RankStore(Link(pairs[0][1], 9), 20.0).part("tp0")
    failure: list[BaseException] = []

    def wait() -> None:
        try:
            waiting.get("0/2")
        except RankLost as error:
            failure.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    pairs[1][1].close()
    thread.join(10.0)
    assert not thread.is_alive()
    assert len(failure) == 1
    with pytest.raises(RankLost, match="rank 2: closed by the other side"):
        serving.join()


def test_only_ranks_of_one_node_share_its_memory() -> None:
    spread = config(tp=2, devices=["cpu:0"] * 4, rank_servers=["", "", SERVER, SERVER])
    assert [sharers(spread, rank) for rank in range(4)] == [2] * 4
    three = config(tp=3, pp=1, devices=["cuda:0"] * 3, rank_servers=["", SERVER, SERVER])
    assert [sharers(three, rank) for rank in range(3)] == [1, 2, 2]
