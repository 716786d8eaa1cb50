"""The orchestrator's link to one instance: calls in order, a long poll for events, alive or dead."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from distserve.core.dispatch import DecodeLoad, PromptLoad
from distserve.serving.instance_client import InstanceClient
from distserve.serving.link_state import InstanceStatus, LinkPhase, Load, Work
from distserve.serving.orchestrator_config import InstanceSpec, OrchestratorConfig
from distserve.serving.outbox import Outbox
from distserve.serving.schema import Op, ServingError, decode_reply, encode
from distserve.serving.tasks import end_task

_LOG = logging.getLogger(__name__)
_BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)


class Target(Protocol):
    """Receives what concerns one request on one instance. Called on the event loop; must not block."""

    def on_event(self, link: InstanceLink, event: dict[str, Any]) -> None: ...

    def on_events_end(self) -> None:
        """After the last event of a reply, so that token and finish can leave as one message."""

    def on_refused(self, link: InstanceLink, error: ServingError) -> None:
        """The submit was refused or could not be delivered; the link has forgotten the request."""

    def on_lost(self, link: InstanceLink, error: ServingError) -> None:
        """The instance has died, restarted or fallen silent; the link has forgotten the request."""


class InstanceLink:
    """One instance as this orchestrator sees it.

    Args:
        spec: name, role, address.
        client: the way there; closed by `stop`.
        config: deadlines.
        owner, epoch: of this orchestrator, sent with every call.
        on_change: called after the instance came up, went down, or has more room.
    """

    def __init__(
        self,
        spec: InstanceSpec,
        client: InstanceClient,
        config: OrchestratorConfig,
        owner: str,
        epoch: int,
        on_change: Callable[[InstanceLink], None],
    ) -> None:
        self.spec = spec
        self.phase: LinkPhase = "connecting"
        self.draining = False
        self.reason = "not reached yet"
        self.status: InstanceStatus | None = None
        self.load = Load()
        self.targets: dict[str, Target] = {}
        self.leases: set[str] = set()  # ids whose KV waits at this instance
        self.restarts = 0
        self.errors: Counter[str] = Counter()  # that the instance gave, or that came of its loss, by code
        self.stats: Mapping[str, Any] = {}  # its last status
        self._client, self._config, self._on_change = client, config, on_change
        self._identity = {"owner": owner, "epoch": epoch}
        self._seq = 0
        self._orphans: set[str] = set()  # ids that the instance may still work on for nobody
        self._work: dict[str, Work] = {}  # prefill work booked, by id
        self._outbox = Outbox(self.call, self._refused, config.call_timeout_s)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def up(self) -> bool:
        return self.phase == "up"

    @property
    def idle(self) -> bool:
        """Nothing of ours is there: a drained instance may be unloaded."""
        return not self.targets and not self.leases

    def in_pieces(self, prompt_tokens: int) -> bool:
        """The instance lets others overtake a prompt of this length."""
        above = self.status.pieces_above if self.status is not None else None
        return above is not None and prompt_tokens > above

    def prompt_load(self) -> PromptLoad:
        """For `choose_prefill`. The instance has told its status."""
        assert self.status is not None
        load = self.load
        return PromptLoad(
            waiting_tokens=load.waiting_tokens,
            requests=len(self.targets),
            credits=load.credits,
            max_batch_tokens=self.status.max_batch_tokens,
            idle=load.outstanding_tokens == 0,
            longs=load.longs,
            pieces_above=self.status.pieces_above,
        )

    def decode_load(self) -> DecodeLoad:
        """For `choose_decode`: of our own count and the instance's, which knows of other orchestrators."""
        assert self.status is not None
        reported = self.load.reported
        known = reported.get("running", 0) + reported.get("queued", 0)
        return DecodeLoad(max(len(self.targets), known), max(1, self.status.max_batch_size))

    @property
    def hung_calls(self) -> int:
        return self._client.hung_calls

    def start(self) -> None:
        coroutines = (self._run(), self._outbox.run(), self._ask_for_stats())
        self._tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]

    async def stop(self) -> None:
        """Ends the tasks and closes the client. Requests that are still here are lost without notice."""
        for task in self._tasks:
            await end_task(task)
        self.phase, self.reason = "down", "detached"
        await self._client.close()

    def submit(self, request: dict[str, Any], target: Target, work_tokens: int) -> None:
        """Queue a request for the next submit call; ``work_tokens`` of prefill work are booked."""
        work = Work(work_tokens, 0 if self.in_pieces(work_tokens) else work_tokens)
        self.targets[request["id"]] = target
        self._work[request["id"]] = work
        self.load.submitted(work)
        self._outbox.submit(request, work, self.load)

    def work_done(self, request_id: str) -> None:
        """The prompt is computed, or will never be: its tokens count as work no more."""
        work = self._work.pop(request_id, None)
        if work is not None:
            self.load.done(work)

    def forget(self, request_id: str) -> None:
        """The request has ended here by an event of the instance."""
        self.targets.pop(request_id, None)
        self.work_done(request_id)

    def cancel(self, request_id: str) -> None:
        """Forget the request and have the instance stop it."""
        if self.targets.pop(request_id, None) is not None:
            self.work_done(request_id)
            self._outbox.cancel(request_id)

    def hold_lease(self, request_id: str) -> None:
        """The instance keeps KV for us under this id: renew it until `release` or `lease_ended`."""
        self.leases.add(request_id)

    def lease_ended(self, request_id: str) -> None:
        """The KV has been taken over."""
        self.leases.discard(request_id)

    def release(self, request_id: str) -> None:
        """Have the instance let go of KV that nobody is going to fetch."""
        if request_id in self.leases:
            self.leases.discard(request_id)
            self._outbox.release(request_id)

    def renew_leases(self) -> None:
        if self.up and self.leases:
            self._outbox.renew(self.leases)

    async def call(self, op: Op, deadline_s: float, **fields: Any) -> dict[str, Any]:
        """One call; a refusal, silence or a reply that can't be read is a `ServingError`.

        Silence is UNAVAILABLE: DEADLINE_EXCEEDED is left to what an instance says of a request's deadline.
        """
        message = encode({"op": op, **self._identity, **fields})
        try:
            return decode_reply(await self._client.call(message, deadline_s))
        except ServingError as error:
            code = "UNAVAILABLE" if error.code == "DEADLINE_EXCEEDED" else error.code
            raise ServingError(code, f"{self.name}: {op}: {error.message}") from None

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                await self._connect()
                failures = 0
                await self._poll_until_failure()
            except ServingError as error:
                self._set_down(error)
            except Exception as error:  # a mistake of ours must not leave requests without an end
                _LOG.exception("%s: link failed", self.name)
                self._set_down(ServingError("INTERNAL", f"{self.name}: {error!r}"))
            await asyncio.sleep(_BACKOFF_S[min(failures, len(_BACKOFF_S) - 1)])
            failures += 1

    async def _ask_for_stats(self) -> None:
        while True:
            await asyncio.sleep(self._config.stats_s)
            if not self.up:
                continue
            with contextlib.suppress(ServingError):  # whether it is alive is the poll loop's business
                reply = await self.call("status", self._config.call_timeout_s)
                if self.status is not None and reply.get("epoch") == self.status.epoch:
                    self.stats = reply

    async def _connect(self) -> None:
        reply = await self.call("status", self._config.call_timeout_s)
        try:
            status = InstanceStatus.from_wire(reply)
        except (KeyError, ValueError, TypeError) as error:
            raise ServingError("INTERNAL", f"{self.name}: status can't be read: {error!r}") from None
        if status.role != self.spec.role:
            raise ServingError(
                "FAILED_PRECONDITION", f"{self.name}: is a {status.role} instance, not {self.spec.role}"
            )
        if self.status is not None and self.status.epoch != status.epoch:
            self._restarted(ServingError("UNAVAILABLE", f"{self.name}: engine has restarted"))
        self.status, self.stats = status, reply
        self.load.report(reply)
        if self._orphans:
            await self.call("cancel", self._config.call_timeout_s, ids=sorted(self._orphans))
            self._orphans.clear()
        if self.phase == "down":
            _LOG.info("%s: up again", self.name)
        self.phase, self.reason = "up", ""
        self._on_change(self)

    async def _poll_until_failure(self) -> None:
        deadline_s = self._config.heartbeat_s + self._config.silence_s
        while True:
            try:
                reply = await self.call("poll", deadline_s, ack=self._seq)
            except ServingError as error:
                await self._probe(error)
                continue
            assert self.status is not None
            if reply.get("epoch") != self.status.epoch:
                raise ServingError("UNAVAILABLE", f"{self.name}: engine has restarted")
            try:
                self._deliver(reply.get("events") or [])
            except (KeyError, TypeError, ValueError) as error:
                raise ServingError("INTERNAL", f"{self.name}: events can't be read: {error!r}") from None
            load = reply.get("load")
            if isinstance(load, dict):  # after the events, which it knows of already
                self.load.report(load)
            self._on_change(self)

    async def _probe(self, error: ServingError) -> None:
        """After a failed poll: a reply may just have been lost. Events that were in it come again."""
        await asyncio.sleep(_BACKOFF_S[0])
        reply = await self.call("status", min(1.0, self._config.call_timeout_s))
        if self.status is None or reply.get("epoch") != self.status.epoch:
            raise error

    def _deliver(self, events: list[dict[str, Any]]) -> None:
        touched: dict[str, Target] = {}
        for event in events:
            if event["seq"] <= self._seq:
                continue  # sent again although it had arrived
            self._seq, request_id = event["seq"], event["id"]
            target = self.targets.get(request_id)
            if target is not None:
                touched[request_id] = target
                if event.get("error"):
                    self.errors[ServingError.from_wire(event["error"]).code] += 1
                target.on_event(self, event)
            elif event["type"] in ("token", "started"):
                self._outbox.cancel(request_id)  # an earlier cancel was lost
            elif event["type"] == "prefilled" and event.get("handle"):
                self._outbox.release(request_id)
        for target in touched.values():
            target.on_events_end()

    def _restarted(self, error: ServingError) -> None:
        self.restarts += 1
        self._seq = 0
        self._orphans.clear()
        self._lose_all(error)

    def _set_down(self, error: ServingError) -> None:
        if self.phase == "up":
            _LOG.warning("%s: down: %s", self.name, error.message, extra={"code": error.code})
        self.phase, self.reason = "down", error.message
        self._orphans.update(self.targets)
        self._lose_all(error)
        self._on_change(self)

    def _lose_all(self, error: ServingError) -> None:
        lost, self.targets = self.targets, {}
        self.leases.clear()
        self._work.clear()
        self._outbox.clear()
        self.load = Load(pace=self.load.pace, decode_pace=self.load.decode_pace)  # the hardware is the same
        self.errors[error.code] += len(lost)
        for target in lost.values():
            target.on_lost(self, error)

    def _refused(self, request_id: str, error: ServingError) -> None:
        target = self.targets.pop(request_id, None)
        if target is not None:
            self.work_done(request_id)
            self.errors[error.code] += 1
            target.on_refused(self, error)
