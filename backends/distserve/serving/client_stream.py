"""From the event loop to the client: messages of many requests over a few threads, in order per request.

A `send` of Triton is a blocking round trip, so it has no place on the event loop. While one is under
way, what comes for the same request is joined: a client slower than the tokens gets fewer, longer
messages.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import triton_python_backend_utils as pb_utils

from distserve.serving.chunk import Chunk
from distserve.serving.responses import Outputs
from distserve.serving.schema import ServingError
from distserve.serving.session import Session

_LOG = logging.getLogger(__name__)
_CODES = {
    "INVALID_ARGUMENT": "INVALID_ARG",
    "UNAVAILABLE": "UNAVAILABLE",
    "NOT_FOUND": "NOT_FOUND",
    "CANCELLED": "CANCELLED",
    "RESOURCE_EXHAUSTED": "UNAVAILABLE",
    "DEADLINE_EXCEEDED": "UNAVAILABLE",
}


class Flushable(Protocol):
    def flush(self) -> None: ...

    def log_ids(self) -> Mapping[str, str]:
        """What a line of log about it has in `extra`."""


class Lanes:
    """A few sender threads. What one request puts in always meets the same thread, which keeps its order."""

    def __init__(self, count: int) -> None:
        self._queues: list[queue.SimpleQueue[Flushable | None]] = [queue.SimpleQueue() for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=f"lane-{i}", daemon=True)
            for i, lane in enumerate(self._queues)
        ]
        self._next = 0
        for thread in self._threads:
            thread.start()

    def assign(self) -> queue.SimpleQueue[Flushable | None]:
        """The lane of a new request."""
        self._next = (self._next + 1) % len(self._queues)
        return self._queues[self._next]

    def close(self, timeout_s: float) -> None:
        """Send what is queued, then end the threads."""
        for lane in self._queues:
            lane.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    @staticmethod
    def _run(lane: queue.SimpleQueue[Flushable | None]) -> None:
        while (stream := lane.get()) is not None:
            try:
                stream.flush()
            except Exception:  # of one client's send; the others go on
                _LOG.exception("a response could not be sent", extra=stream.log_ids())


class ClientStream:
    """The `Sink` of one Triton request.

    Args:
        sender: the request's response sender.
        lane: where to queue for sending.
        on_end: called, from the lane, after the final response.
    """

    def __init__(
        self, sender: Any, lane: queue.SimpleQueue[Flushable | None], on_end: Callable[[ClientStream], None]
    ) -> None:
        self._sender, self._lane, self._on_end = sender, lane, on_end
        self.client_id = ""  # the client's own word for it
        self.build: Callable[[Chunk], Outputs] | None = None  # set before the first chunk
        self.session: Session | None = None  # once it is admitted
        self._lock = threading.Lock()  # of the next two
        self._chunk: Chunk | None = None
        self._ending: ServingError | Outputs | None = None
        self._sender_lock = threading.Lock()  # no question to Triton after the final response
        self._ended = False

    # on the event loop

    def send(self, chunk: Chunk) -> None:
        with self._lock:
            waiting = self._chunk
            if waiting is None:
                self._chunk = chunk
            else:
                waiting.extend(chunk)
        if waiting is None:
            self._lane.put(self)

    def fail(self, error: ServingError) -> None:
        self._end(error)

    def answer(self, outputs: Outputs) -> None:
        """One response that is not a generation's."""
        self._end(outputs)

    def _end(self, ending: ServingError | Outputs) -> None:
        with self._lock:
            self._ending = ending
        self._lane.put(self)

    # on other threads

    def cancelled(self) -> bool:
        """Has the client gone? A round trip to the server."""
        with self._sender_lock:
            return not self._ended and bool(self._sender.is_cancelled())

    def flush(self) -> None:
        """Send what has gathered. Only called by the lane's thread."""
        with self._lock:
            chunk, self._chunk = self._chunk, None
            ending, self._ending = self._ending, None
        if self._ended:
            return
        if chunk is not None:
            assert self.build is not None
            self._respond(self.build(chunk), final=chunk.final is not None)
        if ending is not None and not self._ended:
            if isinstance(ending, ServingError):
                self._respond_error(ending)
            else:
                self._respond(ending, final=True)

    def log_ids(self) -> Mapping[str, str]:
        ids = {"client_id": self.client_id, "request": self.session.id if self.session is not None else ""}
        return {name: value for name, value in ids.items() if value}

    def _respond(self, outputs: Outputs, final: bool) -> None:
        # named locals outlive send(): Triton 24.10 drops what only C++ refers to without holding the GIL
        tensors = [pb_utils.Tensor(name, value) for name, value in outputs.items()]
        response = pb_utils.InferenceResponse(tensors)
        self._send(response, final)

    def _respond_error(self, error: ServingError) -> None:
        # in a stream Triton drops the status of an error: the code goes into the text as well
        code = getattr(
            pb_utils.TritonError, _CODES.get(error.code, "INTERNAL"), pb_utils.TritonError.INTERNAL
        )
        failure = pb_utils.TritonError(f"{error.code}: {error.message}", code)
        response = pb_utils.InferenceResponse(error=failure)
        self._send(response, final=True)

    def _send(self, response: Any, final: bool) -> None:
        if not final:
            self._sender.send(response)
            return
        with self._sender_lock:
            self._ended = True
            try:
                self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            finally:
                self._on_end(self)
