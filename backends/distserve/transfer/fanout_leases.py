"""The leases of a prefill instance of several ranks: the same on every rank, and over on all or none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

from distserve.transfer.fanout import Message, Ranks
from distserve.transfer.handle import Handle
from distserve.transfer.leases import Clock, LeaseTable, Outcome
from distserve.transfer.source import KVSource, SourceStats
from distserve.worker.parallel import RankLost


@dataclass(slots=True)
class _Shared:
    """A lease on all ranks: those that still have the blocks, and the first outcome that is no success."""

    blocks: list[int]
    holding: set[int]
    outcome: Outcome = "confirmed"


class FanoutLeases:
    """The leases of a prefill instance of several ranks, with the interface of one `LeaseTable`.

    Every rank has a table of its own with the same leases. Blocks are free when all ranks have let go. A
    lease that ends without success on one rank is released on all.
    """

    def __init__(self, clock: Clock, ranks: Ranks, on_release: Callable[[], None]) -> None:
        """As for `LeaseTable`; `local` is the table of the leader's own rank."""
        self.local = LeaseTable(clock, self._local_released)
        self._ranks = ranks
        self._on_release = on_release
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._shared: dict[str, _Shared] = {}
        self._unacknowledged: set[tuple[int, str]] = set()
        self._lost: str | None = None
        self._released: list[tuple[str, list[int]]] = []
        self._outcomes: dict[Outcome, int] = {"confirmed": 0, "failed": 0, "expired": 0, "released": 0}
        self._stats: dict[int, Message] = {}

    def add(self, handle: Handle, blocks: Sequence[int], ttl: float) -> None:
        """As `LeaseTable.add`. The other ranks know of it once `settle` has returned."""
        key, others = handle.request_id, range(1, self._ranks.count)
        with self._lock:
            self._shared[key] = _Shared(list(blocks), set(range(self._ranks.count)))
            self._unacknowledged |= {(rank, key) for rank in others}
        self.local.add(handle, blocks, ttl)
        message = {"op": "lease", "handle": handle.to_wire(), "blocks": list(blocks), "ttl_s": ttl}
        for rank in others:
            self._ranks.send_side(rank, message)

    def settle(self, timeout_s: float) -> None:
        """Until all ranks know all leases: from here on any of them may be called. Raises `RankLost`."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._lost or not self._unacknowledged, timeout_s)
            if self._lost is not None:
                raise RankLost(self._lost)
            if not done:
                ranks = sorted({rank for rank, _ in self._unacknowledged})
                raise RankLost(f"ranks {ranks} have not answered within {timeout_s:g} s")

    def renew(self, request_ids: Iterable[str], ttl: float) -> None:
        ids = list(request_ids)
        self.local.renew(ids, ttl)
        for rank in range(1, self._ranks.count):
            self._ranks.send_side(rank, {"op": "renew", "ids": ids, "ttl_s": ttl})

    def release(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        self.local.release(ids)
        for rank in range(1, self._ranks.count):
            self._ranks.send_side(rank, {"op": "release", "ids": ids})

    def expire(self) -> None:
        """The leader's own; the other ranks look at their clocks themselves."""
        self.local.expire()

    def released(self) -> list[tuple[str, list[int]]]:
        with self._lock:
            out, self._released = self._released, []
        return out

    def next_expiry(self) -> float | None:
        return self.local.next_expiry()

    @property
    def live(self) -> int:
        with self._lock:
            return len(self._shared) + len(self._released)

    @property
    def running(self) -> int:
        """Copies that run on the leader's rank."""
        return self.local.running

    @property
    def outcomes(self) -> dict[Outcome, int]:
        with self._lock:
            return dict(self._outcomes)

    def stats(self, source: KVSource) -> SourceStats:
        """Of all ranks together; the other ranks' as of the last lease they let go of."""
        total = source.stats()
        with self._lock:
            for stats in self._stats.values():
                for entry in fields(SourceStats):
                    setattr(total, entry.name, getattr(total, entry.name) + stats.get(entry.name, 0))
        return total

    def _local_released(self) -> None:
        for key, _ in self.local.released():
            self._let_go(0, key, self.local.outcome(key) or "released")

    def take(self, rank: int, message: Message) -> None:
        """What an agent says."""
        if message["op"] == "leased":
            with self._changed:
                self._unacknowledged.discard((rank, message["id"]))
                self._changed.notify()
        elif message["op"] == "released":
            with self._lock:
                self._stats[rank] = message["stats"]
            self._let_go(rank, message["id"], message["outcome"])
        elif message["op"] == "lost":
            with self._changed:
                self._lost = message["why"]
                self._changed.notify()

    def _let_go(self, rank: int, key: str, outcome: Outcome) -> None:
        with self._lock:
            shared = self._shared[key]
            shared.holding.discard(rank)
            first = outcome != "confirmed" and shared.outcome == "confirmed"
            if first:
                shared.outcome = outcome
            others = set(shared.holding) if first else set()
            news = not shared.holding
            if news:
                del self._shared[key]
                self._outcomes[shared.outcome] += 1
                self._released.append((key, shared.blocks))
        for other in others:
            if other == 0:
                self.local.release([key])
            else:
                self._ranks.send_side(other, {"op": "release", "ids": [key]})
        if news:
            self._on_release()


class InstanceSource:
    """The sources of all ranks of a prefill instance, the leader's in this process."""

    def __init__(
        self,
        local: KVSource,
        others: Sequence[str] = (),
        leases: FanoutLeases | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        """`others`: addresses of ranks 1 and up, which `leases` go to as well."""
        self.addresses = (local.address, *others)
        self._local = local
        self._leases = leases
        self._timeout_s = timeout_s

    def settle(self) -> None:
        """Until the new leases are known on all ranks. Raises `RankLost`."""
        if self._leases is not None:
            self._leases.settle(self._timeout_s)

    def stats(self) -> SourceStats:
        return self._local.stats() if self._leases is None else self._leases.stats(self._local)

    def close(self) -> None:
        self._local.close()
