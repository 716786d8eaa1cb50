"""A prefill instance: prompts in, handles out; the KV of a finished prompt lives on as a lease."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from distserve.core.blocks import BlockManager
from distserve.core.prefill_scheduler import PrefillScheduler
from distserve.core.standby_scheduler import StandbyScheduler
from distserve.engine.ops import Pulled
from distserve.engine.requests import EngineRequest
from distserve.engine.roles import Depth, Listener
from distserve.transfer.handle import Handle, Layout, new_nonce

if TYPE_CHECKING:
    from distserve.transfer.source import SourceStats


class Leases(Protocol):
    """Who may still need the blocks of finished prompts; see `LeaseTable`."""

    def add(self, handle: Handle, blocks: Sequence[int], ttl: float) -> None: ...

    def renew(self, request_ids: Iterable[str], ttl: float) -> object: ...

    def release(self, request_ids: Iterable[str]) -> None: ...

    def expire(self) -> object: ...

    def released(self) -> list[tuple[str, list[int]]]: ...

    def next_expiry(self) -> float | None: ...

    @property
    def live(self) -> int: ...

    @property
    def running(self) -> int: ...

    @property
    def outcomes(self) -> Mapping[Any, int]: ...


class Source(Protocol):
    """What serves the leased blocks to decode instances, in threads and processes of its own."""

    addresses: tuple[str, ...]
    """Of each rank."""

    def settle(self) -> None:
        """Until the leases added so far can be claimed on every rank. Raises `RankLost`."""
        ...

    def stats(self) -> SourceStats: ...

    def close(self) -> None: ...


class PrefillRole:
    """Gives the blocks of finished prompts to the lease table, and takes them back when it lets go.

    Requests marked `to_end` are not handed out: they decode here, for want of a decode instance.
    """

    def __init__(
        self,
        scheduler: PrefillScheduler,
        blocks: BlockManager,
        leases: Leases,
        source: Source,
        *,
        instance: str,
        epoch: int,
        layout: Layout,
        lease_s: float,
        stages: int = 1,
    ) -> None:
        self.scheduler = StandbyScheduler(scheduler, stages)
        # batches differ: with as many waiting as there are stages, a long one ahead leaves few of them idle
        self.ahead = stages if stages > 1 else 0
        self.blocks = blocks
        self._leases = leases
        self._source = source
        self._instance = instance
        self._epoch = epoch
        self._layout = layout
        self._lease_s = lease_s

    def accept(self, state: EngineRequest) -> None:
        if state.to_end:
            self.scheduler.add_whole(state.request)
        else:
            self.scheduler.add(state.request)

    def hand_out(self, state: EngineRequest, now: float) -> dict[str, Any] | None:
        if state.to_end:
            return None
        request = state.request
        handle = Handle(
            instance=self._instance,
            epoch=self._epoch,
            request_id=state.key,
            nonce=new_nonce(),
            num_tokens=request.computed,
            first_token=state.tokens[-1],
            layout=self._layout,
            addresses=self._source.addresses,
        )
        self._leases.add(handle, request.blocks, self._lease_s)
        request.blocks, request.num_blocks = [], 0  # they are the lease's now
        return handle.to_wire()

    def settle(self) -> None:
        self._source.settle()

    def advance(self, now: float, listener: Listener) -> None:
        self._leases.expire()
        for key, blocks in self._leases.released():
            self.blocks.drop(blocks)
            listener.gone(key)

    def pulled(self, event: Pulled, listener: Listener) -> None:
        raise RuntimeError(f"request {event.key}: a prefill instance pulls nothing")

    def cancel(self, state: EngineRequest) -> None:
        if state.handed_out:
            self._leases.release([state.key])
        else:
            self.scheduler.cancel(state.key)

    def renew(self, states: Iterable[EngineRequest], now: float) -> None:
        self._leases.renew([state.key for state in states if state.handed_out], self._lease_s)

    def next_deadline(self) -> float | None:
        return self._leases.next_expiry()

    def depth(self) -> Depth:
        queue = self.scheduler
        return Depth(
            queued=queue.prefill.queued + len(queue.whole.waiting),
            queued_tokens=queue.waiting_tokens,
            running=queue.whole.decoding,
            leases=self._leases.live,
            transfers_pending=self._leases.running,
            credits=queue.credits(),
        )

    def details(self) -> dict[str, Any]:
        stats = self._source.stats()
        ended = self._leases.outcomes
        return {
            "transfers": stats.confirmed,
            "transfers_failed": stats.failed,
            "transfers_refused": stats.refused,
            "transfers_cancelled": stats.cancelled,
            "transfer_bytes": stats.bytes,
            "transfer_wire_s": stats.seconds,
            "transfer_pairs": stats.pairs,
            "transfer_device_bytes": stats.device_bytes,
            **{f"leases_{outcome}": count for outcome, count in ended.items()},
        }

    def close(self) -> None:
        self._source.close()
