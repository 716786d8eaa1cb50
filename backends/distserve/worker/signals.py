"""One-byte signals between processes of one host: what is ready, and whether the other side still lives."""

from __future__ import annotations

import contextlib
import socket
import struct

from distserve.worker.parallel import RankLost

_TIMEVAL = struct.Struct("@ll")


class Signals:
    """One end of a socketpair. The order of a signal and of writes to shared memory is the kernel's business:
    what was written before `send` is seen after `wait`.
    """

    def __init__(self, fd: int, peer: str, timeout_s: float, spins: int = 0) -> None:
        """Takes over `fd`. `spins`: looks at the socket before `wait` sleeps, a microsecond each."""
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(True)
        whole = int(timeout_s)
        limit = _TIMEVAL.pack(whole, int((timeout_s - whole) * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._peer = peer
        self._timeout_s = timeout_s
        self._spins = spins

    def send(self) -> None:
        """Raises `RankLost` if the other side is gone."""
        try:
            self._socket.send(b"\0")
        except OSError as error:
            raise RankLost(f"{self._peer} is gone ({error})") from None

    def wait(self) -> None:
        """Until one signal has come. Raises `RankLost` when the other side is gone, or at the deadline."""
        for _ in range(self._spins):
            with contextlib.suppress(BlockingIOError):
                return self._check(self._receive(socket.MSG_DONTWAIT))
        try:
            self._check(self._receive(0))
        except BlockingIOError:
            raise RankLost(f"{self._peer} has not answered within {self._timeout_s:g} s") from None

    def _receive(self, flags: int) -> bytes:
        try:
            return self._socket.recv(1, flags)
        except ConnectionError as error:
            raise RankLost(f"{self._peer} is gone ({error})") from None

    def _check(self, received: bytes) -> None:
        if not received:
            raise RankLost(f"{self._peer} is gone")

    def close(self) -> None:
        self._socket.close()
