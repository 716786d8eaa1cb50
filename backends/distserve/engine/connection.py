"""The engine's end of the socket to its stub: frames without blocking."""

from __future__ import annotations

import socket
import struct
from collections import deque

import msgpack

from distserve.serving.frames import pack_frame
from distserve.serving.schema import MAX_MESSAGE_BYTES

_LENGTH = struct.Struct("<I")
_MAX_FRAME = MAX_MESSAGE_BYTES + 32
_READ_BYTES = 1 << 18


class FrameConnection:
    """Frames of `distserve.serving.frames` over a non-blocking socket. One thread only."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._incoming = bytearray()
        self._outgoing: deque[memoryview] = deque()

    def fileno(self) -> int:
        return self._sock.fileno()

    def receive(self) -> list[tuple[int, bytes]]:
        """The `(call id, payload)` of all frames that have arrived whole.

        Raises `EOFError` when the other side is gone, `ValueError` for a frame too long or malformed.
        """
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except ConnectionError as error:
            raise EOFError(str(error)) from error
        if not data:
            raise EOFError("the stub closed the connection")
        self._incoming += data
        frames = []
        while (body := self._next_body()) is not None:
            frame = msgpack.unpackb(body, raw=False)
            if not isinstance(frame, list) or len(frame) != 2 or not isinstance(frame[0], int):
                raise ValueError("frame is not [call_id, payload]")
            frames.append((frame[0], frame[1]))
        return frames

    def _next_body(self) -> bytes | None:
        if len(self._incoming) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._incoming)
        if size > _MAX_FRAME:
            raise ValueError(f"frame of {size} bytes, allowed are {_MAX_FRAME}")
        end = _LENGTH.size + size
        if len(self._incoming) < end:
            return None
        body = bytes(self._incoming[_LENGTH.size : end])
        del self._incoming[:end]
        return body

    def send(self, call_id: int, payload: bytes) -> None:
        """Queues a frame; `flush` sends it."""
        self._outgoing.append(memoryview(pack_frame(call_id, payload)))

    def flush(self) -> bool:
        """Sends what the socket takes. True if nothing is left. Raises `EOFError` if the stub is gone."""
        while self._outgoing:
            head = self._outgoing[0]
            try:
                sent = self._sock.send(head)
            except BlockingIOError:
                return False
            except OSError as error:
                raise EOFError(str(error)) from error
            if sent == len(head):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = head[sent:]
        return True

    def close(self) -> None:
        self._sock.close()
