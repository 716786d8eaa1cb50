"""The control connection: frames, limits, deadlines, mutual authentication."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from distserve.transfer.control import LARGEST_FRAME, Control, connect, is_loopback, welcome
from distserve.transfer.errors import TransferError


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def pair() -> Iterator[tuple[Control, Control]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = Control(socket.create_connection(listener.getsockname()))
        right = Control(listener.accept()[0])
    for end in (left, right):
        end.unlock(None, None)
    yield left, right
    left.close()
    right.close()


def greet(source_secret: bytes | None, puller_secret: bytes | None) -> tuple[object, object]:
    """What each end got: a `Control` or the error."""
    results: list[object] = [None, None]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def source() -> None:
            control = Control(listener.accept()[0])
            try:
                welcome(control, source_secret, soon())
                results[0] = control
            except TransferError as error:
                results[0] = error
                control.close()

        thread = threading.Thread(target=source)
        thread.start()
        try:
            results[1] = connect("127.0.0.1", listener.getsockname()[1], puller_secret, soon())
        except TransferError as error:
            results[1] = error
        thread.join(5)
    return results[0], results[1]


def test_messages_arrive_in_both_directions(pair: tuple[Control, Control]) -> None:
    left, right = pair
    left.send({"a": b"1", "n": 2**40}, soon())
    left.send({"b": [1, "x", None]}, soon())
    assert right.recv(soon()) == {"a": b"1", "n": 2**40}
    right.send({}, soon())
    assert right.recv(soon()) == {"b": [1, "x", None]}
    assert left.recv(soon()) == {}


def test_a_deadline_ends_a_wait(pair: tuple[Control, Control]) -> None:
    start = time.monotonic()
    with pytest.raises(TransferError) as caught:
        pair[0].recv(soon(0.1))
    assert caught.value.code == "DEADLINE_EXCEEDED"
    assert time.monotonic() - start < 2


def test_a_deadline_holds_for_a_peer_that_sends_byte_by_byte(pair: tuple[Control, Control]) -> None:
    stop = threading.Event()

    def drip() -> None:
        while not stop.wait(0.02):
            pair[1]._socket.sendall(b"\0")

    thread = threading.Thread(target=drip)
    pair[1]._socket.sendall(struct.pack("!I", 1000))
    thread.start()
    try:
        with pytest.raises(TransferError) as caught:
            pair[0].recv(soon(0.3))
    finally:
        stop.set()
        thread.join(5)
    assert caught.value.code == "DEADLINE_EXCEEDED"


def test_a_closed_peer_is_seen_at_once(pair: tuple[Control, Control]) -> None:
    pair[1].close()
    with pytest.raises(TransferError) as caught:
        pair[0].recv(soon())
    assert caught.value.reason == "peer_gone"


def test_interrupt_wakes_a_waiting_thread(pair: tuple[Control, Control]) -> None:
    threading.Timer(0.1, pair[0].interrupt).start()
    start = time.monotonic()
    with pytest.raises(TransferError):
        pair[0].recv(soon(20))
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack("!I", LARGEST_FRAME + 1),
        struct.pack("!I", 0),
        struct.pack("!I", 1) + b"\xc1",
        struct.pack("!I", 1) + b"\x01",
        struct.pack("!I", 3) + b"\x81\xa1a",
    ],
    ids=["too large", "empty", "no msgpack", "no map", "cut short"],
)
def test_a_bad_frame_is_refused(pair: tuple[Control, Control], raw: bytes) -> None:
    pair[1]._socket.sendall(raw)
    with pytest.raises(TransferError) as caught:
        pair[0].recv(soon())
    assert caught.value.reason == "bad_message"


def test_an_oversized_message_is_not_sent(pair: tuple[Control, Control]) -> None:
    with pytest.raises(TransferError, match="allowed are"):
        pair[0].send({"x": b"0" * LARGEST_FRAME}, soon())


@pytest.mark.parametrize("secret", [None, b"s" * 40])
def test_equal_secrets_are_accepted(secret: bytes | None) -> None:
    source, puller = greet(secret, secret)
    assert isinstance(source, Control)
    assert isinstance(puller, Control)
    puller.send({"op": "x"}, soon())
    assert source.recv(soon()) == {"op": "x"}
    source.send({"op": "y"}, soon())
    assert puller.recv(soon()) == {"op": "y"}
    source.close()
    puller.close()


@pytest.mark.parametrize(("mine", "theirs"), [(b"a", b"b"), (None, b"b"), (b"a", None)])
def test_different_secrets_are_refused_at_both_ends(mine: bytes | None, theirs: bytes | None) -> None:
    for result in greet(mine, theirs):
        assert isinstance(result, TransferError)
        assert result.reason == "unauthenticated"
        assert "secret" in str(result)


def test_a_changed_or_repeated_frame_is_refused() -> None:
    source, puller = greet(b"k", b"k")
    assert isinstance(source, Control)
    assert isinstance(puller, Control)
    frames: list[bytes] = []

    class Tap:
        def settimeout(self, seconds: float) -> None: ...

        def sendall(self, data: bytes) -> None:
            frames.append(data)

    real = puller._socket
    puller._socket = Tap()  # type: ignore[assignment]
    puller.send({"op": "x"}, soon())
    puller._socket = real
    real.sendall(frames[0])
    assert source.recv(soon()) == {"op": "x"}
    real.sendall(frames[0])  # once more
    with pytest.raises(TransferError, match="authentication tag"):
        source.recv(soon())
    source.close()
    puller.close()


def test_a_source_that_does_not_know_the_secret_is_refused() -> None:
    """It copies the puller's own way of asking, but cannot prove anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def impostor() -> None:
            control = Control(listener.accept()[0])
            control.send({"v": 1, "auth": True, "challenge": b"0" * 16}, soon())
            reply = control.recv(soon())
            control.send({"refused": None, "proof": reply["proof"]}, soon())
            control.close()

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(TransferError, match="secrets differ"):
            connect("127.0.0.1", listener.getsockname()[1], b"k", soon())
        thread.join(5)


def test_whether_the_peer_has_closed_is_seen_without_reading(pair: tuple[Control, Control]) -> None:
    left, right = pair
    assert not left.gone()
    right.send({"a": 1}, soon())
    end = soon()
    while not left._socket.recv(1, socket.MSG_PEEK):
        assert time.monotonic() < end
    assert not left.gone()  # there is something to read
    assert left.recv(soon()) == {"a": 1}
    began = time.monotonic()
    assert not left.gone()
    assert time.monotonic() - began < 1.0
    right.close()
    while not left.gone():
        assert time.monotonic() < end


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("host", False),
    ],
)
def test_what_counts_as_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
