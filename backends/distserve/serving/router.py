"""Who goes where: one first-come-first-served queue, bound late to the instance with the least work."""

from __future__ import annotations

from collections import deque

from distserve.serving.fleet import Fleet
from distserve.serving.link import InstanceLink
from distserve.serving.schema import ServingError
from distserve.serving.session import Session

_FULL_PAUSE_S = 0.1


class Router:
    """Holds the sessions that no instance has: those before prefill, and those between prefill and decode."""

    def __init__(self, fleet: Fleet, max_queue: int, unavailable_after_s: float) -> None:
        self._fleet = fleet
        self._max_queue = max_queue
        self._unavailable_after_s = unavailable_after_s
        self._queue: deque[Session] = deque()
        self._handoffs: deque[Session] = deque()
        self._without_s: dict[str, float] = {}  # since when no instance of a kind is usable

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        return sum(session.known_tokens for session in self._queue)

    @property
    def handoffs(self) -> int:
        return len(self._handoffs)

    def enqueue(self, session: Session, now: float) -> None:
        """Raises `ServingError` (RESOURCE_EXHAUSTED) when the queue is full."""
        if len(self._queue) >= self._max_queue:
            raise ServingError(
                "RESOURCE_EXHAUSTED", f"queue is full: {len(self._queue)} requests wait, try again later"
            )
        self._queue.append(session)
        self.dispatch(now)

    def requeue(self, session: Session, now: float) -> None:
        """Put back a session that had been dispatched, before all that came later than it."""
        session.state, session.last_sign_s = "queued", now
        position = 0
        while position < len(self._queue) and self._queue[position].number < session.number:
            position += 1
        self._queue.insert(position, session)

    def hand_over(self, session: Session, now: float) -> None:
        self._handoffs.append(session)
        self._dispatch_handoffs(now)

    def leave_alone(self, link: InstanceLink, now: float) -> None:
        """The instance has just said that it is full."""
        self._fleet.avoid(link, now + _FULL_PAUSE_S)

    def remove(self, session: Session) -> None:
        """Drop a session that has ended, wherever it waits."""
        for waiting in (self._queue, self._handoffs):
            if session in waiting:
                waiting.remove(session)

    def dispatch(self, now: float) -> None:
        """Bind all that can be bound now; nothing overtakes the head of the queue."""
        self._dispatch_handoffs(now)
        while self._queue:
            head = self._queue[0]
            link = self._fleet.pick_prefill(head.known_tokens, head.total_tokens, now)
            if link is None:
                return
            self._queue.popleft()
            head.start_prefill(link)

    def _dispatch_handoffs(self, now: float) -> None:
        for _ in range(len(self._handoffs)):
            session = self._handoffs.popleft()
            link = self._fleet.pick_decode(session.total_tokens, now)
            if link is None:
                self._handoffs.append(session)
            else:
                session.start_decode(link)

    def hopeless(self, now: float) -> list[tuple[Session, ServingError]]:
        """Sessions that wait for a kind of instance of which none has been usable for too long."""
        lost: list[tuple[Session, ServingError]] = []
        if self._down_too_long("serving", self._fleet.ready, now):
            lost += [(session, _unavailable("prefill and decode")) for session in self._queue]
        if self._down_too_long("decode", self._fleet.decode_ready, now):
            lost += [(session, _unavailable("decode")) for session in self._handoffs]
        return lost

    def _down_too_long(self, kind: str, usable: bool, now: float) -> bool:
        if usable:
            self._without_s.pop(kind, None)
            return False
        return now - self._without_s.setdefault(kind, now) > self._unavailable_after_s


def _unavailable(what: str) -> ServingError:
    return ServingError("UNAVAILABLE", f"no usable {what} instance; see the status operation")
