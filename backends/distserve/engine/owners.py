"""The callers of an engine: their unseen events, their held polls, and what happens when they fall silent.

Pure bookkeeping, time is a parameter. Event logs are kept until acknowledged; sequence numbers begin at the
microsecond the log was made, so that a log made anew for the same owner never repeats a number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from distserve.engine.requests import Event, Owner
from distserve.serving.schema import ServingError

EVENTS_PER_REPLY = 8192
MAX_EVENTS = 1 << 18
ENDED_IDS = 4096
OLDER_EPOCHS = 16
FORGET_AFTER = 10
"""A silent owner's last events are kept for this many times the silence that it was given up for."""


@dataclass(frozen=True, slots=True)
class HeldPoll:
    call_id: int
    until_s: float


@dataclass(slots=True)
class OwnerLog:
    """One owner's events that are not acknowledged, and its ids."""

    owner: Owner
    seq: int
    seen_s: float
    events: deque[dict[str, Any]] = field(default_factory=deque)
    held: HeldPoll | None = None
    live: set[str] = field(default_factory=set)  # ids that more events may come for
    ended: dict[str, None] = field(default_factory=dict)  # the last ids of the others, oldest first
    older: tuple[int, ...] = ()
    silent: bool = False
    told_credits: int = 0

    def append(self, id: str, fields: dict[str, Any], last: bool) -> None:
        """Adds an event of a live id; others are over for the owner."""
        if id not in self.live:
            return
        self.seq += 1
        fields["seq"] = self.seq
        fields["id"] = id
        self.events.append(fields)
        if last:
            self.live.discard(id)
            self._remember(id)

    def acknowledge(self, seq: int) -> None:
        while self.events and self.events[0]["seq"] <= seq:
            self.events.popleft()

    def unseen(self) -> list[dict[str, Any]]:
        """The oldest events, as many as one reply takes."""
        return list(islice(self.events, EVENTS_PER_REPLY))

    def give_up(self, reason: ServingError) -> None:
        """Replaces everything by one error per live id: all that a caller that comes back has to know."""
        self.events.clear()
        self.silent = True
        for id in sorted(self.live):
            self.append(id, {"type": "finished", "reason": "error", "error": reason.to_wire()}, last=True)

    def _remember(self, id: str) -> None:
        self.ended[id] = None
        if len(self.ended) > ENDED_IDS:
            del self.ended[next(iter(self.ended))]


class Owners:
    """All callers. An owner is given up after `timeout_s` without a poll."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._logs: dict[str, OwnerLog] = {}

    def __len__(self) -> int:
        return len(self._logs)

    def enter(self, owner: Owner, now: float) -> tuple[OwnerLog, Owner | None]:
        """The owner's log, made if it is new, and the older epoch that it replaces.

        Raises `ServingError` (FAILED_PRECONDITION) for an epoch that has been replaced.
        """
        log = self._logs.get(owner.name)
        if log is not None and log.owner == owner:
            return log, None
        older: tuple[int, ...] = ()
        if log is not None:
            if owner.epoch in log.older:
                raise ServingError(
                    "FAILED_PRECONDITION",
                    f"epoch={owner.epoch}: owner '{owner.name}' has a newer one, {log.owner.epoch}",
                )
            older = (*log.older, log.owner.epoch)[-OLDER_EPOCHS:]
        self._logs[owner.name] = OwnerLog(owner, int(now * 1e6), now, older=older)
        return self._logs[owner.name], log.owner if log is not None else None

    def held_by(self, name: str) -> HeldPoll | None:
        """The poll that is held for an owner, whatever its epoch."""
        log = self._logs.get(name)
        return log.held if log is not None else None

    def deliver(self, events: Iterable[Event]) -> None:
        """Appends events to their owners' logs; those of owners replaced or forgotten are dropped."""
        for event in events:
            log = self._logs.get(event.owner.name)
            if log is not None and log.owner == event.owner:
                log.append(event.id, event.fields, event.last)

    def due(self, now: float, credits: int, batch_tokens: int) -> list[tuple[OwnerLog, HeldPoll]]:
        """Polls to answer now: with events, held long enough, or with news of work that can be taken.

        News is for an owner that was told of less than a batch, and a sixteenth of a batch more than that.
        """
        out = []
        for log in self._logs.values():
            poll = log.held
            if poll is None:
                continue
            told = log.told_credits
            news = told < batch_tokens and credits >= told + max(1, batch_tokens // 16)
            if log.events or now >= poll.until_s or news:
                log.held = None
                log.seen_s = now
                out.append((log, poll))
        return out

    def expire(self, now: float) -> list[Owner]:
        """Gives up owners that do not poll or do not acknowledge; returns those whose requests must end."""
        given_up = []
        for name, log in list(self._logs.items()):
            silence = now - log.seen_s
            overfull = len(log.events) > MAX_EVENTS
            if log.held is None and silence > self.timeout_s * FORGET_AFTER:
                del self._logs[name]
            elif not log.silent and (overfull or (log.held is None and silence > self.timeout_s)):
                why = (
                    f"{len(log.events)} events not acknowledged"
                    if overfull
                    else f"no poll for {silence:.0f} s"
                )
                log.give_up(ServingError("UNAVAILABLE", f"owner '{name}' was given up: {why}"))
                given_up.append(log.owner)
        return given_up

    def next_deadline(self, now: float) -> float:
        """When `due` or `expire` has something to do without an event, at the latest."""
        deadline = now + self.timeout_s
        for log in self._logs.values():
            patience = self.timeout_s * (FORGET_AFTER if log.silent else 1)
            end = log.held.until_s if log.held is not None else log.seen_s + patience
            deadline = min(deadline, max(end, now + 0.01))
        return deadline
