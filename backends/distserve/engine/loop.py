"""The engine loop: drain what was asked, schedule, execute, book, tell."""

from __future__ import annotations

import heapq
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from distserve.core.batch import Batch, Item
from distserve.engine.inbox import Inbox
from distserve.engine.ops import DropOwner, Manage, Op, Pulled, Submit
from distserve.engine.requests import EngineRequest, Event, Owner
from distserve.engine.roles import Role
from distserve.engine.status import Counters, Load
from distserve.engine.steps import StepBuilder
from distserve.serving.schema import ServingError
from distserve.worker.executor import Executor
from distserve.worker.step import StepOutput, TokenLogprobs

logger = logging.getLogger(__name__)

MAX_FAILURES = 8
IDLE_S = 5.0


class Publisher(Protocol):
    """Where events go: the mailbox."""

    def publish(self, events: list[Event], load: Load) -> None: ...


class EngineFailure(RuntimeError):
    """The engine cannot go on."""


class EngineLoop:
    """Owns scheduler, blocks and requests of one instance; all happens in the thread that calls `run`."""

    def __init__(
        self,
        role: Role,
        executor: Executor,
        inbox: Inbox[Op],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = Counters()
        self._role = role
        self._executor = executor
        self._inbox = inbox
        self._clock = clock
        self._steps = StepBuilder()
        self._requests: dict[str, EngineRequest] = {}
        self._ids: dict[Owner, dict[str, str]] = defaultdict(dict)
        self._deadlines: list[tuple[float, str]] = []
        self._events: list[Event] = []
        self._taken = 0
        self._taken_tokens = 0
        self._idle = True
        self._failures = 0

    def run(self, publisher: Publisher) -> str:
        """Runs until the inbox is stopped; returns the reason. Raises `EngineFailure` if it can't go on."""
        while (reason := self._inbox.stopped) is None:
            self.turn(publisher)
        return reason

    def turn(self, publisher: Publisher) -> None:
        """At most one step. Sleeps first if the last turn found nothing to do."""
        ops = self._inbox.take(self._wait_s() if self._idle else 0.0)
        began = self._clock()
        for op in ops:
            self._handle(op)
        self._expire_deadlines(began)
        self._role.advance(began, self)
        batch = self._role.scheduler.schedule()
        for request in self._role.scheduler.preempted():
            self.counters.preemptions += 1
            logger.info("request %s preempted, %d tokens to recompute", request.id, request.known)
        self._publish(publisher)
        self._idle = batch is None
        if batch is not None:
            executed = self.counters.execute_s
            self._step(batch)
            self._publish(publisher)
            self.counters.loop_s += self._clock() - began - (self.counters.execute_s - executed)

    def load(self) -> Load:
        depth = self._role.depth()
        return Load(
            blocks_free=self._role.blocks.free,
            queued=depth.queued,
            queued_tokens=depth.queued_tokens,
            running=depth.running,
            leases=depth.leases,
            transfers_pending=depth.transfers_pending,
            credits=depth.credits,
            preemptions=self.counters.preemptions,
            taken=self._taken,
            taken_tokens=self._taken_tokens,
        )

    # -- what others asked for

    def _handle(self, op: Op) -> None:
        if isinstance(op, Submit):
            self._accept(op.request)
        elif isinstance(op, Manage):
            self._manage(op)
        elif isinstance(op, Pulled):
            failed = op.future.exception(0) is not None
            self.counters.transfers_failed += failed and op.key in self._requests  # else it was cancelled
            self._role.pulled(op, self)
        else:
            self._drop_owner(op)

    def _accept(self, state: EngineRequest) -> None:
        self._taken += 1
        self._taken_tokens += state.work_tokens
        self.counters.requests += 1
        self._requests[state.key] = state
        self._ids[state.owner][state.id] = state.key
        if state.deadline_s is not None:
            self._add_deadline(state.deadline_s, state.key)
        self._role.accept(state)

    def _manage(self, op: Manage) -> None:
        keys = self._ids.get(op.owner, {})
        states = [self._requests[keys[id]] for id in op.ids if id in keys]
        if op.kind == "renew":
            self._role.renew(states, self._clock())
            return
        for state in states:  # what is released before it was handed out is not wanted either
            self._cancel(state)

    def _drop_owner(self, op: DropOwner) -> None:
        for key in list(self._ids.get(op.owner, {}).values()):
            self._cancel(self._requests[key])

    def _cancel(self, state: EngineRequest) -> None:
        self._role.cancel(state)
        self.counters.cancelled += not state.handed_out
        self._finish(state, "cancelled")

    def _add_deadline(self, deadline_s: float, key: str) -> None:
        if len(self._deadlines) > 2 * len(self._requests) + 64:  # most of them are of requests that are over
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._requests]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline_s, key))

    def _expire_deadlines(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, key = heapq.heappop(self._deadlines)
            state = self._requests.get(key)
            if state is None or state.handed_out:
                continue
            self._role.cancel(state)
            self.failed(
                state,
                ServingError("DEADLINE_EXCEEDED", f"not finished {now - state.arrival_s:.3g} s after submit"),
            )

    def _wait_s(self) -> float:
        deadlines = [deadline for deadline in (self._role.next_deadline(),) if deadline is not None]
        if self._deadlines:
            deadlines.append(self._deadlines[0][0])
        return min(IDLE_S, max(0.0, min(deadlines) - self._clock())) if deadlines else IDLE_S

    # -- one step

    def _step(self, batch: Batch) -> None:
        """Executes and books a batch."""
        items = [*batch.decode_items(), *batch.prefill]
        sampling = [item for item in items if item.samples]
        step = self._steps.build(items, self._requests)
        began = self._clock()
        self.counters.step_began_s = began
        for item in batch.prefill:
            state = self._requests[item.request.id]
            if state.scheduled_s is None:
                state.scheduled_s = began
        try:
            output = self._executor.execute(step)
        except Exception as error:
            self._step_failed(batch, items, error)
            return
        finally:
            self.counters.step_began_s = None
        ended = self._clock()
        self._failures = 0
        self.counters.steps += 1
        self.counters.execute_s += ended - began
        self.counters.prompt_tokens += batch.prefill_tokens
        self._book(batch, sampling, output, ended)

    def _book(self, batch: Batch, sampling: Sequence[Item], output: StepOutput, now: float) -> None:
        """Appends the sampled tokens, ends what has ended, tells the owners."""
        states = [self._requests[item.request.id] for item in sampling]
        reasons: dict[str, str] = {}
        for state, token in zip(states, output.tokens, strict=True):
            reason = state.take_token(token)
            if reason is not None:
                reasons[state.key] = reason
        self._role.scheduler.complete(batch, [key for key, reason in reasons.items() if reason == "stop"])
        self.counters.output_tokens += len(states)
        for state, token, logprobs in zip(states, output.tokens, output.logprobs, strict=True):
            self._tell_token(state, token, logprobs, reasons.get(state.key), now)

    def _tell_token(
        self,
        state: EngineRequest,
        token: int,
        logprobs: TokenLogprobs | None,
        reason: str | None,
        now: float,
    ) -> None:
        if not state.announced:
            self._tell_first(state, token, logprobs, reason, now)
            return
        fields: dict[str, Any] = {"type": "token", "tokens": [token]}
        if logprobs is not None:
            fields["logprobs"] = [_logprob_entry(logprobs)]
        self._emit(state, fields)
        if reason is not None:
            self.counters.finished += 1
            self._finish(state, reason)

    def _tell_first(
        self,
        state: EngineRequest,
        token: int,
        logprobs: TokenLogprobs | None,
        reason: str | None,
        now: float,
    ) -> None:
        """The prompt is computed: `prefilled`, which may end the request or hand it out."""
        assert state.scheduled_s is not None
        state.announced = True
        state.started_s = now
        fields: dict[str, Any] = {
            "type": "prefilled",
            "token": token,
            "queue_s": state.scheduled_s - state.arrival_s,
            "prefill_s": now - state.scheduled_s,
        }
        if logprobs is not None:
            fields["logprob"] = _logprob_entry(logprobs)
        if reason is not None:
            fields["finished"] = reason
            self.counters.finished += 1
            self._emit(state, fields, last=True)
            self._forget(state)
            return
        handle = self._role.hand_out(state, now)
        if handle is not None:
            fields["handle"] = handle
            state.handed_out = True
            self._steps.leave(state.key)
        self._emit(state, fields, last=state.handed_out)

    def _step_failed(self, batch: Batch, items: Sequence[Item], error: Exception) -> None:
        """Every request of the batch ends with INTERNAL; the others go on."""
        logger.exception("a step of %d sequences failed", len(items))
        self.counters.failed_steps += 1
        self._failures += 1
        scheduler = self._role.scheduler
        states = [self._requests[item.request.id] for item in items]
        scheduler.complete(batch, [state.key for state in states])
        reason = ServingError("INTERNAL", f"the step failed: {type(error).__name__}: {str(error)[:500]}")
        for state in states:
            scheduler.cancel(state.key)  # pieces of a prompt are not ended by `complete`
            self.failed(state, reason)
        if self._failures >= MAX_FAILURES or _is_fatal(error):
            raise EngineFailure(
                f"{self._failures} steps failed in succession, the last with: {error}"
            ) from error

    # -- what the role reports

    def admitted(self, state: EngineRequest) -> None:
        state.admitted_s = self._clock()
        self._emit(state, {"type": "admitted", "queue_s": state.admitted_s - state.arrival_s})

    def started(self, state: EngineRequest, transfer: Pulled) -> None:
        stats = transfer.future.result(0)
        self.counters.transfers += 1
        self.counters.transfer_bytes += stats.bytes
        self.counters.transfer_wait_s += stats.wait_s
        self.counters.transfer_wire_s += stats.wire_s
        assert state.admitted_s is not None
        state.announced = True
        state.started_s = self._clock()
        fields = {
            "type": "started",
            "queue_s": state.admitted_s - state.arrival_s,
            "transfer_s": state.started_s - state.admitted_s,
        }
        self._emit(state, fields)

    def failed(self, state: EngineRequest, error: ServingError) -> None:
        self.counters.failed += 1
        logger.warning(
            "request %s of %s failed: %s: %s", state.id, state.owner.name, error.code, error.message
        )
        self._finish(state, "error", error)

    def gone(self, key: str) -> None:
        state = self._requests.get(key)
        if state is not None:
            self._forget(state)

    # -- telling

    def _finish(self, state: EngineRequest, reason: str, error: ServingError | None = None) -> None:
        """The last event, unless it has been sent; nothing of the request is kept."""
        fields: dict[str, Any] = {
            "type": "finished",
            "reason": reason,
            "preemptions": state.request.preemptions,
        }
        if error is not None:
            fields["error"] = error.to_wire()
        if state.started_s is not None:
            fields["decode_s"] = self._clock() - state.started_s
        if not state.handed_out:
            self._emit(state, fields, last=True)
        self._forget(state)

    def _emit(self, state: EngineRequest, fields: dict[str, Any], last: bool = False) -> None:
        self._events.append(Event(state.owner, state.id, fields, last))

    def _forget(self, state: EngineRequest) -> None:
        self._steps.leave(state.key)
        del self._requests[state.key]
        ids = self._ids[state.owner]
        if ids.get(state.id) == state.key:
            del ids[state.id]
        if not ids:
            del self._ids[state.owner]

    def _publish(self, publisher: Publisher) -> None:
        events, self._events = self._events, []
        publisher.publish(events, self.load())


def _logprob_entry(value: TokenLogprobs) -> dict[str, Any]:
    return {
        "logprob": value.chosen,
        "top_ids": list(value.top_ids),
        "top_logprobs": list(value.top_logprobs),
    }


def _is_fatal(error: Exception) -> bool:
    """A CUDA error other than lack of memory stays with the device's context: every later call fails, too."""
    text = str(error)
    return "CUDA error" in text and "out of memory" not in text
