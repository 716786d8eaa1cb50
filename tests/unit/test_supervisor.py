"""The stub's side of an engine process: calls, deaths, restarts, hangs."""

from __future__ import annotations

import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distserve.serving.schema import MAX_MESSAGE_BYTES, ServingError, decode_reply, encode
from distserve.serving.supervisor import Supervisor, SupervisorTimes

# Answers each call with its own payload; some payloads are orders.
ENGINE = """
import os, signal, socket, sys, time
from distserve.serving.frames import pack_frame, read_frame
from distserve.serving.schema import ServingError, error_reply, ok_reply
sock = socket.socket(fileno=int(sys.argv[1]))
_, config = read_frame(sock)
if config == b"bad":
    sock.sendall(pack_frame(0, error_reply(ServingError("INVALID_ARGUMENT", "tp=3: must divide 4"))))
    sys.exit(1)
if config == b"crash":
    sys.exit(3)
if config == b"wait":  # as for other nodes
    while os.path.exists(__file__ + ".hold"):
        time.sleep(0.01)
sock.sendall(pack_frame(0, ok_reply()))
while (frame := read_frame(sock)) is not None:
    call, payload = frame
    if payload == b"die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif payload == b"stop reading":
        time.sleep(60)
    elif payload != b"no answer":
        sock.sendall(pack_frame(call, payload))
"""
QUICK = SupervisorTimes(start_s=20.0, call_s=0.4, hang_s=0.2, write_s=1.0, stop_s=2.0)
PATIENT = SupervisorTimes(start_s=20.0, stop_s=2.0)

Replies = queue.Queue[bytes]


@contextmanager
def supervised(
    tmp_path: Path, config: str = "", times: SupervisorTimes = PATIENT, patient: bool = False
) -> Iterator[Supervisor]:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    supervisor = Supervisor(config, lambda fd: [sys.executable, str(script), str(fd)], times, patient)
    try:
        supervisor.start()
        yield supervisor
    finally:
        supervisor.stop()


def call(supervisor: Supervisor, payload: bytes) -> Replies:
    replies: Replies = queue.Queue()
    supervisor.call(payload, replies.put)
    return replies


def failure(replies: Replies, timeout_s: float = 5.0) -> ServingError:
    with pytest.raises(ServingError) as caught:
        decode_reply(replies.get(timeout=timeout_s))
    return caught.value


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_calls_are_answered_in_any_number(tmp_path: Path) -> None:
    with supervised(tmp_path) as supervisor:
        sent = [encode({"n": n, "fill": "x" * 10_000}) for n in range(200)]
        waiting = [call(supervisor, payload) for payload in sent]
        assert [replies.get(timeout=5.0) for replies in waiting] == sent


def test_a_config_that_is_refused_fails_the_start_with_the_engines_words(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match="tp=3: must divide 4"), supervised(tmp_path, "bad"):
        pass


def test_an_engine_that_ends_before_it_is_ready_fails_the_start(tmp_path: Path) -> None:
    with pytest.raises(ServingError, match=r"before it was ready \(code 3\)"), supervised(tmp_path, "crash"):
        pass


def test_a_program_that_does_not_exist_fails_the_start() -> None:
    supervisor = Supervisor("", lambda fd: ["/nonexistent/engine"], PATIENT)
    with pytest.raises(ServingError):
        supervisor.start()
    supervisor.stop()


def test_death_fails_the_calls_in_flight_at_once_and_a_new_engine_comes(tmp_path: Path) -> None:
    with supervised(tmp_path) as supervisor:
        first = supervisor.pid
        waiting = [call(supervisor, b"no answer") for _ in range(3)]
        began = time.monotonic()
        call(supervisor, b"die")
        errors = [failure(replies) for replies in waiting]
        assert time.monotonic() - began < 0.5
        assert {error.code for error in errors} == {"UNAVAILABLE"}
        until(lambda: supervisor.pid != first)
        until(lambda: call(supervisor, encode({"n": 1})).get(timeout=5.0) == encode({"n": 1}))


def test_calls_between_two_lives_fail_at_once(tmp_path: Path) -> None:
    with supervised(tmp_path) as supervisor:
        for _ in range(3):  # the second and later restarts wait a little
            failure(call(supervisor, b"die"))
            error = failure(call(supervisor, b"x"), 1.0)
            assert error.code == "UNAVAILABLE"
            until(lambda: call(supervisor, encode({})).get(timeout=5.0) == encode({}))


def test_a_call_without_an_answer_expires_and_a_silent_engine_is_replaced(tmp_path: Path) -> None:
    with supervised(tmp_path, times=QUICK) as supervisor:
        first = supervisor.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        assert failure(call(supervisor, b"x")).code == "DEADLINE_EXCEEDED"
        until(lambda: supervisor.pid != first)
        until(lambda: call(supervisor, encode({})).get(timeout=5.0) == encode({}))


def test_an_engine_that_does_not_read_blocks_nobody_for_long(tmp_path: Path) -> None:
    with supervised(tmp_path, times=QUICK) as supervisor:
        first = supervisor.pid
        waiting = [call(supervisor, b"stop reading")]
        began = time.monotonic()
        while supervisor.pid == first and time.monotonic() - began < 10.0:
            waiting.append(call(supervisor, b"x" * 1_000_000))
        assert time.monotonic() - began < 10.0
        for replies in waiting:
            failure(replies)


def test_stop_ends_the_process_and_answers_everybody(tmp_path: Path) -> None:
    with supervised(tmp_path) as supervisor:
        pid = supervisor.pid
        waiting = call(supervisor, b"no answer")
        supervisor.stop()
        assert failure(waiting).message == "the instance is being unloaded"
        assert failure(call(supervisor, b"x")).code == "UNAVAILABLE"
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)


def test_a_patient_supervisor_does_not_wait_and_tries_again(tmp_path: Path) -> None:
    with supervised(tmp_path, "crash", patient=True) as supervisor:
        first = supervisor.pid
        until(lambda: supervisor.pid not in (None, first))  # a first start that fails is not the last
        until(lambda: "before it was ready" in failure(call(supervisor, b"x")).message)
    hold = tmp_path / "engine.py.hold"
    hold.touch()
    with supervised(tmp_path, "wait", patient=True) as supervisor:
        assert "waits for other nodes" in failure(call(supervisor, b"x")).message
        hold.unlink()
        until(lambda: call(supervisor, b"x").get(timeout=5) == b"x")


def test_an_engine_that_waits_is_unloaded_at_once(tmp_path: Path) -> None:
    times = SupervisorTimes(start_s=60.0, stop_s=60.0)
    (tmp_path / "engine.py.hold").touch()
    with supervised(tmp_path, "wait", times, patient=True) as supervisor:
        until(lambda: supervisor.pid is not None)
        pid = supervisor.pid
        began = time.monotonic()
        supervisor.stop()
        assert time.monotonic() - began < 30.0
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)


def test_a_message_above_the_limit_does_not_reach_the_engine(tmp_path: Path) -> None:
    with supervised(tmp_path) as supervisor:
        pid = supervisor.pid
        with pytest.raises(ServingError, match="bytes, allowed are") as caught:
            decode_reply(call(supervisor, bytes(MAX_MESSAGE_BYTES + 1)).get(timeout=10))
        assert caught.value.code == "INVALID_ARGUMENT"
        assert decode_reply(call(supervisor, encode({"ok": True})).get(timeout=10))["ok"]
        assert supervisor.pid == pid
