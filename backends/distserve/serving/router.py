"""Who goes where: one queue, bound late to the instance with the least work."""

from __future__ import annotations

from collections import deque

from distserve.core.dispatch import Binding, bind_in_order
from distserve.core.order import Key, Ordering, insert
from distserve.serving.fleet import Fleet
from distserve.serving.link import InstanceLink
from distserve.serving.pace import DrainRate
from distserve.serving.schema import ServingError
from distserve.serving.session import Session


class Router:
    """Holds the sessions that no instance has: those before prefill, and those between prefill and decode.

    Args:
        max_queue, max_queue_tokens: sessions before prefill, and their prompts' tokens; more are refused.
        unavailable_after_s: how long a session waits for an instance that could serve it to come up.
        ordering: of the queue; first come, first served unless it says otherwise.
    """

    def __init__(
        self,
        fleet: Fleet,
        max_queue: int,
        max_queue_tokens: int,
        unavailable_after_s: float,
        ordering: Ordering | None = None,
    ) -> None:
        self.waiting_tokens = 0
        self.drain = DrainRate()
        self._fleet = fleet
        self._max_queue, self._max_queue_tokens = max_queue, max_queue_tokens
        self._unavailable_after_s = unavailable_after_s
        self._ordering = ordering or Ordering()
        self._queue: list[Session] = []
        self._handoffs: deque[Session] = deque()
        self._without_s: dict[int, float] = {}  # session's number -> since when nothing up could serve it

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def handoffs(self) -> int:
        return len(self._handoffs)

    def check_room(self, tokens: int) -> None:
        """Raises `ServingError` (RESOURCE_EXHAUSTED) if a prompt of so many tokens finds the queue full."""
        waiting, allowed = len(self._queue), self._max_queue
        if waiting >= allowed:
            raise _full(f"{waiting} requests wait, {allowed} may")
        waiting, allowed = self.waiting_tokens, self._max_queue_tokens
        if waiting and waiting + tokens > allowed:
            raise _full(f"{waiting} tokens of prompts wait, {allowed} may, {tokens} more are given")

    def enqueue(self, session: Session, now: float) -> None:
        """Raises `ServingError` (RESOURCE_EXHAUSTED) when the queue is full."""
        self.check_room(session.known_tokens)
        self._insert(session)
        self.dispatch(now)

    def requeue(self, session: Session, now: float) -> None:
        """Put back a session that had been dispatched, before all that came later than it."""
        session.state, session.last_sign_s = "queued", now
        self._insert(session)

    def tokens_ahead(self, session: Session) -> int:
        """Tokens of the prompts that go before a session that may not be queued yet."""
        above = self._fleet.pieces_above
        if above is not None and session.known_tokens <= above:
            ahead = [other for other in self._queue if other.known_tokens <= above]
        elif not self._queue or self._key(session) >= self._key(self._queue[-1]):
            return self.waiting_tokens
        else:
            ahead = self._queue
        own = self._key(session)
        return sum(other.known_tokens for other in ahead if self._key(other) <= own and other is not session)

    def hand_over(self, session: Session, now: float) -> None:
        self._handoffs.append(session)
        self._dispatch_handoffs(now)

    def leave_alone(self, link: InstanceLink, now: float, for_s: float) -> None:
        """Give the instance nothing for a while: it is full, or can't be reached."""
        self._fleet.avoid(link, now + for_s)

    def remove(self, session: Session) -> None:
        """Drop a session that has ended, wherever it waits."""
        self._without_s.pop(session.number, None)
        if session in self._queue:
            self._queue.remove(session)
            self.waiting_tokens -= session.known_tokens
        elif session in self._handoffs:
            self._handoffs.remove(session)

    def dispatch(self, now: float) -> None:
        """Bind all that can be bound now."""
        self._dispatch_handoffs(now)
        before = self.waiting_tokens
        bind_in_order(self._queue, lambda session, stuck: self._bind(session, stuck, now))
        self.drain.left(now, before - self.waiting_tokens, not self._queue)

    def _bind(self, session: Session, stuck: bool, now: float) -> Binding:
        known = session.known_tokens
        candidates = self._fleet.candidates(known, session.total_tokens)
        if not candidates:
            return Binding.PASSED
        in_pieces = any(choice.link.in_pieces(known) for choice in candidates)
        choice = None if in_pieces and stuck else self._fleet.pick_prefill(candidates, known, now)
        if choice is None:
            return Binding.LONG if in_pieces else Binding.BLOCKS
        self.waiting_tokens -= known
        self._without_s.pop(session.number, None)
        session.start_prefill(choice.link, choice.to_end)
        return Binding.BOUND

    def _dispatch_handoffs(self, now: float) -> None:
        for _ in range(len(self._handoffs)):
            session = self._handoffs.popleft()
            total = session.total_tokens
            link = self._fleet.pick_decode(total, now, session.instances.get("prefill"))
            if link is not None:
                self._without_s.pop(session.number, None)
                session.start_decode(link)
            elif not self._fleet.can_decode(total) and self._fleet.candidates(session.known_tokens, total):
                session.start_over()
                self.requeue(session, now)
            else:
                self._handoffs.append(session)

    def hopeless(self, now: float) -> list[tuple[Session, ServingError]]:
        """Sessions that no instance that is up could have served for too long."""
        lost: list[tuple[Session, ServingError]] = []
        for session in self._queue:
            possible = bool(self._fleet.candidates(session.known_tokens, session.total_tokens))
            if self._without_too_long(session, possible, now):
                lost.append((session, _unavailable("prefill and decode")))
        for session in self._handoffs:
            if self._without_too_long(session, self._fleet.can_decode(session.total_tokens), now):
                lost.append((session, _unavailable("decode")))
        return lost

    def _without_too_long(self, session: Session, possible: bool, now: float) -> bool:
        if possible:
            self._without_s.pop(session.number, None)
            return False
        return now - self._without_s.setdefault(session.number, now) > self._unavailable_after_s

    def _insert(self, session: Session) -> None:
        insert(self._queue, session, self._key)
        self.waiting_tokens += session.known_tokens

    def _key(self, session: Session) -> Key:
        arrival_s = session.times.arrival_s
        return self._ordering.key(session.priority, session.known_tokens, arrival_s, session.due_s)


def _full(how: str) -> ServingError:
    return ServingError("RESOURCE_EXHAUSTED", f"queue full: {how}; try again later")


def _unavailable(what: str) -> ServingError:
    return ServingError("UNAVAILABLE", f"no usable {what} instance; see the status operation")
