"""Who may still need the blocks of a finished prompt: the request (its lease) and the copies that run."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from distserve.core.shapes import Shape
from distserve.transfer.errors import TransferError
from distserve.transfer.handle import Handle

Clock = Callable[[], float]
Outcome = Literal["confirmed", "failed", "expired", "released"]

REMEMBERED = 4096  # ended leases of which it is still known why they ended


@dataclass(frozen=True, slots=True)
class Claimant:
    """The decode instance that pulls: all ranks that claim one handle must name the same."""

    instance: str
    epoch: int
    shape: Shape


@dataclass(frozen=True, slots=True)
class Claim:
    """One destination rank's right to copy the blocks; ends with exactly one `confirm` or `fail`."""

    request_id: str
    rank: int
    blocks: tuple[int, ...]


@dataclass(slots=True)
class _Lease:
    handle: Handle
    blocks: tuple[int, ...]
    expires_at: float
    claimant: Claimant | None = None
    waiting: set[int] = field(default_factory=set)  # destination ranks that have not confirmed yet
    claimed: set[int] = field(default_factory=set)  # destination ranks that have used the nonce
    running: set[int] = field(default_factory=set)
    ended: Outcome | None = None  # the request has let go


class LeaseTable:
    """Leases of one rank, used by the engine loop (add, renew, release) and sender threads (claim, confirm).

    Every lease's blocks are reported exactly once by `released`, and only after both owners let go: the lease
    has ended (confirmed by the last destination rank, failed, expired or released) **and** no copy runs any
    more. `clock` gives seconds; `on_release` is called, outside any lock and from any thread, when `released`
    has news.
    """

    def __init__(self, clock: Clock, on_release: Callable[[], None] | None = None) -> None:
        self._clock = clock
        self._on_release = on_release
        self._lock = threading.Lock()
        self._leases: dict[str, _Lease] = {}
        self._gone: OrderedDict[str, Outcome] = OrderedDict()
        self._released: list[tuple[str, list[int]]] = []
        self._outcomes: dict[Outcome, int] = {"confirmed": 0, "failed": 0, "expired": 0, "released": 0}

    def add(self, handle: Handle, blocks: Sequence[int], ttl: float) -> None:
        """Takes over `blocks` of a finished prompt for `ttl` s. Raises `ValueError` for an id in use."""
        if len(blocks) != handle.num_blocks:
            raise ValueError(
                f"blocks: {len(blocks)} given, {handle.num_tokens} tokens need {handle.num_blocks}"
            )
        with self._lock:
            if handle.request_id in self._leases:
                raise ValueError(f"request_id={handle.request_id!r}: already has a lease")
            self._leases[handle.request_id] = _Lease(handle, tuple(blocks), self._clock() + ttl)

    def renew(self, request_ids: Iterable[str], ttl: float) -> list[str]:
        """Leases end `ttl` seconds from now at the earliest. Returns the ids that have no live lease."""
        unknown = []
        with self._lock:
            until = self._clock() + ttl
            for request_id in request_ids:
                lease = self._leases.get(request_id)
                if lease is None or lease.ended is not None:
                    unknown.append(request_id)
                else:
                    lease.expires_at = max(lease.expires_at, until)
        return unknown

    def release(self, request_ids: Iterable[str]) -> None:
        """The request lets go: no new claims. Unknown ids are no error (the lease may just have ended)."""
        with self._lock:
            news = [self._end(request_id, "released") for request_id in request_ids]
        self._tell(any(news))

    def expire(self) -> int:
        """Ends the leases whose time is over; returns their number. Copies that run go on to their own
        deadline.
        """
        with self._lock:
            now = self._clock()
            late = [i for i, lease in self._leases.items() if lease.ended is None and lease.expires_at <= now]
            news = [self._end(request_id, "expired") for request_id in late]
        self._tell(any(news))
        return len(late)

    def claim(self, handle: Handle, claimant: Claimant, rank: int, callers: frozenset[int]) -> Claim:
        """Uses the handle's nonce for destination rank `rank`, one of the `callers` that will pull from here.

        Raises `TransferError`: unknown or ended lease (NOT_FOUND); a handle that is not the one given out, a
        nonce used before, a second decode instance, a rank that has nothing to fetch here
        (FAILED_PRECONDITION).
        """
        with self._lock:
            lease = self._leases.get(handle.request_id)
            late = lease is not None and lease.ended is None and lease.expires_at <= self._clock()
            if not late:
                return self._claim(lease, handle, claimant, rank, callers)
            self._end(handle.request_id, "expired")
            error = self._not_found(handle.request_id, lease)
        self._tell(True)
        raise error

    def confirm(self, claim: Claim) -> None:
        """The destination rank has its copy. The last one ends the lease."""
        self._finish(claim, confirmed=True)

    def fail(self, claim: Claim) -> None:
        """The copy has ended without success, which spends the handle: the lease ends."""
        self._finish(claim, confirmed=False)

    def released(self) -> list[tuple[str, list[int]]]:
        """(request id, blocks) of leases that both owners let go of since the last call."""
        with self._lock:
            out, self._released = self._released, []
        return out

    def outcome(self, request_id: str) -> Outcome | None:
        """How a lease has ended; None if it has not, or so long ago that it is forgotten."""
        with self._lock:
            lease = self._leases.get(request_id)
            return lease.ended if lease is not None else self._gone.get(request_id)

    @property
    def live(self) -> int:
        """Leases whose blocks have not been reported by `released`."""
        with self._lock:
            return len(self._leases)

    @property
    def running(self) -> int:
        """Copies that run now."""
        with self._lock:
            return sum(len(lease.running) for lease in self._leases.values())

    @property
    def outcomes(self) -> dict[Outcome, int]:
        """How many leases have ended, by outcome, since the start."""
        with self._lock:
            return dict(self._outcomes)

    def next_expiry(self) -> float | None:
        """When `expire` will have something to do, on the table's clock."""
        with self._lock:
            return min((x.expires_at for x in self._leases.values() if x.ended is None), default=None)

    def _claim(
        self, lease: _Lease | None, handle: Handle, claimant: Claimant, rank: int, callers: frozenset[int]
    ) -> Claim:
        if lease is None or lease.ended is not None:
            raise self._not_found(handle.request_id, lease)
        _check_claim(lease, handle, claimant, rank, callers)
        if lease.claimant is None:
            lease.claimant, lease.waiting = claimant, set(callers)
        lease.claimed.add(rank)
        lease.running.add(rank)
        return Claim(handle.request_id, rank, lease.blocks)

    def _finish(self, claim: Claim, confirmed: bool) -> None:
        with self._lock:
            lease = self._leases.get(claim.request_id)
            if lease is None or claim.rank not in lease.running:
                raise RuntimeError(f"claim of rank {claim.rank} on {claim.request_id!r} has ended before")
            lease.running.discard(claim.rank)
            if confirmed:
                lease.waiting.discard(claim.rank)
            if not confirmed or not lease.waiting:
                news = self._end(claim.request_id, "confirmed" if confirmed else "failed")
            else:
                news = self._let_go(claim.request_id, lease)
        self._tell(news)

    def _end(self, request_id: str, outcome: Outcome) -> bool:
        lease = self._leases.get(request_id)
        if lease is None:
            return False
        if lease.ended is None:
            lease.ended = outcome
            self._outcomes[outcome] += 1
        return self._let_go(request_id, lease)

    def _let_go(self, request_id: str, lease: _Lease) -> bool:
        """Reports the blocks if neither owner is left."""
        if lease.ended is None or lease.running:
            return False
        del self._leases[request_id]
        self._released.append((request_id, list(lease.blocks)))
        self._gone[request_id] = lease.ended
        if len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
        return True

    def _tell(self, news: bool) -> None:
        if news and self._on_release is not None:
            self._on_release()

    def _not_found(self, request_id: str, lease: _Lease | None) -> TransferError:
        outcome = lease.ended if lease is not None else self._gone.get(request_id)
        if outcome == "confirmed":
            return _refused(
                "nonce_reused", f"request_id={request_id!r}: its handle was used before; allowed is once"
            )
        word = {
            "failed": "its transfer has failed",
            "expired": "its lease has expired",
            "released": "was released",
        }
        why = word[outcome] if outcome is not None else "no such lease"
        return TransferError(
            "NOT_FOUND", f"lease_{outcome or 'unknown'}", f"request_id={request_id!r}: {why}"
        )


def _check_claim(
    lease: _Lease, handle: Handle, claimant: Claimant, rank: int, callers: frozenset[int]
) -> None:
    name = f"request_id={handle.request_id!r}"
    field_name = lease.handle.difference(handle)
    if field_name == "nonce":
        raise _refused("forged_nonce", f"{name}: nonce is not the one this handle was given out with")
    if field_name is not None:
        raise _refused("forged_handle", f"{name}: {field_name} is not what this handle was given out with")
    if lease.claimant is not None and lease.claimant != claimant:
        raise _refused(
            "nonce_reused", f"{name}: already claimed by {lease.claimant.instance!r}; allowed is one instance"
        )
    if rank in lease.claimed:
        raise _refused(
            "nonce_reused", f"{name}: nonce already used by destination rank {rank}; allowed is once"
        )
    if rank not in callers:
        raise _refused(
            "wrong_rank", f"{name}: rank={rank} has nothing to fetch here; allowed are {sorted(callers)}"
        )


def _refused(reason: str, message: str) -> TransferError:
    return TransferError("FAILED_PRECONDITION", reason, message)
