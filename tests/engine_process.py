"""A real engine process and a caller of its protocol, for tests of the engine without Triton."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from distserve.serving.frames import CONTROL_CALL, pack_frame, read_frame
from distserve.serving.schema import decode_reply, encode

READY_S = 180.0
CALL_S = 15.0


class EngineConnection:
    """Calls and replies over one socket; calls may overlap."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._calls = itertools.count(1)
        self._pending: dict[int, Future[bytes]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, op: str, **fields: Any) -> Future[bytes]:
        future: Future[bytes] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(EOFError("the engine is gone"))
                return future
            call_id = next(self._calls)
            self._pending[call_id] = future
            self._sock.sendall(pack_frame(call_id, encode({"op": op, **fields})))
        return future

    def call(self, op: str, **fields: Any) -> dict[str, Any]:
        return decode_reply(self.start(op, **fields).result(CALL_S))

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._reader.join(CALL_S)
        self._sock.close()

    def _read(self) -> None:
        try:
            while (frame := read_frame(self._sock)) is not None:
                self._pending.pop(frame[0]).set_result(frame[1])
        except OSError:
            pass
        with self._lock:
            self._closed = True
            for future in self._pending.values():
                future.set_exception(EOFError("the engine is gone"))


@dataclass
class Record:
    """What has arrived for one request."""

    events: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: str | None = None
    error: dict[str, str] | None = None

    def take(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        if event["type"] == "prefilled":
            self.tokens.append(event["token"])
            self.finished = event.get("finished")
        elif event["type"] == "token":
            self.tokens += event["tokens"]
        elif event["type"] == "finished":
            self.finished = event["reason"]
            self.error = event.get("error")

    def event(self, kind: str) -> dict[str, Any] | None:
        return next((event for event in self.events if event["type"] == kind), None)


class Caller:
    """One owner: submits, and polls in a thread."""

    def __init__(self, connection: EngineConnection, owner: str = "test", epoch: int = 1) -> None:
        self._connection = connection
        self.identity = {"owner": owner, "epoch": epoch}
        self.records: dict[str, Record] = defaultdict(Record)
        self.seqs: list[int] = []
        self._changed = threading.Condition()
        self._stop = False
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()

    def submit(self, *requests: dict[str, Any]) -> list[dict[str, Any]]:
        reply = self._connection.call("submit", requests=list(requests), **self.identity)
        results: list[dict[str, Any]] = reply["results"]
        return results

    def accept(self, *requests: dict[str, Any]) -> None:
        for result in self.submit(*requests):
            assert result["ok"], result

    def manage(self, op: str, *ids: str) -> None:
        self._connection.call(op, ids=list(ids), **self.identity)

    def wait(self, id: str, until: Callable[[Record], object], timeout_s: float = CALL_S) -> Record:
        with self._changed:
            record = self.records[id]
            assert self._changed.wait_for(lambda: until(record), timeout_s), f"{id}: {record}"
            return record

    def finish(self, id: str, timeout_s: float = CALL_S) -> Record:
        return self.wait(id, lambda record: record.finished, timeout_s)

    def stop(self) -> None:
        self._stop = True
        self._thread.join(CALL_S)

    def _poll(self) -> None:
        ack = 0
        while not self._stop:
            try:
                reply = self._connection.call("poll", ack=ack, **self.identity)
            except (EOFError, OSError):
                return
            with self._changed:
                for event in reply["events"]:
                    if event["seq"] > ack:
                        ack = event["seq"]
                        self.seqs.append(ack)
                        self.records[event["id"]].take(event)
                self._changed.notify_all()


class EngineProcess:
    """`python -m distserve.engine` with a configuration; `ready` is its first reply. A context manager."""

    def __init__(self, **config: Any) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "distserve.engine", "--fd", str(theirs.fileno())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        theirs.close()
        try:
            ours.settimeout(READY_S)
            ours.sendall(pack_frame(CONTROL_CALL, json.dumps(config).encode()))
            frame = read_frame(ours)
            assert frame is not None, "the engine ended without a reply"
            self.ready = decode_reply(frame[1])
            ours.settimeout(None)
        except BaseException:
            ours.close()
            self._end()
            raise
        self.connection = EngineConnection(ours)
        self.caller = Caller(self.connection)
        self._over = False

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._over:
            return
        status = self.close()
        assert error is not None or status == 0, f"the engine ended with status {status}"

    def status(self) -> dict[str, Any]:
        return self.connection.call("status")

    def settled(self, timeout_s: float = CALL_S) -> dict[str, Any]:
        """The status once all blocks are free and nothing is pending; fails if that does not come."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            pending = ("queued", "queued_tokens", "running", "leases", "transfers_pending")
            if status["blocks_free"] == status["blocks_total"] and not any(status[key] for key in pending):
                return status
            assert time.monotonic() < deadline, status
            time.sleep(0.02)

    def ended(self, timeout_s: float = 30.0) -> int:
        """Waits until the engine ends by itself; the exit status."""
        status = self.process.wait(timeout_s)
        self.close()
        self._over = True
        return status

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(CALL_S)

    def close(self) -> int:
        """Closes the socket, as a dying stub does; the exit status."""
        self.connection.close()
        self.caller.stop()
        return self._end()

    def _end(self) -> int:
        try:
            return self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(CALL_S)
            raise AssertionError("the engine did not end with its socket") from None
