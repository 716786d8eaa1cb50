"""The engine loop: drain what was asked, schedule, execute, book, tell."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

from distserve.core.batch import Batch
from distserve.core.scheduler import ContinuousBatching
from distserve.engine import events
from distserve.engine.flights import Flight, Flights
from distserve.engine.inbox import Inbox
from distserve.engine.ledger import Ledger
from distserve.engine.ops import Manage, Op, Pulled, Submit
from distserve.engine.requests import EngineRequest, Event
from distserve.engine.roles import Role
from distserve.engine.status import Counters, Load
from distserve.engine.step_times import StepTimes
from distserve.engine.steps import StepBuilder
from distserve.serving.schema import ServingError
from distserve.worker.executor import Executor
from distserve.worker.parallel import RankLost
from distserve.worker.step import StepOutput, TokenLogprobs

logger = logging.getLogger(__name__)

MAX_FAILURES = 8
IDLE_S = 5.0
LAG_S = 60.0  # a wait for a step that is in flight; the device ends it, or an error does


class Publisher(Protocol):
    """Where events go: the mailbox."""

    def publish(self, events: list[Event], load: Load) -> None: ...


class EngineFailure(RuntimeError):
    """The engine cannot go on."""


class EngineLoop:
    """Owns scheduler, blocks and requests of one instance; all happens in the thread that calls `run`.

    With several pipeline stages up to `executor.depth` steps and `role.ahead` more are in flight. What is
    asked of a request in flight (to cancel it, its deadline) is done once its step has been booked.

    An executor with `lag` begins a decode step before the tokens of the one before are known here. Such a
    step is booked with the scheduler when it begins, as its counts do not depend on the tokens; a request
    that turns out to have ended has then been computed once too often.
    """

    def __init__(
        self,
        role: Role,
        executor: Executor,
        inbox: Inbox[Op],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = Counters()
        self.step_times = StepTimes()
        self._role = role
        self._executor = executor
        self._inbox = inbox
        self._clock = clock
        self._ledger = Ledger()
        self._steps = StepBuilder()
        self._events: list[Event] = []
        self._flights = Flights()
        self._landed_s = self._landed_cpu_s = 0.0  # when a step ended last
        self._idle = True
        self._failures = 0  # in succession

    def run(self, publisher: Publisher) -> str:
        """Runs until the inbox is stopped; returns the reason.

        Raises `EngineFailure` or `RankLost` if it can't go on, after all requests have been failed.
        """
        try:
            while (reason := self._inbox.stopped) is None:
                self.turn(publisher)
        except (EngineFailure, RankLost) as error:
            unavailable = ServingError("UNAVAILABLE", f"the engine starts again: {error}")
            for state in list(self._ledger.by_key.values()):
                self.failed(state, unavailable)
            self._publish(publisher)
            raise
        return reason

    def turn(self, publisher: Publisher) -> None:
        """Begins at most one step, books those that have ended. Sleeps first if the last turn found nothing
        to do.
        """
        ops = self._inbox.take(self._wait_s() if self._idle else 0.0)
        began, executed = self._clock(), self.counters.execute_s
        for op in ops:
            self._handle(op)
        self._expire(began)
        self._collect()
        self._role.advance(began, self)
        batch = self._schedule()
        self._publish(publisher)
        if batch is not None:
            self._step(batch)
            self._collect()
            self._publish(publisher)
        elif self._executor.lag and self._flights:
            self._collect(LAG_S)  # nothing can begin before it has ended
            self._publish(publisher)
        self._idle = batch is None and not (self._executor.lag and self._flights)
        if batch is not None or self._flights:
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
            prefill_steps=self.counters.prefill_steps,
            prefill_tokens=self.counters.prompt_tokens,
            prefill_us=int(self.counters.prefill_s * 1e6),
            taken=self.counters.requests,
            taken_tokens=self.counters.submitted_tokens,
        )

    # -- what others ask for

    def _handle(self, op: Op) -> None:
        if isinstance(op, Submit):
            self._accept(op.request)
        elif isinstance(op, Manage):
            self._manage(op)
        elif isinstance(op, Pulled):
            failed = op.future.exception(0) is not None
            self.counters.transfers_failed += failed and op.key in self._ledger.by_key  # else: cancelled
            self._role.pulled(op, self)
        else:
            for state in self._ledger.of(op.owner):
                self._cancel(state)

    def _accept(self, state: EngineRequest) -> None:
        self.counters.requests += 1
        self.counters.submitted_tokens += state.work_tokens
        self._ledger.add(state)
        self._role.accept(state)

    def _manage(self, op: Manage) -> None:
        states = self._ledger.find(op.owner, op.ids)
        if op.kind == "renew":
            self._role.renew(states, self._clock())
            return
        for state in states:  # what is released before it was handed out is not wanted either
            self._cancel(state)

    def _cancel(self, state: EngineRequest) -> None:
        if state.key in self._flights:
            self._flights.doom(state.key, None)
            return
        self._role.cancel(state)
        self.counters.cancelled += not state.handed_out
        self._finish(state, "cancelled")

    def _expire(self, now: float) -> None:
        for state in self._ledger.overdue(now):
            if state.handed_out:
                continue  # its lease has a time of its own
            waited = now - state.arrival_s
            self._abort(state, ServingError("DEADLINE_EXCEEDED", f"not finished {waited:.3g} s after submit"))

    def _abort(self, state: EngineRequest, error: ServingError) -> None:
        if state.key in self._flights:
            self._flights.doom(state.key, error)
            return
        self._role.cancel(state)
        self.failed(state, error)

    def _wait_s(self) -> float:
        wanted = (self._role.next_deadline(), self._ledger.next_deadline())
        deadlines = [deadline for deadline in wanted if deadline is not None]
        return min(IDLE_S, max(0.0, min(deadlines) - self._clock())) if deadlines else IDLE_S

    # -- one step

    def _schedule(self) -> Batch | None:
        """The next batch, unless as many are in flight as keep the executor busy."""
        if len(self._flights) >= self._executor.depth + self._role.ahead and not self._may_run_ahead():
            return None
        batch = self._role.scheduler.schedule()
        for request in self._role.scheduler.preempted():
            self.counters.preemptions += 1
            state = self._ledger.by_key[request.id]
            logger.info("preempted, %d tokens to recompute", request.known, extra={"request": state.id})
        return batch

    def _may_run_ahead(self) -> bool:
        """Can a decode step begin now, with tokens that only the device knows?"""
        scheduler = self._role.scheduler
        return (
            len(self._flights) <= self._executor.lag
            and self._flights.booked
            and isinstance(scheduler, ContinuousBatching)
            and not scheduler.waiting
        )

    def _step(self, batch: Batch) -> None:
        """Gives a batch to the executor."""
        began = self._clock()
        booked = bool(self._executor.lag) and not batch.prefill
        flight = Flight.of(batch, began, time.thread_time(), booked)
        step = self._steps.build(flight.items, self._ledger.by_key)
        for item in batch.prefill:
            state = self._ledger.by_key[item.request.id]
            if state.scheduled_s is None:
                state.scheduled_s = began
        self._flights.add(flight)
        self.counters.step_began_s = self._flights.began_s()
        try:
            self._executor.submit(step)
        except RankLost:
            raise
        except Exception as error:
            self._step_failed(self._flights.withdraw(), error)
        else:
            if flight.booked:
                self._role.scheduler.complete(batch)
        finally:
            self.counters.execute_s += self._clock() - began

    def _collect(self, wait_s: float = 0.0) -> None:
        """Books the steps that have ended. Raises `RankLost`, also if there are none, and `EngineFailure` for
        what went wrong on a device after the step had begun: later ones then fail as well.
        """
        while True:
            began = self._clock()
            try:
                output = self._executor.collect(wait_s)
            except RankLost:
                raise
            except Exception as fault:
                raise EngineFailure(f"a step failed on the device: {fault}") from fault
            self.counters.execute_s += self._clock() - began
            if output is None:
                return
            wait_s = 0.0
            flight = self._flights.land()
            self._failures = 0
            self.counters.steps += 1
            self.counters.step_began_s = self._flights.began_s()
            now = self._clock()
            self._count_time(flight, now)
            self._book(flight, output, now)
            self._role.settle()
            for key, error in self._flights.doomed(flight):
                self._end_doomed(key, error)

    def _count_time(self, flight: Flight, now: float) -> None:
        """With steps in flight together, the time of each begins where the one before has ended."""
        wall_s, cpu_now = now - max(flight.began_s, self._landed_s), time.thread_time()
        self.step_times.add(flight.shape, wall_s, cpu_now - max(flight.began_cpu_s, self._landed_cpu_s))
        if flight.batch.prefill:
            self.counters.prefill_steps += 1
            self.counters.prompt_tokens += flight.shape.prompt_tokens
            self.counters.prefill_s += wall_s
        self._landed_s, self._landed_cpu_s = now, cpu_now

    def _end_doomed(self, key: str, error: ServingError | None) -> None:
        """Does what was asked of a request while it was in flight, unless it has ended by itself."""
        state = self._ledger.by_key.get(key)
        if state is None:
            return
        if error is None:
            self._cancel(state)
        elif not state.handed_out:
            self._abort(state, error)

    def _book(self, flight: Flight, output: StepOutput, now: float) -> None:
        """Appends the sampled tokens, ends what has ended, tells the owners."""
        states = [self._ledger.by_key.get(item.request.id) for item in flight.sampling]
        self.counters.output_tokens += sum(state is not None for state in states)
        reasons: dict[str, str] = {}
        for state, token in zip(states, output.tokens, strict=True):
            reason = None if state is None else state.take_token(token)
            if state is not None and reason is not None:
                reasons[state.key] = reason
        stopped = [key for key, reason in reasons.items() if reason == "stop"]
        if not flight.booked:
            self._role.scheduler.complete(flight.batch, stopped)
        else:
            for key in stopped:
                self._role.scheduler.cancel(key)  # it goes on in the step after this one, for nothing
        for state, token, logprobs in zip(states, output.tokens, output.logprobs, strict=True):
            if state is None:
                continue  # it has ended since this step began
            reason = reasons.get(state.key)
            self.counters.finished += reason is not None
            if not state.announced:
                self._tell_first(state, token, logprobs, reason, now)
                continue
            self._emit(state, events.token(token, logprobs))
            if reason is not None:
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
        state.announced = True
        state.started_s = now
        fields = events.prefilled(state, token, logprobs, now)
        if reason is not None:
            self._emit(state, fields | {"finished": reason}, last=True)
            self._forget(state)
            return
        handle = self._role.hand_out(state, now)
        if handle is not None:
            fields["handle"] = handle
            state.handed_out = True
            self._steps.leave(state.key)
        self._emit(state, fields, last=state.handed_out)

    def _step_failed(self, flight: Flight, error: Exception) -> None:
        """Every request of the batch ends with INTERNAL; the others go on."""
        logger.exception("a step of %d sequences failed", len(flight.items))
        self.counters.step_began_s = self._flights.began_s()
        self.counters.failed_steps += 1
        self._failures += 1
        scheduler = self._role.scheduler
        states = [self._ledger.by_key[item.request.id] for item in flight.items]
        scheduler.complete(flight.batch, [state.key for state in states])
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
        self._emit(state, events.admitted(state))

    def started(self, state: EngineRequest, transfer: Pulled) -> None:
        stats = transfer.future.result(0)
        self.counters.transfers += 1
        self.counters.transfer_bytes += stats.bytes
        self.counters.transfer_wait_s += stats.wait_s
        self.counters.transfer_wire_s += stats.wire_s
        state.announced = True
        state.started_s = self._clock()
        self._emit(state, events.started(state))

    def failed(self, state: EngineRequest, error: ServingError) -> None:
        self.counters.failed += 1
        logger.warning(
            "request %s of %s failed: %s: %s",
            state.id,
            state.owner.name,
            error.code,
            error.message,
            extra={"request": state.id, "code": error.code},
        )
        self._finish(state, "error", error)

    def gone(self, key: str) -> None:
        state = self._ledger.by_key.get(key)
        if state is not None:
            self._forget(state)

    # -- telling

    def _finish(self, state: EngineRequest, reason: str, error: ServingError | None = None) -> None:
        """The last event, unless it has been sent; nothing of the request is kept."""
        if not state.handed_out:
            self._emit(state, events.finished(state, reason, error, self._clock()), last=True)
        self._forget(state)

    def _emit(self, state: EngineRequest, fields: events.Fields, last: bool = False) -> None:
        self._events.append(Event(state.owner, state.id, fields, last))

    def _forget(self, state: EngineRequest) -> None:
        self._steps.leave(state.key)
        self._ledger.remove(state)

    def _publish(self, publisher: Publisher) -> None:
        out, self._events = self._events, []
        publisher.publish(out, self.load())


def _is_fatal(error: Exception) -> bool:
    """A CUDA error other than lack of memory stays with the device's context: every later call fails, too."""
    text = str(error)
    return ("CUDA error" in text or "Triton Error [CUDA]" in text) and "out of memory" not in text
