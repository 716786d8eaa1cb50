"""Killed, stopped and slow peers: that transfer fails alone and in time, then a new pair is made."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from distserve.core.shapes import Shape
from distserve.transfer.copies import Copies
from distserve.transfer.errors import TransferError
from transfer_peer import Decode, DecodeProcess, Instance, InstanceProcess, soon

SLOW_S = 0.05  # per access to a layer's pages: a transfer takes half a second and more
MIDST = dict(staging_bytes=2048, delay_s=SLOW_S)


@pytest.fixture(params=[False, True], ids=["gloo", "memory"])
def decode(request: pytest.FixtureRequest) -> Iterator[Decode]:
    decode = Decode(Shape(), staging_bytes=2048, shared_memory=request.param)
    yield decode
    decode.close()


def in_midst(decode: Decode, peer: InstanceProcess, timeout_s: float = 10.0):  # type: ignore[no-untyped-def]
    """A pull of which some blocks have arrived and others have not."""
    handle = peer.call("lease", list(range(16)))
    decode.caches[0].touched.clear()
    future = decode.pull(handle, list(range(16)), timeout_s)[0]
    assert decode.caches[0].touched.wait(10)
    assert not future.done()
    return future


def test_a_killed_source_fails_its_transfer_at_once_and_no_other(decode: Decode) -> None:
    victim = InstanceProcess(Shape(), name="victim", **MIDST)
    other = InstanceProcess(Shape(), name="other", **MIDST)
    try:
        elsewhere = decode.pull(other.call("lease", [1, 2]), [20, 21])[0]
        future = in_midst(decode, victim)
        victim.end()
        start = time.monotonic()
        error = future.exception(10)
        assert isinstance(error, TransferError)
        assert error.code == "UNAVAILABLE"
        assert time.monotonic() - start < 3
        elsewhere.result(15)
        fresh = InstanceProcess(Shape(), name="victim", epoch=2)
        decode.pull(fresh.call("lease", [1, 2]), [1, 2])[0].result(15)
        fresh.end()
    finally:
        victim.end()
        other.end()


def test_a_failed_pull_ends_only_after_the_copies_that_it_has_issued(
    decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late that is: its blocks are given to others then."""
    settling, settled = threading.Event(), threading.Event()

    def settle(self: Copies) -> None:
        settling.set()
        settled.wait(30)

    monkeypatch.setattr(Copies, "settle", settle)
    victim = InstanceProcess(Shape(), name="victim", **MIDST)
    try:
        future = in_midst(decode, victim)
        victim.end()
        assert settling.wait(10)
        with pytest.raises(TimeoutError):
            future.result(1.5)
        settled.set()
        error = future.exception(5)
        assert isinstance(error, TransferError)
        assert error.code == "UNAVAILABLE"
    finally:
        settled.set()
        victim.end()


def test_a_stopped_source_fails_at_the_deadline_and_can_come_back(decode: Decode) -> None:
    peer = InstanceProcess(Shape(), **MIDST)
    try:
        future = in_midst(decode, peer, timeout_s=0.7)
        peer.signal(signal.SIGSTOP)
        start = time.monotonic()
        error = future.exception(10)
        assert isinstance(error, TransferError)
        assert error.code == "DEADLINE_EXCEEDED"
        assert time.monotonic() - start < 3
        peer.signal(signal.SIGCONT)
        assert [blocks for _, blocks in peer.call("returned")[0]] == [list(range(16))]
        stats = decode.pull(peer.call("lease", [1, 2]), [1, 2])[0].result(15)
        assert stats.bytes > 0
        assert soon(lambda: peer.call("stats")[0].pairs == 1)
        assert peer.call("stats")[0].failed == 1
    finally:
        peer.end()


