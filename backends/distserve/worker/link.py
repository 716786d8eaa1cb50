"""Frames of bytes between the leader of an instance and one of its other ranks."""

from __future__ import annotations

import hmac
import select
import socket
import struct
import threading
import time
from collections import deque

from distserve.transfer.control import TAG_BYTES, Control, frame_tag

_LENGTH = struct.Struct("<I")
_TIMEVAL = struct.Struct("@ll")
_READ_BYTES = 1 << 18
LARGEST_FRAME = 1 << 28


class Link:
    """A stream socket. Any thread may send, one thread receives.

    Whoever is at the other end belongs to the same instance, so a frame is trusted; one that cannot be taken
    off our hands within `send_timeout_s` ends the link. Between hosts every frame carries a tag that depends
    on its number; the keys are of one connection.
    """

    def __init__(
        self,
        sock: socket.socket,
        send_timeout_s: float,
        send_key: bytes | None = None,
        receive_key: bytes | None = None,
    ) -> None:
        sock.setblocking(True)
        self._socket = sock
        self.limit(send_timeout_s)
        self._send_key, self._receive_key = send_key, receive_key
        self._sent = self._received = 0
        self._lock = threading.Lock()
        self._incoming = bytearray()
        self._frames: deque[bytes] = deque()

    @classmethod
    def over(cls, control: Control, send_timeout_s: float) -> Link:
        """Goes on with a connection on which both ends have proved that they know the secret."""
        sock, send_key, receive_key = control.hand_over()
        return cls(sock, send_timeout_s, send_key, receive_key)

    def limit(self, send_timeout_s: float) -> None:
        whole = int(send_timeout_s)
        limit = _TIMEVAL.pack(whole, int((send_timeout_s - whole) * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        """Raises `OSError` if the other side is gone or does not read."""
        with self._lock:
            if self._send_key is not None:
                frame += frame_tag(self._send_key, self._sent, frame)
                self._sent += 1
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next frame. None waits until there is one or the other side ends.

        Raises `EOFError` when the other side is gone, `TimeoutError`.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._frames:
            if until is not None:
                poll = select.poll()
                poll.register(self._socket, select.POLLIN)
                if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                    raise TimeoutError
            self._frames.extend(self.read())
        return self._frames.popleft()

    def read(self) -> list[bytes]:
        """The frames that one read of the socket completes; waits for it to have something.

        Raises `EOFError` when the other side is gone, or what came is not from it.
        """
        try:
            data = self._socket.recv(_READ_BYTES)
        except OSError as error:  # between hosts also: no answer for `control.DEAD_LINK_S`
            raise EOFError(str(error)) from None
        if not data:
            raise EOFError("closed by the other side")
        buffer = self._incoming
        buffer += data
        frames = []
        while len(buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(buffer)
            if size > LARGEST_FRAME:
                raise EOFError(f"frame of {size} bytes, allowed are {LARGEST_FRAME}")
            end = _LENGTH.size + size
            if len(buffer) < end:
                break
            frames.append(self._checked(bytes(buffer[_LENGTH.size : end])))
            del buffer[:end]
        return frames

    def _checked(self, frame: bytes) -> bytes:
        if self._receive_key is None:
            return frame
        body, tag = frame[:-TAG_BYTES], frame[-TAG_BYTES:]
        if not hmac.compare_digest(tag, frame_tag(self._receive_key, self._received, body)):
            raise EOFError("frame with a wrong authentication tag")
        self._received += 1
        return body

    def end(self) -> None:
        """The other side, and a thread that receives here, find the end of the file. From any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already

    def close(self) -> None:
        self._socket.close()
