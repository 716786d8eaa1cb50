"""The control connection of a pair: framed msgpack over TCP, authenticated when a secret is shared."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import msgpack

from distserve.transfer.errors import TransferError, bad_message, peer_gone, timed_out

VERSION = 1
LARGEST_FRAME = 1 << 18  # bytes; a handle of 1024 ranks with long names fits
LARGEST_GREETING = 256  # before the peer is known
TAG_BYTES = 16
DEAD_LINK_S = 5

Message = dict[str, Any]


class Control:
    """Both directions of one connection. `send` and `recv` take a deadline on `time.monotonic`.

    With keys every frame carries an HMAC over its content and its number in that direction.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._limit = LARGEST_GREETING
        self._send_key: bytes | None = None
        self._recv_key: bytes | None = None
        self._sent = 0
        self._received = 0
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # a cut link is noticed within DEAD_LINK_S, in use or idle
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_LINK_S * 1000)

    @property
    def local_host(self) -> str:
        """The address of this end: the interface that reaches the peer."""
        return str(self._socket.getsockname()[0])

    def unlock(self, send_key: bytes | None, recv_key: bytes | None) -> None:
        """The peer is known: full frame size from here on, tagged if there are keys."""
        self._limit = LARGEST_FRAME
        self._send_key, self._recv_key = send_key, recv_key

    def gone(self) -> bool:
        """Has the peer closed its end? Reads nothing, waits for nothing."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLRDHUP)
        except (OSError, ValueError):  # this end is closed
            return True
        return bool(poll.poll(0))

    def send(self, message: Message, deadline: float) -> None:
        """Raises `TransferError`: UNAVAILABLE if the peer is gone, DEADLINE_EXCEEDED."""
        body = msgpack.packb(message)
        if len(body) > self._limit:
            raise bad_message(f"message of {len(body)} bytes; allowed are {self._limit}")
        if self._send_key is not None:
            body += frame_tag(self._send_key, self._sent, body)
        self._sent += 1
        self._guarded(deadline, lambda: self._socket.sendall(struct.pack("!I", len(body)) + body))

    def recv(self, deadline: float) -> Message:
        """Raises `TransferError`: as `send`, and INVALID_ARGUMENT for anything that is no valid frame."""
        (size,) = struct.unpack("!I", self._read(4, deadline))
        tag = TAG_BYTES if self._recv_key is not None else 0
        if not tag < size <= self._limit + tag:
            raise bad_message(f"frame of {size} bytes; allowed are {tag + 1} to {self._limit + tag}")
        body = self._read(size, deadline)
        if self._recv_key is not None:
            body, given = body[:-tag], body[-tag:]
            if not hmac.compare_digest(given, frame_tag(self._recv_key, self._received, body)):
                raise TransferError(
                    "FAILED_PRECONDITION", "unauthenticated", "frame with a wrong authentication tag"
                )
        self._received += 1
        try:
            message = msgpack.unpackb(body)
        except (ValueError, msgpack.UnpackException) as error:
            raise bad_message(f"frame is not msgpack: {error}") from None
        if not isinstance(message, dict):
            raise bad_message(f"frame holds {type(message).__name__}; allowed is a map")
        return message

    def interrupt(self) -> None:
        """Ends the connection and wakes the thread that waits in `send` or `recv`; that thread closes. From
        any thread.
        """
        with contextlib.suppress(OSError):  # not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)

    def hand_over(self) -> tuple[socket.socket, bytes | None, bytes | None]:
        """The socket and the keys to send and to receive with, for who goes on with frames of its own.
        Nothing may have been sent with the keys; this object is of no more use.
        """
        return self._socket, self._send_key, self._recv_key

    def close(self) -> None:
        """By the thread that uses the connection. May be called twice."""
        self.interrupt()
        self._socket.close()

    def _read(self, size: int, deadline: float) -> bytes:
        buffer = bytearray(size)
        view = memoryview(buffer)
        while view:
            count = self._guarded(deadline, lambda: self._socket.recv_into(view))  # noqa: B023
            if count == 0:
                raise peer_gone("the peer closed the control connection")
            view = view[count:]
        return bytes(buffer)

    def _guarded(self, deadline: float, operation: Callable[[], Any]) -> Any:
        left = deadline - time.monotonic()
        if left <= 0:
            raise timed_out("control connection")
        try:
            self._socket.settimeout(left)
            return operation()
        except TimeoutError:
            raise timed_out("control connection") from None
        except OSError as error:
            raise peer_gone(f"control connection: {error}") from None


def connect(host: str, port: int, secret: bytes | None, deadline: float) -> Control:
    """Calls a KV source and proves knowledge of `secret` if there is one. Raises `TransferError`."""
    require_secret("address", host, secret)
    left = deadline - time.monotonic()
    if left <= 0:
        raise timed_out(f"connecting to {host}:{port}")
    try:
        sock = socket.create_connection((host, port), timeout=left)
    except TimeoutError:
        raise timed_out(f"connecting to {host}:{port}") from None
    except OSError as error:
        raise peer_gone(f"connecting to {host}:{port}: {error}") from None
    control = Control(sock)
    try:
        _greet(control, secret, deadline)
    except BaseException:
        control.close()
        raise
    return control


def welcome(control: Control, secret: bytes | None, deadline: float) -> None:
    """The other end of `connect`, on a connection that a listener accepted. Raises `TransferError`."""
    mine = secrets.token_bytes(16)
    control.send({"v": VERSION, "auth": secret is not None, "challenge": mine}, deadline)
    reply = control.recv(deadline)
    theirs = _challenge(reply)
    refusal = _refusal(reply, secret, _proof(secret, b"puller", mine, theirs))
    proof = _proof(secret, b"source", mine, theirs) if refusal is None else b""
    control.send({"refused": refusal, "proof": proof}, deadline)
    if refusal is not None:
        raise TransferError("FAILED_PRECONDITION", "unauthenticated", refusal)
    control.unlock(_key(secret, b"down", mine, theirs), _key(secret, b"up", mine, theirs))


def require_secret(field: str, host: str, secret: bytes | None) -> None:
    """Raises `TransferError` if `host` can be reached from other machines and no secret protects it."""
    if secret is None and not is_loopback(host):
        raise TransferError(
            "FAILED_PRECONDITION",
            "no_secret",
            f"{field}={host!r}: only loopback is allowed without a shared secret",
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may point anywhere


def _greet(control: Control, secret: bytes | None, deadline: float) -> None:
    greeting = control.recv(deadline)
    theirs, mine = _challenge(greeting), secrets.token_bytes(16)
    auth = secret is not None
    proof = _proof(secret, b"puller", theirs, mine)
    control.send({"v": VERSION, "auth": auth, "challenge": mine, "proof": proof}, deadline)
    reply = control.recv(deadline)
    refused = reply.get("refused")
    if refused is not None:
        raise TransferError(
            "FAILED_PRECONDITION", "unauthenticated", f"source: {str(refused)[:LARGEST_GREETING]}"
        )
    wrong = _refusal(greeting | reply, secret, _proof(secret, b"source", theirs, mine))
    if wrong is not None:
        raise TransferError("FAILED_PRECONDITION", "unauthenticated", wrong)
    control.unlock(_key(secret, b"up", theirs, mine), _key(secret, b"down", theirs, mine))


def _challenge(message: Message) -> bytes:
    challenge = message.get("challenge")
    if not isinstance(challenge, bytes) or len(challenge) != 16:
        raise bad_message("challenge: must be 16 bytes")
    return challenge


def _refusal(message: Message, secret: bytes | None, expected: bytes) -> str | None:
    if message.get("v") != VERSION:
        return f"v={message.get('v')!r}: allowed is {VERSION}"
    if message.get("auth") is not (secret is not None):
        return (
            f"auth={message.get('auth')!r}: this end has {'a' if secret is not None else 'no'} shared secret"
        )
    proof = message.get("proof")
    if not isinstance(proof, bytes) or not hmac.compare_digest(proof, expected):
        return "proof: the shared secrets differ"
    return None


def _proof(secret: bytes | None, side: bytes, first: bytes, second: bytes) -> bytes:
    return b"" if secret is None else _hmac(secret, b"proof" + side + first + second)


def _key(secret: bytes | None, direction: bytes, first: bytes, second: bytes) -> bytes | None:
    return None if secret is None else _hmac(secret, b"key" + direction + first + second)


def frame_tag(key: bytes, number: int, body: bytes) -> bytes:
    """What proves that frame `number` of a direction is from who has the key."""
    return _hmac(key, struct.pack("!Q", number) + body)[:TAG_BYTES]


def _hmac(key: bytes, content: bytes) -> bytes:
    return hmac.new(key, content, hashlib.sha256).digest()
