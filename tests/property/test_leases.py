"""Conservation: whatever happens in any order, every lease's blocks come back exactly once, never early."""

from __future__ import annotations

import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from distserve.core.shapes import Shape
from distserve.transfer.errors import TransferError
from distserve.transfer.handle import Handle, Layout, new_nonce
from distserve.transfer.leases import Claim, Claimant, LeaseTable

LAYOUT = Layout("m", "fp32", 16, 4, 4, 64, 1, 1, "nhd")
TTL = 10.0


def handle_of(request_id: str, tokens: int = 20) -> Handle:
    return Handle("p0", 3, request_id, new_nonce(), tokens, 7, LAYOUT, ("127.0.0.1:1",))


class Leases(RuleBasedStateMachine):
    """Against a model in which a lease is a set of running ranks and a flag."""

    handles = Bundle("handles")
    claims = Bundle("claims")

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.told = 0
        self.table = LeaseTable(lambda: self.now, self._tell)
        self.given: dict[str, list[int]] = {}
        self.back: dict[str, list[int]] = {}
        self.running: dict[str, set[int]] = {}
        self.ended: set[str] = set()
        self.used: set[tuple[str, int]] = set()
        self.expires: dict[str, float] = {}
        self.confirmed: dict[str, set[int]] = {}

    def _tell(self) -> None:
        self.told += 1

    @rule(target=handles)
    def add(self) -> Handle:
        number = len(self.given)
        handle = handle_of(f"r{number}")
        blocks = [2 * number, 2 * number + 1]
        self.table.add(handle, blocks, TTL)
        self.given[handle.request_id] = blocks
        self.running[handle.request_id] = set()
        self.confirmed[handle.request_id] = set()
        self.expires[handle.request_id] = self.now + TTL
        return handle

    @rule(target=claims, handle=handles, rank=st.integers(0, 2))
    def claim(self, handle: Handle, rank: int) -> tuple[Handle, Claim | None]:
        callers = frozenset({0, 1})
        name = handle.request_id
        if self.expires[name] <= self.now:
            self.ended.add(name)
        allowed = name not in self.ended and rank in callers and (name, rank) not in self.used
        claimant = Claimant("d0", 1, Shape(2))
        if not allowed:
            with pytest.raises(TransferError):
                self.table.claim(handle, claimant, rank, callers)
            return handle, None
        claim = self.table.claim(handle, claimant, rank, callers)
        assert list(claim.blocks) == self.given[name]
        self.used.add((name, rank))
        self.running[name].add(rank)
        return handle, claim

    @rule(item=consumes(claims), good=st.booleans())
    def finish(self, item: tuple[Handle, Claim | None], good: bool) -> None:
        handle, claim = item
        if claim is None:
            return
        name = handle.request_id
        (self.table.confirm if good else self.table.fail)(claim)
        self.running[name].discard(claim.rank)
        if good:
            self.confirmed[name].add(claim.rank)
        if not good or self.confirmed[name] == {0, 1}:
            self.ended.add(name)

    @rule(handle=handles)
    def release(self, handle: Handle) -> None:
        self.table.release([handle.request_id, "unknown"])
        self.ended.add(handle.request_id)

    @rule(handle=handles)
    def renew(self, handle: Handle) -> None:
        unknown = self.table.renew([handle.request_id], TTL)
        assert unknown == ([handle.request_id] if handle.request_id in self.ended else [])
        if not unknown:
            self.expires[handle.request_id] = self.now + TTL

    @rule(seconds=st.floats(0, 2 * TTL))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.table.expire()
        self.ended |= {name for name, at in self.expires.items() if at <= self.now}

    @invariant()
    def blocks_come_back_once_and_not_early(self) -> None:
        news = self.table.released()
        assert not news or self.told, "the engine loop was not woken"
        self.told = 0
        for name, blocks in news:
            assert name not in self.back, "released twice"
            assert name in self.ended
            assert not self.running[name], "released under a running copy"
            assert blocks == self.given[name]
            self.back[name] = blocks
        due = {name for name in self.ended if not self.running[name]}
        assert set(self.back) == due
        assert self.table.live == len(self.given) - len(self.back)
        assert self.table.running == sum(len(ranks) for ranks in self.running.values())


