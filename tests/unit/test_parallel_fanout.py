"""What is asked of an instance's transfers happens on all its ranks; the agents are played by the test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from distserve.core.parsing import ConfigError
from distserve.core.shapes import Shape
from distserve.transfer.errors import TransferError
from distserve.transfer.fanout import open_agents
from distserve.transfer.fanout_leases import FanoutLeases
from distserve.transfer.fanout_puller import FanoutPuller
from distserve.transfer.handle import Handle, Layout, new_nonce
from distserve.transfer.leases import Claimant
from distserve.transfer.pull import TransferStats
from distserve.worker.parallel import RankLost

LAYOUT = Layout("m", "fp32", 4, 2, 4, 8, 3, 1, "nhd")
TTL = 10.0


class Ranks:
    """Ranks 1 and 2 of three."""

    count = 3

    def __init__(self) -> None:
        self.sent: list[tuple[int, dict[str, Any]]] = []
        self.take: Callable[[int, dict[str, Any]], None] = lambda rank, message: None
        self.answers: dict[int, dict[str, Any]] = {}

    def send_side(self, rank: int, message: dict[str, Any]) -> None:
        self.sent.append((rank, message))
        if rank in self.answers:
            self.take(rank, self.answers[rank])

    def listen_side(self, on_message: Callable[[int, dict[str, Any]], None]) -> None:
        self.take = on_message

    def ops(self, op: str) -> list[int]:
        """Ranks that were sent this since the last look."""
        found = [rank for rank, message in self.sent if message["op"] == op]
        self.sent = [entry for entry in self.sent if entry[1]["op"] != op]
        return found


def handle(key: str = "r") -> Handle:
    return Handle("p", 1, key, new_nonce(), 7, 5, LAYOUT, ("h:1", "h:2", "h:3"))


class Leases:
    """One lease of blocks 4 and 6 that all ranks know of."""

    def __init__(self) -> None:
        self.now = 100.0
        self.ranks = Ranks()
        self.news = 0
        self.table = FanoutLeases(lambda: self.now, self.ranks, self._count)
        self.ranks.listen_side(self.table.take)
        self.handle = handle()
        self.table.add(self.handle, [4, 6], TTL)

    def _count(self) -> None:
        self.news += 1

    def released(self, rank: int, outcome: str) -> None:
        stats = {"confirmed": 1, "bytes": 10 * rank}
        self.table.take(rank, {"op": "released", "id": "r", "outcome": outcome, "stats": stats})

    def local_copy(self, confirm: bool) -> None:
        claim = self.table.local.claim(self.handle, Claimant("d", 1, Shape()), 0, frozenset({0}))
        (self.table.local.confirm if confirm else self.table.local.fail)(claim)


def test_a_lease_is_usable_once_all_ranks_know_of_it() -> None:
    leases = Leases()
    assert leases.ranks.ops("lease") == [1, 2]
    with pytest.raises(RankLost, match=r"ranks \[1, 2\] have not answered within 0\.01 s"):
        leases.table.settle(0.01)
    for rank in (1, 2):
        leases.table.take(rank, {"op": "leased", "id": "r"})
    leases.table.settle(0.01)


def test_a_lost_rank_ends_the_wait() -> None:
    leases = Leases()
    leases.table.take(0, {"op": "lost", "why": "rank 2 has ended"})
    with pytest.raises(RankLost, match="rank 2 has ended"):
        leases.table.settle(60.0)


def test_blocks_return_when_every_rank_has_confirmed() -> None:
    leases = Leases()
    leases.released(2, "confirmed")
    leases.local_copy(confirm=True)
    assert (leases.table.released(), leases.table.live, leases.news) == ([], 1, 0)
    leases.released(1, "confirmed")
    assert leases.table.live == 1  # until it is looked at
    assert (leases.table.released(), leases.table.live, leases.news) == ([("r", [4, 6])], 0, 1)
    assert leases.ranks.ops("release") == []
    assert leases.table.outcomes["confirmed"] == 1


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_failure_on_one_rank_releases_all(first: int) -> None:
    leases = Leases()
    if first == 0:
        leases.local_copy(confirm=False)
    else:
        leases.released(first, "failed")
    others = [rank for rank in (1, 2) if rank != first]
    assert leases.ranks.ops("release") == others
    assert leases.table.local.outcome("r") == ("failed" if first == 0 else "released")
    for rank in others:
        assert leases.table.released() == []
        leases.released(rank, "released")
    assert leases.table.released() == [("r", [4, 6])]
    assert leases.table.outcomes == {"confirmed": 0, "failed": 1, "expired": 0, "released": 0}


def test_a_rank_that_has_confirmed_before_the_failure_is_left_alone() -> None:
    leases = Leases()
    leases.released(1, "confirmed")
    leases.local_copy(confirm=True)
    leases.released(2, "expired")  # its caller never came
    assert leases.ranks.ops("release") == []
    assert leases.table.released() == [("r", [4, 6])]
    assert leases.table.outcomes["expired"] == 1


def test_expiry_release_and_renewal_go_to_all_ranks() -> None:
    leases = Leases()
    leases.now += TTL - 1
    leases.table.renew(["r"], TTL)
    assert leases.ranks.ops("renew") == [1, 2]
    leases.now += 2
    leases.table.expire()
    assert leases.table.local.outcome("r") is None
    leases.now += TTL
    leases.table.expire()
    assert leases.table.local.outcome("r") == "expired"
    assert leases.ranks.ops("release") == [1, 2]
    leases.table.release(["r", "unknown"])
    assert leases.ranks.ops("release") == [1, 2]


class LocalPuller:
    """The leader's own rank."""

    def __init__(self) -> None:
        self.future: Future[TransferStats] = Future()
        self.cancelled = 0
        self.refusal: TransferError | None = None
        self.pairs = 1

    def pull(self, handle: Handle, dst_blocks: Sequence[int], deadline: float) -> Future[TransferStats]:
        if self.refusal is not None:
            raise self.refusal
        return self.future

    def cancel(self, future: Future[TransferStats]) -> None:
        assert future is self.future
        self.cancelled += 1


