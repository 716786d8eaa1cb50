"""Keeps the engine process of an instance running and carries calls to it, whatever they say."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distserve.serving import die_with_parent
from distserve.serving.frames import CONTROL_CALL, pack_frame, read_frame
from distserve.serving.schema import MAX_MESSAGE_BYTES, ServingError, decode_reply, error_reply

_LOG = logging.getLogger(__name__)
_BACKOFF_S = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_STABLE_S = 60.0  # an engine that lived this long starts again at the first back-off
_CHECK_S = 0.25
_TIMEVAL = struct.Struct("@ll")

Reply = Callable[[bytes], None]


@dataclass(frozen=True)
class SupervisorTimes:
    """Seconds."""

    start_s: float = 600.0  # from spawn to ready: loading weights
    call_s: float = 30.0  # without an answer, a call fails; above any heartbeat
    hang_s: float = 30.0  # calls wait and nothing comes: the engine is killed
    write_s: float = 5.0  # the engine does not read its socket: it is killed
    stop_s: float = 10.0  # from end of file to SIGKILL


@dataclass
class _Call:
    reply: Reply
    deadline_s: float


def engine_command(fd: int) -> list[str]:
    """How an engine is started; `fd` is its end of the socketpair."""
    return [sys.executable, "-m", "distserve.engine", "--fd", str(fd)]


def _guarded(command: Sequence[str]) -> list[str]:
    """The command, begun by a small program that ties its life to this process."""
    return [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), *command]


class Supervisor:
    """One engine process at a time, respawned when it ends.

    Args:
        config: EngineConfig as JSON, the engine's first frame.
        command: makes the argument list from the descriptor of the engine's end.
        times: deadlines.
        patient: the engine may have to wait for other nodes: `start` does not wait for it, and a first start
            that fails is tried again as any other.
    """

    def __init__(
        self,
        config: str,
        command: Callable[[int], Sequence[str]] = engine_command,
        times: SupervisorTimes | None = None,
        patient: bool = False,
    ) -> None:
        self._config, self._command = config, command
        self._times = times or SupervisorTimes()
        self._ids = itertools.count(CONTROL_CALL + 1)
        self._lock = threading.Lock()  # of the next four
        self._calls: dict[int, _Call] = {}
        self._sock: socket.socket | None = None  # of an engine that is ready
        self._reason = "the engine is starting"
        self._heard_s = 0.0
        self._send_lock = threading.Lock()
        self._stopping = threading.Event()
        self._first = threading.Event()  # the first start has succeeded or failed
        self._first_error: ServingError | None = None
        if patient:
            self._reason = "the engine waits for other nodes, or is starting"
            self._first.set()
        self._process: subprocess.Popen[bytes] | None = None
        # The engine dies with the thread that spawned it (PR_SET_PDEATHSIG), so this one outlives it.
        self._thread = threading.Thread(target=self._run, name="engine-supervisor", daemon=True)

    @property
    def pid(self) -> int | None:
        process = self._process
        return process.pid if process is not None else None

    def start(self) -> None:
        """Returns once the engine is ready (see `patient`).

        Raises:
            ServingError: the engine refused its configuration or ended; it is not tried again.
        """
        self._thread.start()
        self._first.wait(self._times.start_s + self._times.stop_s)
        if self._first_error is not None:
            raise self._first_error

    def call(self, payload: bytes, reply: Reply) -> None:
        """Send a call; ``reply`` gets the answer, or an error reply, exactly once and from any thread."""
        if len(payload) > MAX_MESSAGE_BYTES:  # the engine would take the frame for a broken connection
            message = f"message of {len(payload)} bytes, allowed are {MAX_MESSAGE_BYTES}"
            reply(error_reply(ServingError("INVALID_ARGUMENT", message)))
            return
        call_id = next(self._ids)
        with self._lock:
            sock, process, reason = self._sock, self._process, self._reason
            if sock is not None:
                self._calls[call_id] = _Call(reply, time.monotonic() + self._times.call_s)
                if len(self._calls) == 1:
                    self._heard_s = time.monotonic()
        if sock is None:
            reply(error_reply(ServingError("UNAVAILABLE", reason)))
            return
        try:
            with self._send_lock:
                sock.sendall(pack_frame(call_id, payload))
        except OSError as error:
            # half a frame may be out: the connection is of no use, and its end fails all calls, this one too
            _LOG.error("engine: can't be written to (%s)", error)
            _kill(process)

    def stop(self) -> None:
        """End the engine: end of file first, SIGKILL when it takes too long. Calls in flight fail."""
        self._stopping.set()
        with self._lock:
            sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        self._thread.join(self._times.stop_s)
        if self._thread.is_alive():
            _kill(self._process)
            self._thread.join(self._times.stop_s)

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            began_s = time.monotonic()
            error = self._run_once()
            if not self._first.is_set():  # the model's load fails with the engine's own words
                self._first_error = error
                self._first.set()
                return
            if self._stopping.is_set():
                return
            failures = 0 if time.monotonic() - began_s > _STABLE_S else failures + 1
            pause_s = _BACKOFF_S[min(max(failures - 1, 0), len(_BACKOFF_S) - 1)]
            _LOG.error("engine: %s; starting it again in %.1f s", error.message, pause_s)
            self._stopping.wait(pause_s)

    def _run_once(self) -> ServingError:
        """One life of an engine, from spawn to end; returns why it ended."""
        ours, theirs = socket.socketpair()
        with ours:
            try:
                with theirs:
                    process = subprocess.Popen(
                        _guarded(self._command(theirs.fileno())),
                        stdin=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                        close_fds=True,
                    )
            except OSError as error:
                return ServingError("INTERNAL", f"the engine can't be started: {error}")
            self._process = process
            try:
                reason = self._serve(ours)
            except (OSError, ValueError) as error:
                reason = ServingError("UNAVAILABLE", f"connection to the engine failed: {error}")
            except ServingError as error:  # not ready: it said why
                reason = error
            if self._stopping.is_set():
                reason = ServingError("UNAVAILABLE", "the instance is being unloaded")
            self._fail_calls(reason)  # before the wait: clients learn at once
        return self._reap(process, reason)

    def _serve(self, sock: socket.socket) -> ServingError:
        """Handshake, then replies until end of file."""
        write_s = int(self._times.write_s)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(write_s, 0))
        sock.sendall(pack_frame(CONTROL_CALL, self._config.encode()))
        self._handshake(sock)
        # from here on a frame that has begun must come to its end
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(write_s, 0))
        with self._lock:
            self._sock, self._heard_s = sock, time.monotonic()
        self._first.set()
        while True:
            if self._readable(sock, _CHECK_S):
                frame = read_frame(sock)
                if frame is None:
                    return ServingError("UNAVAILABLE", "the engine has ended")
                self._answer(*frame)
            self._expire_calls()

    def _handshake(self, sock: socket.socket) -> None:
        end = time.monotonic() + self._times.start_s
        while not self._readable(sock, _CHECK_S):
            if self._stopping.is_set():
                _kill(self._process)  # it has no request that it could end in peace
                raise ServingError("UNAVAILABLE", "the instance is being unloaded")
            if time.monotonic() > end:
                raise ServingError("UNAVAILABLE", f"the engine was not ready after {self._times.start_s:g} s")
        frame = read_frame(sock)
        if frame is None:
            raise ServingError("UNAVAILABLE", "the engine has ended before it was ready")
        decode_reply(frame[1])

    @staticmethod
    def _readable(sock: socket.socket, timeout_s: float) -> bool:
        return bool(select.select([sock], [], [], timeout_s)[0])

    def _answer(self, call_id: int, payload: bytes) -> None:
        with self._lock:
            call = self._calls.pop(call_id, None)
            self._heard_s = time.monotonic()
        if call is not None:  # else it had expired
            call.reply(payload)

    def _expire_calls(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [call_id for call_id, call in self._calls.items() if call.deadline_s < now]
            expired = [self._calls.pop(call_id) for call_id in late]
            hangs = bool(expired) and now - self._heard_s > self._times.hang_s
        for call in expired:
            message = f"the engine has not answered within {self._times.call_s:g} s"
            call.reply(error_reply(ServingError("DEADLINE_EXCEEDED", message)))
        if hangs:
            _LOG.error("engine: silent for %.0f s", self._times.hang_s)
            _kill(self._process)

    def _fail_calls(self, reason: ServingError) -> None:
        with self._lock:
            again = "" if self._stopping.is_set() else "; it is being started again"
            self._sock, self._reason = None, reason.message + again
            calls, self._calls = self._calls, {}
        for call in calls.values():
            call.reply(error_reply(ServingError("UNAVAILABLE", reason.message)))

    def _reap(self, process: subprocess.Popen[bytes], reason: ServingError) -> ServingError:
        """Waits for the end of a process whose socket is closed."""
        try:
            code = process.wait(self._times.stop_s)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        if reason.code == "UNAVAILABLE":
            how = f"signal {-code}" if code < 0 else f"code {code}"
            return ServingError(reason.code, f"{reason.message} ({how})")
        return reason


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None and process.poll() is None:
        process.kill()
