"""Frames between an instance's stub and its engine process, over one socketpair.

A frame is a uint32 length (little endian) and that many bytes of msgpack ``[call_id, payload]``. Call id
0 is the connection's own: the stub's first frame is ``[0, EngineConfig as JSON]``, and the engine
answers ``[0, ok_reply(...)]`` when it can serve, or ``[0, error_reply(...)]`` with the reason before it
exits. Other ids are the stub's calls; the engine answers each once, in any order. End of file means that
the other side is gone.
"""

from __future__ import annotations

import socket
import struct

import msgpack

from distserve.serving.schema import MAX_MESSAGE_BYTES

CONTROL_CALL = 0
_LENGTH = struct.Struct("<I")
_OVERHEAD = 32


def pack_frame(call_id: int, payload: bytes) -> bytes:
    """One frame, ready to be sent in a single write."""
    body: bytes = msgpack.packb([call_id, payload], use_bin_type=True)
    return _LENGTH.pack(len(body)) + body


def receive_exactly(sock: socket.socket, size: int) -> bytes | None:
    """``size`` bytes, or None at end of file."""
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        count = sock.recv_into(view[have:])
        if count == 0:
            return None
        have += count
    return bytes(data)


def read_frame(sock: socket.socket) -> tuple[int, bytes] | None:
    """The next ``(call id, payload)`` of a blocking socket, or None when the other side is gone.

    Raises:
        ValueError: a frame that is too long or malformed; the connection is of no use afterwards.
    """
    head = receive_exactly(sock, _LENGTH.size)
    if head is None:
        return None
    (size,) = _LENGTH.unpack(head)
    if size > MAX_MESSAGE_BYTES + _OVERHEAD:
        raise ValueError(f"frame of {size} bytes, allowed are {MAX_MESSAGE_BYTES + _OVERHEAD}")
    body = receive_exactly(sock, size)
    if body is None:
        return None
    frame = msgpack.unpackb(body, raw=False)
    if not isinstance(frame, list) or len(frame) != 2 or not isinstance(frame[0], int):
        raise ValueError("frame is not [call_id, payload]")
    return frame[0], frame[1]