class Pulls:
    """One pull over three ranks."""

    def __init__(self) -> None:
        self.ranks, self.local = Ranks(), LocalPuller()
        self.puller = FanoutPuller(self.local, self.ranks)  # type: ignore[arg-type]
        self.ranks.listen_side(self.puller.take)
        self.future = self.puller.pull(handle(), [1, 2], 0.0)
        assert self.ranks.ops("pull") == [1, 2]

    def ended(self, rank: int, error: str | None = None) -> None:
        message: dict[str, Any] = {"op": "pulled", "id": 1}
        message |= {"error": ["UNAVAILABLE", "peer_gone", error]} if error else {"stats": stats(rank)}
        self.puller.take(rank, message)


def stats(rank: int) -> dict[str, Any]:
    return {"bytes": 10 * rank, "wait_s": 0.1 * rank, "wire_s": 1.0}


def test_a_pull_has_ended_when_it_has_ended_on_all_ranks() -> None:
    pulls = Pulls()
    pulls.ended(2)
    pulls.local.future.set_result(TransferStats(5, 0.5, 0.25))
    assert not pulls.future.done()
    pulls.ended(1)
    assert pulls.future.result(0) == TransferStats(35, 0.5, 1.0)
    assert pulls.ranks.ops("cancel") == []


def test_a_failure_on_one_rank_cancels_the_others_and_waits_for_them() -> None:
    pulls = Pulls()
    pulls.ended(1, "no source")
    assert pulls.ranks.ops("cancel") == [2]
    assert pulls.local.cancelled == 1
    pulls.local.future.set_exception(TransferError("CANCELLED", "cancelled", "the pull was cancelled"))
    assert not pulls.future.done()  # rank 2 may still write
    pulls.ended(2)  # it was through already
    error = pulls.future.exception(0)
    assert isinstance(error, TransferError)
    assert (error.code, str(error)) == ("UNAVAILABLE", "rank 1: no source")


def test_cancel_goes_to_the_ranks_that_still_pull() -> None:
    pulls = Pulls()
    pulls.ended(1)
    pulls.puller.cancel(pulls.future)
    assert pulls.ranks.ops("cancel") == [2]
    assert pulls.local.cancelled == 1
    pulls.ended(2)
    pulls.local.future.set_result(TransferStats(5, 0.5, 0.25))
    pulls.puller.cancel(pulls.future)  # too late, no error
    assert pulls.ranks.ops("cancel") == []
    assert pulls.future.exception(0) is None


def test_a_handle_that_is_refused_here_goes_to_no_rank() -> None:
    pulls = Pulls()
    pulls.local.refusal = TransferError("FAILED_PRECONDITION", "layout_mismatch", "handle.layout.dtype")
    with pytest.raises(TransferError, match="dtype"):
        pulls.puller.pull(handle(), [1, 2], 0.0)
    assert pulls.ranks.ops("pull") == []


def test_agents_tell_their_addresses_or_why_they_have_none() -> None:
    ranks = Ranks()
    ranks.answers = {1: {"op": "opened", "address": "h:2"}, 2: {"op": "opened", "address": "h:3"}}
    assert open_agents(ranks, {"op": "source"}) == ["h:2", "h:3"]
    ranks.answers[2] = {"op": "opened", "error": "host='nowhere': not known"}
    with pytest.raises(ConfigError, match="rank 2: host='nowhere': not known"):
        open_agents(ranks, {"op": "source"})
