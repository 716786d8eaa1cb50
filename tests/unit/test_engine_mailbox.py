"""The I/O thread over a real socket: calls, long polls, queue limit, epochs, a stub that goes away."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from distserve.engine.admission import Admission, Bounds
from distserve.engine.connection import FrameConnection
from distserve.engine.inbox import Inbox
from distserve.engine.mailbox import Mailbox
from distserve.engine.ops import DropOwner, Manage, Op, Submit
from distserve.engine.requests import Event, Owner
from distserve.engine.status import Load
from distserve.serving.frames import pack_frame
from distserve.serving.schema import ServingError, decode_reply
from engine_process import EngineConnection

HEARTBEAT_S = 0.2
ME: dict[str, Any] = {"owner": "o", "epoch": 1}
OWNER = Owner("o", 1)


class Rig:
    """A mailbox without a loop behind it."""

    def __init__(self, owner_timeout_s: float = 30.0) -> None:
        ours, theirs = socket.socketpair()
        self.socket = ours
        self.inbox: Inbox[Op] = Inbox()
        bounds = Bounds("unified", 100, 100, 16, 50, ())
        self.mailbox = Mailbox(
            FrameConnection(theirs),
            self.inbox,
            Admission(bounds),
            lambda load, step_times: {"role": "unified", "step_times": step_times, **load.to_wire()},
            Load(credits=1000),
            epoch=77,
            max_queue=3,
            heartbeat_s=HEARTBEAT_S,
            owner_timeout_s=owner_timeout_s,
            batch_tokens=1600,
        )
        self.mailbox.start()
        self.connection = EngineConnection(ours)
        self.call = self.connection.call
        self.call("poll", ack=0, **ME)  # the first one tells the load at once

    def submit(self, *ids: str, identity: dict[str, Any] = ME, prompt: int = 4) -> list[dict[str, Any]]:
        entries = [{"id": id, "prompt": [1] * prompt, "max_tokens": 2} for id in ids]
        results: list[dict[str, Any]] = self.call("submit", requests=entries, **identity)["results"]
        return results

    def taken(self, kind: type, wait_s: float = 2.0) -> list[Any]:
        """Ops of one kind; waits for the first."""
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if out := [op for op in self.inbox.take(0.05) if isinstance(op, kind)]:
                return out
        return []

    def tell(self, id: str, last: bool = False, load: Load | None = None, owner: Owner = OWNER) -> None:
        fields = {"type": "token", "tokens": [1]}
        self.mailbox.publish([Event(owner, id, fields, last)], load or Load(credits=1000))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.mailbox.close(1.0)
    rig.connection.close()


def test_a_poll_is_held_until_there_is_an_event(rig: Rig) -> None:
    assert rig.submit("r") == [{"id": "r", "ok": True}]
    poll = rig.connection.start("poll", ack=0, **ME)
    time.sleep(0.05)
    assert not poll.done()
    rig.tell("r")
    reply = decode_reply(poll.result(0.1))
    (event,) = reply["events"]
    assert (event["id"], event["type"], event["tokens"]) == ("r", "token", [1])
    assert reply["epoch"] == 77
    assert reply["load"]["credits"] == 996  # less the prompt that the loop has not taken yet
    again = rig.call("poll", ack=0, **ME)  # the reply was lost
    assert again["events"] == reply["events"]
    began = time.monotonic()
    assert rig.call("poll", ack=event["seq"], **ME)["events"] == []
    assert HEARTBEAT_S * 0.9 < time.monotonic() - began < HEARTBEAT_S + 0.5


def test_a_second_poll_ends_the_first(rig: Rig) -> None:
    first = rig.connection.start("poll", ack=0, **ME)
    second = rig.connection.start("poll", ack=0, **ME)
    assert decode_reply(first.result(HEARTBEAT_S / 2))["events"] == []
    assert not second.done()


def test_a_submit_that_is_repeated_is_taken_once(rig: Rig) -> None:
    for _ in range(2):
        assert rig.submit("r") == [{"id": "r", "ok": True}]
    assert len(rig.taken(Submit)) == 1
    rig.tell("r", last=True)
    event = rig.call("poll", ack=0, **ME)["events"][-1]
    rig.call("poll", ack=event["seq"], **ME)
    assert rig.submit("r") == [{"id": "r", "ok": True}]
    assert not rig.taken(Submit, 0.1)


def test_a_full_queue_refuses_at_once(rig: Rig) -> None:
    results = rig.submit("a", "b", "c", "d")
    assert [result["ok"] for result in results] == [True, True, True, False]
    error = results[3]["error"]
    assert error["code"] == "RESOURCE_EXHAUSTED"
    assert "3 requests wait, max_queue=3" in error["message"]
    rig.mailbox.publish(
        [], Load(credits=1000, taken=3, taken_tokens=12)
    )  # the loop has taken them and runs them
    assert rig.submit("d")[0]["ok"]


def test_the_load_counts_what_is_on_its_way_to_the_loop(rig: Rig) -> None:
    rig.submit("a", "b", prompt=50)
    status = rig.call("status")
    assert (status["queued"], status["queued_tokens"], status["credits"]) == (2, 100, 900)
    assert [rig.call("status", **asked)["step_times"] for asked in ({}, {"step_times": True})] == [
        False,
        True,
    ]


def test_a_poll_ends_when_there_is_room_again(rig: Rig) -> None:
    rig.submit("a", "b", "c", prompt=90)
    poll = rig.connection.start("poll", ack=0, **ME)
    rig.mailbox.publish([], Load(credits=730, taken=3, taken_tokens=270))
    time.sleep(0.03)
    assert not poll.done()
    rig.mailbox.publish([], Load(credits=1000, taken=3, taken_tokens=270))
    assert decode_reply(poll.result(HEARTBEAT_S / 2))["load"]["credits"] == 1000


def test_a_newer_epoch_ends_the_older_ones_requests(rig: Rig) -> None:
    rig.submit("r")
    old_poll = rig.connection.start("poll", ack=0, **ME)
    newer = {"owner": "o", "epoch": 2}
    rig.submit("r", identity=newer)
    assert decode_reply(old_poll.result(0.1))["events"] == []
    assert [op.owner for op in rig.taken(DropOwner)] == [OWNER]
    rig.tell("r", owner=OWNER)
    rig.tell("r", owner=Owner("o", 2))
    assert len(rig.call("poll", ack=0, **newer)["events"]) == 1
    with pytest.raises(ServingError, match="epoch=1: owner 'o' has a newer one, 2"):
        rig.call("poll", ack=0, **ME)


def test_a_silent_owner_is_dropped() -> None:
    rig = Rig(owner_timeout_s=0.3)
    rig.submit("r")
    assert [op.owner for op in rig.taken(DropOwner)] == [OWNER]
    (event,) = rig.call("poll", ack=0, **ME)["events"]
    assert event["error"]["code"] == "UNAVAILABLE"
    rig.mailbox.close(1.0)
    rig.connection.close()


def test_ids_go_to_the_loop_in_order(rig: Rig) -> None:
    rig.call("cancel", ids=["a", "b"], **ME)
    rig.call("release", ids=["c"], **ME)
    rig.call("renew", ids=[], **ME)
    ops = rig.taken(Manage)
    assert [(op.kind, op.ids) for op in ops] == [("cancel", ("a", "b")), ("release", ("c",)), ("renew", ())]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"op": "sing"}, "op='sing': must be status, submit"),
        ({"op": "poll"}, "owner: must be a string"),
        ({"op": "poll", "owner": "o", "epoch": "1"}, "epoch='1': must be an integer"),
        ({"op": "poll", **ME, "ack": None}, "ack=None: must be an integer"),
        ({"op": "cancel", **ME}, "ids: must be a list"),
        ({"op": "submit", **ME}, "requests: must be a list"),
        ({"op": "submit", **ME, "requests": [{}]}, "requests: id='None': must be a string"),
    ],
)
def test_bad_calls_are_refused_by_name(rig: Rig, call: dict[str, Any], message: str) -> None:
    with pytest.raises(ServingError, match=message) as refused:
        rig.call(**call)
    assert refused.value.code == "INVALID_ARGUMENT"
    assert rig.call("status")["role"] == "unified"


def test_closing_answers_held_polls_and_sends_the_last_events() -> None:
    rig = Rig()
    rig.submit("r")
    poll = rig.connection.start("poll", ack=0, **ME)
    rig.tell("r", last=True)
    rig.mailbox.close(1.0)
    assert len(decode_reply(poll.result(1.0))["events"]) == 1
    rig.connection.close()


@pytest.mark.parametrize("garbage", [b"", b"\xff\xff\xff\xff", pack_frame(1, b"")[:4] + b"\x01" * 40])
def test_a_stub_that_is_gone_or_mad_stops_the_engine(garbage: bytes) -> None:
    rig = Rig()
    rig.socket.sendall(garbage)
    rig.socket.shutdown(socket.SHUT_WR)
    deadline = time.monotonic() + 2
    while rig.inbox.stopped is None and time.monotonic() < deadline:
        rig.inbox.take(0.05)
    assert "connection to the stub" in (rig.inbox.stopped or "")
    rig.mailbox.close(0.5)
    rig.connection.close()


def test_what_no_one_thought_of_costs_its_call_only(rig: Rig) -> None:
    """Here: a status that can't be made."""
    rig.mailbox._status = lambda load, step_times: {}["gone"]
    with pytest.raises(ServingError, match="KeyError") as caught:
        rig.call("status")
    assert caught.value.code == "INTERNAL"
    assert rig.submit("a") == [{"id": "a", "ok": True}]
