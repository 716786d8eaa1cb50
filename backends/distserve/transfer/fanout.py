"""An instance's transfers over all its ranks: what the engine asks for happens on every rank, or on none.

The leader's own rank is served by the objects that an instance of one rank has (`KVSource` with its
`LeaseTable`, `KVPuller`); the others by a `RankAgent` each, over a channel that the executor provides.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from distserve.core.parsing import ConfigError
from distserve.transfer.errors import TransferError
from distserve.transfer.handle import Handle
from distserve.transfer.leases import Clock, LeaseTable, Outcome
from distserve.transfer.pull import TransferStats
from distserve.transfer.puller import KVPuller
from distserve.transfer.source import KVSource, SourceStats
from distserve.worker.parallel import RankLost

OPEN_S = 60.0

Message = dict[str, Any]


class Ranks(Protocol):
    """The way to the agents of ranks 1 to `count` - 1.

    A message that cannot be sent means that its rank is lost, which the executor tells the engine loop, and
    every listener by a message `lost`.
    """

    count: int

    def send_side(self, rank: int, message: Message) -> None: ...

    def listen_side(self, on_message: Callable[[int, Message], None]) -> None: ...


def open_agents(ranks: Ranks, message: Message) -> list[str]:
    """Opens the other ranks' ends and returns their addresses. Raises `ConfigError` with a rank's reason.

    It listens to the ranks itself meanwhile; who comes next must do so afterwards.
    """
    answers: dict[int, Message] = {}
    changed = threading.Condition()

    def take(rank: int, answer: Message) -> None:
        with changed:
            answers[rank] = answer
            changed.notify()

    ranks.listen_side(take)
    others = range(1, ranks.count)
    for rank in others:
        ranks.send_side(rank, message)
    with changed:
        if not changed.wait_for(lambda: 0 in answers or len(answers) == len(others), OPEN_S):
            raise RankLost(f"ranks {sorted(set(others) - set(answers))} have not opened their transfer end")
    if 0 in answers:
        raise RankLost(answers[0]["why"])
    for rank in others:
        if "error" in answers[rank]:
            raise ConfigError(f"rank {rank}: {answers[rank]['error']}")
    return [answers[rank]["address"] for rank in others]


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


@dataclass(slots=True)
class _GroupPull:
    future: Future[TransferStats]
    local: Future[TransferStats]
    running: set[int]
    stats: list[TransferStats] = field(default_factory=list)
    error: TransferError | None = None


class FanoutPuller:
    """Pulls of a decode instance of several ranks. A pull has ended when it has ended on every rank, and well
    only if it has everywhere; what fails on one rank is cancelled on the others. That every rank comes to an
    end is the business of its own deadline, and of the executor, which gives up on a rank that is silent.
    """

    def __init__(self, local: KVPuller, ranks: Ranks) -> None:
        self._local = local
        self._ranks = ranks
        self._lock = threading.Lock()
        self._pulls: dict[int, _GroupPull] = {}
        self._count = 0

    def pull(self, handle: Handle, dst_blocks: Sequence[int], deadline: float) -> Future[TransferStats]:
        local = self._local.pull(handle, dst_blocks, deadline)
        future: Future[TransferStats] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            self._count += 1
            number = self._count
            self._pulls[number] = _GroupPull(future, local, set(range(self._ranks.count)))
        message = {
            "op": "pull",
            "id": number,
            "handle": handle.to_wire(),
            "blocks": list(dst_blocks),
            "timeout_s": max(0.0, deadline - time.monotonic()),
        }
        for rank in range(1, self._ranks.count):
            self._ranks.send_side(rank, message)
        local.add_done_callback(lambda done: self._local_ended(number, done))
        return future

    def cancel(self, future: Future[TransferStats]) -> None:
        with self._lock:
            found = next((item for item in self._pulls.items() if item[1].future is future), None)
        if found is not None:
            self._cancel_ranks(found[0], found[1], found[1].running)

    @property
    def pairs(self) -> int:
        """Source ranks that the leader's rank keeps a connection to."""
        return self._local.pairs

    def close(self) -> None:
        self._local.close()

    def take(self, rank: int, message: Message) -> None:
        """What an agent says."""
        if message["op"] != "pulled":
            return
        error = message.get("error")
        if error is not None:
            self._ended(
                message["id"], rank, None, TransferError(error[0], error[1], f"rank {rank}: {error[2]}")
            )
        else:
            self._ended(message["id"], rank, TransferStats(**message["stats"]), None)

    def _local_ended(self, number: int, future: Future[TransferStats]) -> None:
        error = future.exception(0)
        if error is None:
            self._ended(number, 0, future.result(0), None)
            return
        if not isinstance(error, TransferError):
            error = TransferError("INTERNAL", "internal", f"{type(error).__name__}: {error}")
        self._ended(number, 0, None, error)

    def _ended(
        self, number: int, rank: int, stats: TransferStats | None, error: TransferError | None
    ) -> None:
        with self._lock:
            pull = self._pulls[number]
            pull.running.discard(rank)
            if stats is not None:
                pull.stats.append(stats)
            first = error is not None and pull.error is None
            if first:
                pull.error = error
            others = set(pull.running) if first else set()
            over = not pull.running
            if over:
                del self._pulls[number]
        self._cancel_ranks(number, pull, others)
        if not over:
            return
        if pull.error is not None:
            pull.future.set_exception(pull.error)
        else:
            pull.future.set_result(_together(pull.stats))

    def _cancel_ranks(self, number: int, pull: _GroupPull, ranks: Iterable[int]) -> None:
        for rank in list(ranks):
            if rank == 0:
                self._local.cancel(pull.local)
            else:
                self._ranks.send_side(rank, {"op": "cancel", "id": number})


def _together(stats: Sequence[TransferStats]) -> TransferStats:
    """Bytes of all ranks; the times of the slowest one."""
    return TransferStats(
        sum(s.bytes for s in stats), max(s.wait_s for s in stats), max(s.wire_s for s in stats)
    )
