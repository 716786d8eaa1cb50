"""Calls to one instance, in order and batched: what has come together since the last call goes as one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Literal

from distserve.serving.link_state import Load, Work
from distserve.serving.schema import ServingError

IdsOp = Literal["cancel", "release", "renew"]
_MAX_REQUESTS = 64
_MAX_TOKENS = 1 << 20  # prompts of one submit call; far below the limit of a message


class Outbox:
    """The sending half of an `InstanceLink`.

    Args:
        call: does one call; raises `ServingError`.
        refuse: told of each request that was refused or could not be delivered.
    """

    def __init__(
        self,
        call: Callable[..., Awaitable[dict[str, Any]]],
        refuse: Callable[[str, ServingError], None],
        deadline_s: float,
    ) -> None:
        self._call, self._refuse, self._deadline_s = call, refuse, deadline_s
        self._submits: dict[str, tuple[dict[str, Any], Work, Load]] = {}
        self._ids: dict[IdsOp, set[str]] = {"cancel": set(), "release": set(), "renew": set()}
        self._wake = asyncio.Event()

    def submit(self, request: dict[str, Any], work: Work, load: Load) -> None:
        """Queue a request; ``load`` is told when the instance has it."""
        self._submits[request["id"]] = (request, work, load)
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        unsent = self._submits.pop(request_id, None)
        if unsent is not None:
            _, work, load = unsent
            load.arrived(work)
            return
        self._ids["cancel"].add(request_id)
        self._wake.set()

    def release(self, request_id: str) -> None:
        self._ids["renew"].discard(request_id)
        self._ids["release"].add(request_id)
        self._wake.set()

    def renew(self, request_ids: Iterable[str]) -> None:
        self._ids["renew"].update(request_ids)
        self._wake.set()

    def clear(self) -> None:
        """The instance is lost, and with it all that was meant for it."""
        self._submits = {}
        for ids in self._ids.values():
            ids.clear()

    async def run(self) -> None:
        """Sends until it is cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            for op in self._ids:  # what frees memory goes first
                await self._send_ids(op)
            while self._submits:
                await self._send_submits()

    async def _send_ids(self, op: IdsOp) -> None:
        ids = sorted(self._ids[op])
        if not ids:
            return
        self._ids[op].clear()
        try:
            await self._call(op, self._deadline_s, ids=ids)
        except ServingError:
            # A lost cancel is repeated when the next event of the request comes, a lost release ends with its
            # lease, a lost renewal is due again soon; a dead instance is the poll loop's business.
            return

    async def _send_submits(self) -> None:
        batch: list[tuple[dict[str, Any], Work, Load]] = []
        tokens = 0
        for request_id in list(self._submits):
            if batch and (len(batch) == _MAX_REQUESTS or tokens > _MAX_TOKENS):
                break
            batch.append(self._submits.pop(request_id))
            tokens += len(batch[-1][0]["prompt"])
        outcome = await self._deliver([request for request, _, _ in batch])
        for request, work, load in batch:
            load.arrived(work)
            error = outcome.get(request["id"]) if isinstance(outcome, dict) else outcome
            if error is not None:
                self._refuse(request["id"], error)

    async def _deliver(self, requests: list[dict[str, Any]]) -> dict[str, ServingError] | ServingError:
        """The refusals by request id, or the one error of a call that failed twice."""
        try:
            try:
                reply = await self._call("submit", self._deadline_s, requests=requests)
            except ServingError as error:
                if error.code != "UNAVAILABLE":
                    raise
                # perhaps only the reply was lost: the instance knows the ids if it has them
                reply = await self._call("submit", self._deadline_s, requests=requests)
        except ServingError as error:
            for request in requests:  # the instance may have got them all the same
                self._ids["cancel"].add(request["id"])
            self._wake.set()
            # whatever else was refused was the call, for which no request is to blame
            return error if error.code == "UNAVAILABLE" else ServingError("INTERNAL", error.message)
        results = reply.get("results")
        entries = results if isinstance(results, list) else []
        answered = {entry["id"]: entry for entry in entries if isinstance(entry, dict) and "id" in entry}
        missing = {"ok": False, "error": {"code": "INTERNAL", "message": "the reply has no result for it"}}
        entries_by_id = {r["id"]: answered.get(r["id"], missing) for r in requests}
        return {
            request_id: ServingError.from_wire(entry.get("error"))
            for request_id, entry in entries_by_id.items()
            if entry.get("ok") is not True
        }
