"""The I/O thread of an engine: calls in, replies out, events kept until they are acknowledged.

All state of the owners belongs to this thread. The loop thread hands over events and its load through
`publish`, and finds the owners' wishes in its inbox. Calls are answered at once, also during a long step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from distserve.engine.admission import Admission, entry_id
from distserve.engine.connection import FrameConnection
from distserve.engine.inbox import Inbox
from distserve.engine.ops import DropOwner, Manage, Op, Submit
from distserve.engine.owners import HeldPoll, OwnerLog, Owners
from distserve.engine.requests import Event, Owner
from distserve.engine.status import Load
from distserve.serving.schema import ServingError, decode, error_reply, ok_reply

_LOG = logging.getLogger(__name__)
MAX_IDS = 1 << 16
MAX_OWNER_CHARS = 256


class Mailbox:
    """Speaks the instance protocol (`distserve.serving.schema`) for one engine.

    `status` makes the fields of a status reply out of the last load, with the times of steps if they are
    asked for; it is called in the I/O thread.
    """

    def __init__(
        self,
        connection: FrameConnection,
        inbox: Inbox[Op],
        admission: Admission,
        status: Callable[[Load, bool], dict[str, Any]],
        load: Load,
        *,
        epoch: int,
        max_queue: int,
        heartbeat_s: float,
        owner_timeout_s: float,
        batch_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._inbox = inbox
        self._admission = admission
        self._status = status
        self._load = load
        self._epoch = epoch
        self._max_queue = max_queue
        self._heartbeat_s = heartbeat_s
        self._batch_tokens = batch_tokens
        self._clock = clock
        self._owners = Owners(owner_timeout_s)
        self._accepted = 0
        self._accepted_tokens = 0
        self._outbox: deque[list[Event]] = deque()
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)
        self._closing_at: float | None = None
        self._wanted = selectors.EVENT_READ
        self._thread = threading.Thread(target=self._run, name="engine-io", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def publish(self, events: list[Event], load: Load) -> None:
        """Hands over events and the state after them. Called by the loop thread; never blocks."""
        more_credits = load.credits > self._load.credits
        self._load = load
        if events:
            self._outbox.append(events)
        if events or more_credits:
            self._wake()

    def close(self, flush_s: float) -> None:
        """Answers held polls, sends what the stub takes within `flush_s`, ends the thread."""
        self._closing_at = self._clock() + flush_s
        self._wake()
        self._thread.join(flush_s + 1)
        self._connection.close()
        for end in (self._wake_read, self._wake_write):
            os.close(end)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._wake_read, selectors.EVENT_READ)
        selector.register(self._connection, selectors.EVENT_READ)
        try:
            while self._turn(selector):
                pass
        except (EOFError, ValueError) as error:
            self._inbox.stop(f"connection to the stub: {error}")
        except BaseException as error:
            self._inbox.stop(f"I/O thread: {error!r}")
            raise
        finally:
            selector.close()

    def _turn(self, selector: selectors.BaseSelector) -> bool:
        """Waits for something to happen and deals with it. False when closed and flushed."""
        now = self._clock()
        until = self._owners.next_deadline(now) if self._closing_at is None else self._closing_at
        for key, mask in selector.select(max(0.0, until - now)):
            if key.fd == self._wake_read:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            elif mask & selectors.EVENT_READ:
                for call_id, payload in self._connection.receive():
                    self._answer(call_id, payload)
        closing = self._closing_at  # after the wait, which `close` ends
        while self._outbox:
            self._owners.deliver(self._outbox.popleft())
        now = self._clock()
        hold_until = now if closing is None else float("inf")
        for log, poll in self._owners.due(hold_until, self._credits, self._batch_tokens):
            self._reply_events(log, poll.call_id)
        for owner in self._owners.expire(now):
            self._inbox.post(DropOwner(owner))
        flushed = self._connection.flush()
        wanted = selectors.EVENT_READ if flushed else selectors.EVENT_READ | selectors.EVENT_WRITE
        if wanted != self._wanted:
            selector.modify(self._connection, wanted)
            self._wanted = wanted
        return closing is None or not (flushed or now >= closing)

    def _answer(self, call_id: int, payload: bytes) -> None:
        try:
            reply = self._call(call_id, decode(payload))
        except ServingError as error:
            reply = error_reply(error)
        except Exception as error:  # a mistake of ours that one call has found must not cost all requests
            _LOG.exception("a call could not be answered")
            reply = error_reply(ServingError("INTERNAL", repr(error)))
        if reply is not None:
            self._connection.send(call_id, reply)

    def _call(self, call_id: int, call: dict[str, Any]) -> bytes | None:
        """The reply to one call, or None for a poll that is held."""
        op = call.get("op")
        if op == "status":
            return ok_reply(**self._status(self._current_load(), call.get("step_times") is True))
        if op not in ("submit", "poll", "cancel", "release", "renew"):
            raise ServingError(
                "INVALID_ARGUMENT", f"op={op!r}: must be status, submit, poll, cancel, release or renew"
            )
        log = self._enter(call)
        if op == "submit":
            return self._submit(log, call.get("requests"))
        if op == "poll":
            self._poll(log, call_id, call.get("ack", 0))
            return None
        ids = call.get("ids")
        if not isinstance(ids, list) or len(ids) > MAX_IDS or not all(isinstance(id, str) for id in ids):
            raise ServingError("INVALID_ARGUMENT", f"ids: must be a list of at most {MAX_IDS} strings")
        self._inbox.post(Manage(op, log.owner, tuple(ids)))
        return ok_reply()

    def _enter(self, call: Mapping[str, Any]) -> OwnerLog:
        name, epoch = call.get("owner"), call.get("epoch")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_OWNER_CHARS:
            raise ServingError(
                "INVALID_ARGUMENT", f"owner: must be a string of 1 to {MAX_OWNER_CHARS} characters"
            )
        if type(epoch) is not int:
            raise ServingError("INVALID_ARGUMENT", f"epoch={epoch!r}: must be an integer")
        held = self._owners.held_by(name)
        log, replaced = self._owners.enter(Owner(name, epoch), self._clock())
        if replaced is not None:
            self._inbox.post(DropOwner(replaced))
            self._supersede(held)
        return log

    def _supersede(self, held: HeldPoll | None) -> None:
        """Ends a held poll whose place another one takes."""
        if held is not None:
            self._connection.send(held.call_id, ok_reply(epoch=self._epoch, seq=0, events=[]))

    def _submit(self, log: OwnerLog, entries: Any) -> bytes:
        if not isinstance(entries, list) or len(entries) > MAX_IDS:
            raise ServingError("INVALID_ARGUMENT", f"requests: must be a list of at most {MAX_IDS} entries")
        results: list[dict[str, Any]] = []
        for id, entry in [(entry_id(entry), entry) for entry in entries]:
            try:
                self._take(log, id, entry)
                results.append({"id": id, "ok": True})
            except ServingError as error:
                results.append({"id": id, "ok": False, "error": error.to_wire()})
        return ok_reply(results=results)

    def _take(self, log: OwnerLog, id: str, entry: Mapping[str, Any]) -> None:
        if id in log.live or id in log.ended:
            return  # the reply to the first submit was lost
        queued = self._load.queued + self._accepted - self._load.taken
        if queued >= self._max_queue:
            raise ServingError(
                "RESOURCE_EXHAUSTED",
                f"the queue is full: {queued} requests wait, max_queue={self._max_queue}",
            )
        request = self._admission.admit(entry, log.owner, self._clock())
        log.live.add(id)
        log.silent = False
        log.told_credits = max(0, log.told_credits - request.work_tokens)
        self._accepted += 1
        self._accepted_tokens += request.work_tokens
        self._inbox.post(Submit(request))

    def _poll(self, log: OwnerLog, call_id: int, ack: Any) -> None:
        if type(ack) is not int:
            raise ServingError("INVALID_ARGUMENT", f"ack={ack!r}: must be an integer, the last seq seen")
        log.acknowledge(ack)
        self._supersede(log.held)
        now = self._clock()
        log.seen_s = now
        log.silent = log.silent and bool(log.events)
        log.held = HeldPoll(call_id, now + self._heartbeat_s)

    def _reply_events(self, log: OwnerLog, call_id: int) -> None:
        load = self._current_load()
        log.told_credits = load.credits
        events = log.unseen()
        seq = events[-1]["seq"] if events else log.seq
        self._connection.send(
            call_id, ok_reply(epoch=self._epoch, seq=seq, events=events, load=load.to_wire())
        )

    @property
    def _credits(self) -> int:
        return self._current_load().credits

    def _current_load(self) -> Load:
        """The loop's last load, with the submits that it has not taken out of its inbox yet."""
        load = self._load
        return load.plus(self._accepted - load.taken, self._accepted_tokens - load.taken_tokens)
