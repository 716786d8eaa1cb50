"""What differs between the roles of an instance: where requests come from and where they go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from distserve.core.blocks import BlockManager
from distserve.core.scheduler import Scheduler
from distserve.core.unified_scheduler import UnifiedScheduler
from distserve.engine.ops import Pulled
from distserve.engine.requests import EngineRequest
from distserve.serving.schema import ServingError


@dataclass(frozen=True, slots=True)
class Depth:
    """What waits and runs, for the load."""

    queued: int
    queued_tokens: int
    running: int
    leases: int
    transfers_pending: int
    credits: int


class Listener(Protocol):
    """The loop, as a role sees it."""

    def admitted(self, state: EngineRequest) -> None: ...

    def started(self, state: EngineRequest, transfer: Pulled) -> None: ...

    def failed(self, state: EngineRequest, error: ServingError) -> None:
        """The request ends with an error; its blocks are let go by the role."""
        ...

    def gone(self, key: str) -> None:
        """Nothing is left of a request that had been handed out."""
        ...


class Role(Protocol):
    """Between steps only, by the loop thread, as everything that touches scheduler and blocks."""

    @property
    def scheduler(self) -> Scheduler: ...

    @property
    def blocks(self) -> BlockManager: ...

    @property
    def ahead(self) -> int:
        """Batches that may be in flight beside the executor's depth."""
        ...

    def accept(self, state: EngineRequest) -> None:
        """A submitted request enters."""
        ...

    def hand_out(self, state: EngineRequest, now: float) -> dict[str, Any] | None:
        """After its first token here: the handle for another instance, or None to go on here."""
        ...

    def settle(self) -> None:
        """After a step: what was handed out can be used from here on. Raises `RankLost`."""
        ...

    def advance(self, now: float, listener: Listener) -> None:
        """Takes note of what other threads and the clock have done; admits what can be admitted."""
        ...

    def pulled(self, event: Pulled, listener: Listener) -> None:
        """A copy has ended."""
        ...

    def cancel(self, state: EngineRequest) -> None:
        """The request leaves, whatever its stage. Blocks under a running copy return when it has ended."""
        ...

    def renew(self, states: Iterable[EngineRequest], now: float) -> None:
        """Extends the leases of those that have one."""
        ...

    def next_deadline(self) -> float | None:
        """When `advance` has something to do without a message, at the latest."""
        ...

    def depth(self) -> Depth: ...

    def details(self) -> dict[str, Any]:
        """More for the status reply. From any thread."""
        ...

    def close(self) -> None:
        """Ends sockets and threads. Later calls are not allowed."""
        ...


class UnifiedRole:
    """Both phases here: no transfer, no lease."""

    ahead = 0

    def __init__(self, scheduler: UnifiedScheduler, blocks: BlockManager) -> None:
        self.scheduler = scheduler
        self.blocks = blocks

    def accept(self, state: EngineRequest) -> None:
        self.scheduler.add(state.request)

    def hand_out(self, state: EngineRequest, now: float) -> dict[str, Any] | None:
        return None

    def settle(self) -> None:
        pass

    def advance(self, now: float, listener: Listener) -> None:
        pass

    def pulled(self, event: Pulled, listener: Listener) -> None:
        raise RuntimeError(f"request {event.key}: a unified instance pulls nothing")

    def cancel(self, state: EngineRequest) -> None:
        self.scheduler.cancel(state.key)

    def renew(self, states: Iterable[EngineRequest], now: float) -> None:
        pass

    def next_deadline(self) -> float | None:
        return None

    def depth(self) -> Depth:
        queue = self.scheduler
        return Depth(len(queue.waiting), queue.waiting_tokens, queue.decoding, 0, 0, queue.credits())

    def details(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass
