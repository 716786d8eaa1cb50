"""The orchestrator: admits requests, sends them through the instances, and answers each exactly once.

Plain asyncio on one event loop; nothing here knows Triton. Where instances are and how they are reached
is the connector's business, where responses go is the sinks'.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from distserve.serving.accounts import Accounts
from distserve.serving.attainment import Objectives
from distserve.serving.chunk import Sink
from distserve.serving.client_request import ClientRequest
from distserve.serving.fleet import Alone, Fleet, Limits
from distserve.serving.forecast import Forecaster
from distserve.serving.instance_client import Connector
from distserve.serving.link import InstanceLink
from distserve.serving.metrics import Metrics
from distserve.serving.orchestrator_config import InstanceSpec, OrchestratorConfig
from distserve.serving.params import invalid
from distserve.serving.request_log import RequestLog
from distserve.serving.router import Router
from distserve.serving.schema import ServingError
from distserve.serving.session import Outcome, Session
from distserve.serving.tasks import end_task
from distserve.serving.text_codec import TextCodec

_TICK_S = 0.25
_FULL_S = 0.1  # how long an instance that was full is left alone,
_UNREACHABLE_S = 1.0  # and one that could not be reached
_ALL_TOLD_S = 1.0  # at start: how long to wait for the slower instances before limits are judged
_SHORT_TEXT_CHARS = 4096  # tokenised in less than a decode step; longer text goes to a thread


class Orchestrator:
    """One orchestrator with its instances.

    Args:
        config: limits and the instances to begin with.
        codec: the model's tokenizer.
        connect: makes an instance's client.
        metrics: told of every end and, once per tick, of the state.
        owner: this orchestrator's name at the instances; the same after a restart.
        request_log: told of every end.
        clock: monotonic seconds.
        server_restarts: how often the server has been started again before this one, for show.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        codec: TextCodec,
        connect: Connector,
        metrics: Metrics,
        owner: str,
        request_log: RequestLog | None = None,
        clock: Callable[[], float] = time.monotonic,
        server_restarts: int = 0,
    ) -> None:
        self.config = config
        self.codec = codec
        self.fleet = Fleet(Alone(config.prefill_may_decode, config.decode_may_prefill))
        self.router = Router(
            self.fleet,
            config.max_queue,
            config.max_queue_tokens,
            config.unavailable_after_s,
            config.ordering(),
        )
        self.accounts = Accounts(config, metrics, request_log)
        self._forecaster = Forecaster(self.fleet, self.router)
        self.sessions: dict[int, Session] = {}
        self.epoch = time.time_ns()  # new at every start
        self.stopping = False
        self.server_restarts = server_restarts
        self._connect, self._metrics, self._owner, self._clock = connect, metrics, owner, clock
        self._numbers = 0
        self._entering = 0  # requests between arrival and queue
        self._changed = asyncio.Event()
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")
        self._ticker: asyncio.Task[None] | None = None

    # life

    async def start(self) -> None:
        for spec in self.config.instances:
            self.add_link(spec)
        self._ticker = asyncio.create_task(self._run_ticks())

    async def stop(self, drain_s: float | None = None) -> None:
        """Refuse new requests, let running ones end for up to ``drain_s`` (default: the configuration's),
        fail the rest, part from all. A second call finds nothing left to do.
        """
        self.stopping = True
        end = self._clock() + (self.config.drain_s if drain_s is None else drain_s)
        while self.sessions and self._clock() < end:
            await asyncio.sleep(0.02)
        for session in list(self.sessions.values()):
            session.fail(ServingError("UNAVAILABLE", "the server is shutting down"))
        await end_task(self._ticker)
        await asyncio.gather(*(link.stop() for link in self.fleet))
        self._tokenizing.shutdown(wait=False, cancel_futures=True)

    @property
    def name(self) -> str:
        """Apart from other orchestrators of its server."""
        return self._owner.rpartition(":")[2]

    @property
    def ready(self) -> bool:
        """Would a request that comes now find the instances it needs?"""
        return not self.stopping and self.fleet.ready

    def add_link(self, spec: InstanceSpec) -> InstanceLink:
        link = InstanceLink(
            spec, self._connect(spec), self.config, self._owner, self.epoch, self._on_link_change
        )
        self.fleet.links[spec.name] = link
        link.start()
        return link

    async def wait_for_change(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait until an instance's state makes the condition true; False if it did not in time."""
        end = self._clock() + timeout_s
        while not condition():
            left = end - self._clock()
            if left <= 0:
                return False
            self._changed.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
        return True

    # requests

    async def serve(
        self, request: ClientRequest, sink: Sink, arrival_s: float | None = None
    ) -> Session | None:
        """Admit a request. Its sink gets the answer, or the refusal (then None is returned)."""
        self._entering += 1
        arrived_s = self._clock() if arrival_s is None else arrival_s
        try:
            return await self._admit(request, sink, arrived_s)
        except ServingError as error:
            self.accounts.refused(request, error, arrived_s, self.now())
            sink.fail(error)
            return None
        finally:
            self._entering -= 1

    async def _admit(self, request: ClientRequest, sink: Sink, arrival_s: float) -> Session:
        if self.stopping:
            raise ServingError("UNAVAILABLE", "the server is shutting down")
        if self._entering + len(self.router) > self.config.max_queue:
            self.router.check_room(0)
            raise ServingError(
                "RESOURCE_EXHAUSTED",
                f"queue full: {self._entering - 1} requests are being read; try again later",
            )
        limits = await self._limits()
        prompt = await self._tokenize(request, limits)
        if len(prompt) > limits.max_prompt:
            field = "text_input" if request.ids is None else "input_ids"
            raise ServingError(
                "INVALID_ARGUMENT",
                f"{field}: prompt of {len(prompt)} tokens, at most {limits.max_prompt} are allowed "
                f"(context and KV pool hold {limits.max_total} tokens, prompt and output together)",
            )
        self.router.check_room(len(prompt))
        params, most_s = request.params, self.config.request_timeout_s
        timeout_s = min(request.timeout_s or most_s, params.deadline or most_s, most_s)
        objectives = self.accounts.objectives_of(params)
        self._numbers += 1
        session = Session(
            self,
            number=self._numbers,
            prompt=prompt,
            max_tokens=min(params.max_tokens, limits.max_total - len(prompt)),
            params=params,
            seed=secrets.randbits(63),
            codec=self.codec,
            sink=sink,
            arrival_s=arrival_s,
            deadline_s=arrival_s + timeout_s,
            due_s=arrival_s + (math.inf if objectives.ttft_s is None else objectives.ttft_s),
            id_prefix=f"{self.epoch:x}-",
            client_id=request.client_id,
            cancel_key=request.cancel_key,
        )
        own = Objectives(params.ttft_slo, params.tpot_slo)
        self._forecaster.check(session, objectives if self.config.refuse_late else own, self.now())
        self.sessions[session.number] = session
        try:
            self.router.enqueue(session, self.now())
        except ServingError:
            del self.sessions[session.number]
            raise
        return session

    def cancel(self, session: Session) -> None:
        """The client has gone: stop the work in whichever stage it is."""
        session.fail(ServingError("CANCELLED", "cancelled by the client"))

    async def _limits(self) -> Limits:
        fleet = self.fleet
        if any(link.status is None for link in fleet):
            await self.wait_for_change(
                lambda: all(link.status is not None for link in fleet),
                min(_ALL_TOLD_S, self.config.unavailable_after_s),
            )
        if await self.wait_for_change(lambda: fleet.limits() is not None, self.config.unavailable_after_s):
            limits = fleet.limits()
            assert limits is not None
            return limits
        reasons = "; ".join(f"{link.name}: {link.reason or 'up'}" for link in fleet)
        raise ServingError(
            "UNAVAILABLE", f"no usable prefill and decode instances ({reasons or 'none given'})"
        )

    async def _tokenize(self, request: ClientRequest, limits: Limits) -> Sequence[int]:
        if request.ids is not None:
            return request.ids
        text = request.text or ""
        size = len(text.encode())
        allowed = min(self.config.max_text_bytes, (limits.max_prompt + 1) * self.codec.max_token_bytes)
        if size > allowed:
            raise ServingError(
                "INVALID_ARGUMENT",
                f"text_input: {size} bytes, at most {allowed} are allowed "
                f"(a prompt may have {limits.max_prompt} tokens)",
            )
        if len(text) <= _SHORT_TEXT_CHARS:
            ids = self.codec.encode(text)
        else:
            loop = asyncio.get_running_loop()
            ids = await loop.run_in_executor(self._tokenizing, self.codec.encode, text)
        if not ids:
            raise invalid("text_input", text, "has no tokens")
        return ids

    # for the sessions (SessionHost)

    def now(self) -> float:
        return self._clock()

    def hand_over(self, session: Session) -> None:
        self.router.hand_over(session, self.now())
        if session.state == "queued":  # there was nobody to hand it to
            self._changed_soon()

    def continue_elsewhere(self, session: Session, error: ServingError) -> None:
        session.recoveries += 1
        self.router.remove(session)
        if self.now() >= session.deadline_s:
            session.fail(session.too_late(self.now()))
        elif session.recoveries > self.config.max_recoveries:
            after = f"after {self.config.max_recoveries} continuations" if self.config.max_recoveries else ""
            session.fail(ServingError("UNAVAILABLE", f"gave up {after}: {error.message}".replace(" :", ":")))
        elif self.stopping:
            session.fail(ServingError("UNAVAILABLE", f"the server is shutting down; {error.message}"))
        elif not self.fleet.could_fit(session.known_tokens, session.total_tokens):
            session.fail(
                ServingError("UNAVAILABLE", f"no instance can continue the request: {error.message}")
            )
        else:
            self.accounts.recovered(session, error)
            self.router.requeue(session, self.now())
            self._changed_soon()

    def unreachable(self, link: InstanceLink) -> None:
        # until its poll finds out, a dead instance looks idle: it would be chosen again and again
        self.router.leave_alone(link, self.now(), _UNREACHABLE_S)

    def wait_for_room(self, session: Session, link: InstanceLink) -> None:
        now = self.now()
        self.router.leave_alone(link, now, _FULL_S)
        if session.has_handle:
            session.state = "handoff"
            self.router.hand_over(session, now)
        else:
            self.router.requeue(session, now)

    def ended(self, session: Session, outcome: Outcome, error: ServingError | None) -> None:
        self.sessions.pop(session.number, None)
        self.router.remove(session)
        self.accounts.ended(session, outcome, error, self.now())
        self._changed_soon()

    # changes and time

    def _on_link_change(self, link: InstanceLink) -> None:
        self._changed.set()
        self.router.dispatch(self.now())

    def _changed_soon(self) -> None:
        """Dispatch after the event in hand, from within which a session is still changing."""
        asyncio.get_running_loop().call_soon(lambda: self.router.dispatch(self.now()))

    async def _run_ticks(self) -> None:
        next_renewal_s = 0.0
        while True:
            await asyncio.sleep(_TICK_S)
            now = self.now()
            for session, error in self.router.hopeless(now):
                session.fail(error)
            for session in list(self.sessions.values()):
                self._check_deadlines(session, now)
            if now >= next_renewal_s:
                next_renewal_s = now + self.config.lease_renew_s
                for link in self.fleet:
                    link.renew_leases()
            self.router.dispatch(now)
            self.accounts.tick(now)
            attainment = self.accounts.attainment.summary(now)
            self._metrics.state(self.fleet, self.router, len(self.sessions), attainment)
            self._metrics.server_restarts(self.server_restarts)

    def _check_deadlines(self, session: Session, now: float) -> None:
        if now >= session.deadline_s:
            session.fail(session.too_late(now))
        elif session.state != "queued" and now - session.last_sign_s > self.config.hop_timeout_s:
            where = session.link.name if session.link is not None else "no instance"
            message = f"{where}: no sign of the request for {self.config.hop_timeout_s:g} s"
            session.abandon_stage(ServingError("UNAVAILABLE", message))
