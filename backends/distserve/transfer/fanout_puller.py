"""The pulls of a decode instance of several ranks: they end when they have ended on every rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from distserve.transfer.errors import TransferError
from distserve.transfer.fanout import Message, Ranks
from distserve.transfer.handle import Handle
from distserve.transfer.pull import TransferStats
from distserve.transfer.puller import KVPuller


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