Leases.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestLeases = Leases.TestCase


CLAIMANT = Claimant("d0", 1, Shape())
ONE = frozenset({0})


def refusal(table: LeaseTable, handle: Handle, claimant: Claimant = CLAIMANT, rank: int = 0) -> str:
    with pytest.raises(TransferError) as caught:
        table.claim(handle, claimant, rank, ONE)
    return caught.value.reason


def test_every_refusal_has_its_reason() -> None:
    now = [0.0]
    table = LeaseTable(lambda: now[0])
    good = handle_of("a")
    table.add(good, [0, 1], TTL)
    assert refusal(table, handle_of("b")) == "lease_unknown"
    assert refusal(table, handle_of("a")) == "forged_nonce"
    changed = Handle.from_wire(good.to_wire() | {"num_tokens": 19})
    assert refusal(table, changed) == "forged_handle"
    assert refusal(table, good, rank=1) == "wrong_rank"
    table.claim(good, CLAIMANT, 0, ONE)
    assert refusal(table, good) == "nonce_reused"
    assert refusal(table, good, Claimant("d1", 1, Shape())) == "nonce_reused"


ENDINGS = {
    "lease_released": lambda table, handle: table.release([handle.request_id]),
    "nonce_reused": lambda table, handle: table.confirm(table.claim(handle, CLAIMANT, 0, ONE)),
    "lease_failed": lambda table, handle: table.fail(table.claim(handle, CLAIMANT, 0, ONE)),
}


@pytest.mark.parametrize("reason", ENDINGS)
def test_why_a_lease_has_ended_is_remembered(reason: str) -> None:
    table, handle = LeaseTable(lambda: 0.0), handle_of("a")
    table.add(handle, [0, 1], TTL)
    ENDINGS[reason](table, handle)
    assert refusal(table, handle) == reason


def test_an_expired_lease_is_refused_and_given_back_though_nobody_called_expire() -> None:
    now, woken = [0.0], []
    table, handle = LeaseTable(lambda: now[0], lambda: woken.append(1)), handle_of("a")
    table.add(handle, [0, 1], TTL)
    assert table.next_expiry() == TTL
    now[0] = TTL
    assert refusal(table, handle) == "lease_expired"
    assert woken
    assert table.released() == [("a", [0, 1])]
    assert table.next_expiry() is None


def test_a_claim_ends_once() -> None:
    table = LeaseTable(lambda: 0.0)
    handle = handle_of("a")
    table.add(handle, [0, 1], TTL)
    with pytest.raises(ValueError, match="already has a lease"):
        table.add(handle, [0, 1], TTL)
    claim = table.claim(handle, CLAIMANT, 0, ONE)
    table.confirm(claim)
    with pytest.raises(RuntimeError, match="has ended before"):
        table.fail(claim)
    assert table.released() == [("a", [0, 1])]
    assert table.outcomes["confirmed"] == 1


def test_the_number_of_blocks_must_fit_the_tokens() -> None:
    with pytest.raises(ValueError, match="33 tokens need 3"):
        LeaseTable(lambda: 0.0).add(handle_of("a", 33), [0, 1], TTL)


def test_threads_that_claim_and_end_leases_at_once_lose_no_block() -> None:
    """The engine loop releases while sender threads claim, confirm and fail."""
    table = LeaseTable(lambda: 0.0)
    handles = [handle_of(f"r{i}") for i in range(200)]
    for number, handle in enumerate(handles):
        table.add(handle, [2 * number, 2 * number + 1], TTL)

    def pull(rank: int) -> None:
        for number, handle in enumerate(handles):
            try:
                claim = table.claim(handle, Claimant("d0", 1, Shape(2)), rank, frozenset({0, 1}))
            except TransferError:
                continue
            (table.fail if number % 7 == 0 else table.confirm)(claim)

    threads = [threading.Thread(target=pull, args=(rank,)) for rank in (0, 1)]
    threads.append(threading.Thread(target=lambda: table.release(h.request_id for h in handles[::3])))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    table.release(handle.request_id for handle in handles)
    blocks = [block for _, ids in table.released() for block in ids]
    assert sorted(blocks) == list(range(400))
    assert table.live == 0