def test_a_slow_source_is_given_up_at_the_deadline_by_both_ends(decode: Decode) -> None:
    peer = InstanceProcess(Shape(), **MIDST)
    try:
        future = in_midst(decode, peer, timeout_s=0.4)
        error = future.exception(10)
        assert isinstance(error, TransferError)
        assert error.code in ("DEADLINE_EXCEEDED", "UNAVAILABLE"), "whoever looked at its clock first"
        assert [blocks for _, blocks in peer.call("returned")[0]] == [list(range(16))]
        assert peer.call("stats")[0].failed == 1
    finally:
        peer.end()


@pytest.mark.parametrize("shared_memory", [False, True], ids=["gloo", "memory"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_dead_or_silent_puller_gives_the_blocks_back(number: signal.Signals, shared_memory: bool) -> None:
    instance = Instance(Shape(), staging_bytes=2048, timeout_s=1.0, delay_s=SLOW_S)
    peer = DecodeProcess(Shape(), staging_bytes=2048, shared_memory=shared_memory)
    try:
        handle = instance.lease(list(range(16)))
        peer.start_pull(handle, list(range(16)))
        assert instance.caches[0].touched.wait(10)
        time.sleep(3 * SLOW_S)
        assert instance.leases[0].released() == [], "the copy runs"
        peer.signal(number)
        assert instance.returned(5) == [[(handle.request_id, list(range(16)))]]
        assert soon(lambda: instance.sources[0].stats().pairs == 0)
        assert instance.sources[0].stats().failed == 1
        assert instance.leases[0].running == instance.leases[0].live == 0
    finally:
        peer.end()
        instance.close()


def test_one_dead_rank_of_two_fails_the_pull_and_the_other_rank_lets_go(decode: Decode) -> None:
    instance = Instance(Shape(2), staging_bytes=2048, delay_s=SLOW_S)
    try:
        handle = instance.lease(list(range(8)))
        future = decode.pull(handle, list(range(8)))[0]
        assert instance.caches[1].touched.wait(10)
        instance.sources[1].close()
        error = future.exception(10)
        assert isinstance(error, TransferError)
        assert error.code == "UNAVAILABLE"
        assert instance.returned() == [[(handle.request_id, list(range(8)))]] * 2
        assert soon(lambda: instance.sources[0].stats().cancelled == 1)
    finally:
        instance.close()


def test_a_dead_address_is_unavailable_at_once(decode: Decode) -> None:
    instance = Instance(Shape())
    handle = instance.lease([1])
    instance.close()
    error = decode.pull(handle, [1])[0].exception(5)
    assert isinstance(error, TransferError)
    assert error.code == "UNAVAILABLE"


def test_a_source_that_was_restarted_in_place_is_called_again(decode: Decode) -> None:
    """Same address and epoch as far as the puller knows: the dead connection is replaced silently."""
    instance = Instance(Shape())
    decode.pull(instance.lease([1]), [1])[0].result(15)
    port = int(instance.sources[0].address.rsplit(":", 1)[1])
    instance.close()
    again = Instance(Shape(), port=port)
    try:
        decode.pull(again.lease([2, 3]), [2, 3])[0].result(15)
        assert decode.differing([1, 2, 3], [1, 2, 3]) == 0
    finally:
        again.close()


def test_failures_leak_neither_threads_nor_descriptors(decode: Decode) -> None:
    def counts() -> tuple[int, int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threading.active_count()

    def fail_once(epoch: int) -> None:
        instance = Instance(Shape(), epoch=epoch, staging_bytes=2048, delay_s=0.01)
        future = decode.pull(instance.lease(list(range(16))), list(range(16)))[0]
        assert instance.caches[0].touched.wait(10)
        instance.close()
        assert isinstance(future.exception(10), TransferError)

    fail_once(1)
    fail_once(2)
    assert soon(lambda: decode.pullers[0].pairs == 1)
    before = counts()
    for epoch in range(3, 11):
        fail_once(epoch)
    assert soon(lambda: all(now <= then for now, then in zip(counts(), before, strict=True))), (
        f"{before} descriptors, tasks and threads have become {counts()}"
    )
