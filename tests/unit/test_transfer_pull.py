"""Pulls between two processes over Gloo on loopback: content, shapes, bounded buffers, refusals, cancel."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from distserve.core.shapes import Shape
from distserve.transfer.channel import GlooChannel
from distserve.transfer.errors import TransferError
from distserve.transfer.handle import Handle
from distserve.transfer.source import KVSource
from transfer_peer import BLOCKS, LAYOUT, Decode, Instance, InstanceProcess, RankPages, soon

PAIRS = [
    (Shape(1, 1), Shape(1, 1), 4),
    (Shape(2, 1), Shape(1, 1), 4),
    (Shape(1, 1), Shape(2, 2), 4),
    (Shape(2, 2), Shape(1, 2), 4),
    (Shape(3, 1), Shape(2, 1), 4),  # uneven
    (Shape(4, 1), Shape(1, 2), 2),  # replicated KV heads: half of the source ranks give nothing
    (Shape(2, 1), Shape(4, 1), 2),
]


def reason(future) -> str:  # type: ignore[no-untyped-def]
    error = future.exception(15)
    assert isinstance(error, TransferError), error
    return error.reason


@pytest.fixture
def instance() -> Iterator[Instance]:
    instance = Instance(Shape())
    yield instance
    instance.close()


@pytest.fixture(params=[False, True], ids=["gloo", "memory"])
def decode(request: pytest.FixtureRequest) -> Iterator[Decode]:
    decode = Decode(Shape(), shared_memory=request.param)
    yield decode
    decode.close()


@pytest.mark.parametrize("shared_memory", [False, True], ids=["gloo", "memory"])
@pytest.mark.parametrize(("src", "dst", "heads"), PAIRS, ids=str)
def test_content_is_equal_for_every_pair_of_shapes(
    src: Shape, dst: Shape, heads: int, shared_memory: bool
) -> None:
    layout = replace(LAYOUT, kv_heads=heads)
    peer = InstanceProcess(src, layout=layout)
    decode = Decode(dst, layout=layout, shared_memory=shared_memory)
    try:
        for _ in range(2):  # the second uses the pairs of the first
            src_blocks, dst_blocks = random.sample(range(BLOCKS), 7), random.sample(range(BLOCKS), 7)
            for cache in decode.caches:
                for layer in range(len(cache._pages)):
                    for pages in cache.pages(layer):
                        pages.zero_()
            handle = peer.call("lease", src_blocks, 30.0, 26)  # the last of 7 blocks is half full
            stats = [future.result(15) for future in decode.pull(handle, dst_blocks)]
            assert decode.differing(src_blocks, dst_blocks) == 0
            assert sum(s.bytes for s in stats) == sum(
                7 * sum(p[0].numel() for pages in c._pages for p in pages) * 4 for c in decode.caches
            )
            assert peer.call("returned") == [[(handle.request_id, src_blocks)]] * src.ranks
    finally:
        decode.close()
        peer.end()


@pytest.mark.parametrize("shared_memory", [False, True], ids=["gloo", "memory"])
def test_a_prompt_of_many_buffers_uses_two_small_buffers(shared_memory: bool) -> None:
    """One block of one layer's K is 512 bytes, the smaller of the two ends' buffers 4096."""
    small = Instance(Shape(), name="small", staging_bytes=4096)
    decode = Decode(Shape(), staging_bytes=1 << 16, shared_memory=shared_memory)
    try:
        src_blocks, dst_blocks = list(range(20)), list(range(4, 24))
        handle = small.lease(src_blocks)
        stats = decode.pull(handle, dst_blocks)[0].result(15)
        assert stats.bytes == 20 * 2 * 5 * 512 >= 12 * 4096
        assert decode.differing(src_blocks, dst_blocks) == 0
        copies = decode.pullers[0]._receivers.popitem()[1]._copies
        assert copies is not None
        assert sum(b.numel() * b.element_size() for b in copies._buffers) <= 2 << 16
    finally:
        decode.close()
        small.close()


def test_many_pulls_share_one_pair(instance: Instance, decode: Decode) -> None:
    handles = [instance.lease([i, i + 1]) for i in range(12)]
    futures = [decode.pull(handle, [2 * i, 2 * i + 1])[0] for i, handle in enumerate(handles)]
    for future in futures:
        future.result(15)
    assert instance.sources[0].stats().pairs == 1
    assert soon(lambda: instance.sources[0].stats().confirmed == 12)
    assert decode.pullers[0].pending == 0
    got = decode.caches[0].pages(3)[1]
    want = instance.caches[0].pages(3)[1]
    assert all(torch.equal(got[2 * i : 2 * i + 2], want[i : i + 2]) for i in range(12))


def test_stale_forged_reused_and_foreign_handles_are_refused(instance: Instance, decode: Decode) -> None:
    good = instance.lease([1, 2])
    later = instance.lease([3, 4], ttl=0.0)

    def pull(**changes: object) -> str:
        return reason(decode.pull(replace(good, **changes), [5, 6])[0])

    assert pull(epoch=2) == "stale_epoch"
    assert pull(instance="p1") == "wrong_instance"
    assert pull(request_id="other") == "lease_unknown"
    assert pull(nonce=b"0" * 16) == "forged_nonce"
    assert pull(num_tokens=7) == "forged_handle"
    assert pull(first_token=6) == "forged_handle"
    assert reason(decode.pull(later, [5, 6])[0]) == "lease_expired"
    assert not any(p.any() for pages in decode.caches[0]._pages for p in pages), "refused, yet something came"
    decode.pull(good, [5, 6])[0].result(15)
    assert reason(decode.pull(good, [7, 8])[0]) == "nonce_reused"
    assert decode.differing([1, 2], [5, 6]) == 0
    assert instance.sources[0].stats().refused == 8
    assert instance.sources[0].stats().pairs <= 3, (
        "one per (instance, epoch): a refusal does not cost the pair"
    )


def test_a_second_decode_instance_cannot_use_a_claimed_handle(instance: Instance, decode: Decode) -> None:
    other = Decode(Shape(2), name="d1")
    try:
        instance.caches[0].delay_s = 0.05  # the first pull takes a second
        handle = instance.lease([1, 2])
        first = decode.pull(handle, [5, 6])[0]
        assert instance.caches[0].touched.wait(5)
        assert reason(other.pull(handle, [5, 6])[1]) == "nonce_reused"
        first.result(15)
    finally:
        other.close()


@pytest.mark.parametrize(
    ("field", "value"),
    [("model_hash", "other"), ("dtype", "bf16"), ("block_size", 8), ("layers", 6), ("page_format", "hnd")],
)
def test_a_layout_mismatch_names_the_field_at_both_ends(
    instance: Instance, field: str, value: object
) -> None:
    decode = Decode(Shape(), layout=replace(LAYOUT, **{field: value}))
    try:
        handle = instance.lease([1, 2])
        with pytest.raises(TransferError, match=field) as caught:
            decode.pull(handle, [1, 2])
        assert caught.value.reason == "layout_mismatch"
        lying = replace(handle, layout=decode.layout)  # gets past the puller's own check
        error = decode.pull(lying, list(range(lying.num_blocks)))[0].exception(15)
        assert isinstance(error, TransferError)
        assert error.reason == "layout_mismatch"
        assert field in str(error)
    finally:
        decode.close()


def test_blocks_that_do_not_fit_are_refused_at_once(instance: Instance, decode: Decode) -> None:
    handle = instance.lease([1, 2])
    with pytest.raises(ValueError, match="the handle has 2"):
        decode.pull(handle, [1])
    with pytest.raises(ValueError, match=r"\[0, 24\)"):
        decode.pull(handle, [1, BLOCKS])


def test_a_cancelled_pull_ends_early_and_keeps_the_pair(decode: Decode) -> None:
    instance = Instance(Shape(), staging_bytes=4096)
    try:
        decode.pull(instance.lease([0]), [0])[0].result(15)
        instance.returned()
        instance.caches[0].delay_s = 0.02
        handle = instance.lease(list(range(20)))
        decode.caches[0].touched.clear()
        future = decode.pull(handle, list(range(4, 24)))[0]
        assert decode.caches[0].touched.wait(5)  # in the middle of the copy
        decode.pullers[0].cancel(future)
        assert reason(future) == "cancelled"
        after = [[p.clone() for p in pages] for pages in decode.caches[0]._pages]
        assert instance.returned() == [[(handle.request_id, list(range(20)))]]
        assert soon(lambda: instance.sources[0].stats().cancelled == 1)
        instance.caches[0].delay_s = 0.0
        time.sleep(0.05)
        assert all(
            torch.equal(a, b)
            for before, now in zip(after, decode.caches[0]._pages, strict=True)
            for a, b in zip(before, now, strict=True)
        ), "written to after the future had ended"
        decode.pull(instance.lease([1, 2]), [5, 6])[0].result(15)
        assert instance.sources[0].stats().pairs == 1
    finally:
        instance.close()


def test_a_storm_of_cancels_and_releases_loses_nothing(decode: Decode) -> None:
    """Wherever it hits: queued, before the claim, in the copy, after it."""
    rng = random.Random(1)
    instance = Instance(Shape(2), staging_bytes=2048)
    try:
        given, futures = [], []
        for _ in range(80):
            blocks = rng.sample(range(BLOCKS), 6)
            handle = instance.lease(blocks)
            given.append((handle.request_id, blocks))
            future = decode.pull(handle, blocks)[0]
            futures.append(future)
            if rng.random() < 0.3:
                time.sleep(rng.random() * 0.01)
            chance = rng.random()
            if chance < 0.5:
                decode.pullers[0].cancel(rng.choice(futures))
            elif chance < 0.7:
                for leases in instance.leases:
                    leases.release([rng.choice(given)[0]])
        for future in futures:
            error = future.exception(15)
            assert error is None or error.reason in ("cancelled", "lease_released", "lease_failed"), error
        for leases in instance.leases:
            leases.release(name for name, _ in given)
            assert soon(lambda: leases.live == leases.running == 0)  # noqa: B023
            assert sorted(leases.released()) == sorted(given)
        assert decode.pullers[0].pending == 0
        decode.pull(instance.lease([1, 2]), [5, 6])[0].result(15)
        assert [source.stats().failed for source in instance.sources] == [0, 0], "no pair was lost over it"
    finally:
        instance.close()


def test_release_during_a_copy_keeps_the_blocks_until_it_ends(instance: Instance, decode: Decode) -> None:
    instance.caches[0].delay_s = 0.02
    handle = instance.lease([1, 2, 3])
    instance.caches[0].touched.clear()
    future = decode.pull(handle, [4, 5, 6])[0]
    assert instance.caches[0].touched.wait(5)
    instance.leases[0].release([handle.request_id])
    assert instance.leases[0].released() == [], "given back under a running copy"
    assert instance.leases[0].running == 1
    future.result(15)
    assert instance.returned() == [[(handle.request_id, [1, 2, 3])]]
    assert decode.differing([1, 2, 3], [4, 5, 6]) == 0


def test_a_pull_behind_a_slow_one_fails_by_its_own_deadline(instance: Instance, decode: Decode) -> None:
    instance.caches[0].delay_s = 0.05
    slow = decode.pull(instance.lease([1, 2]), [1, 2])[0]
    start = time.monotonic()
    late = decode.pull(instance.lease([3, 4]), [3, 4], timeout_s=0.2)[0]
    assert reason(late) == "timeout"
    assert time.monotonic() - start < 3
    slow.result(15)


def test_closing_the_puller_ends_its_pulls(instance: Instance, decode: Decode) -> None:
    instance.caches[0].delay_s = 0.1
    future = decode.pull(instance.lease([1, 2]), [1, 2])[0]
    assert instance.caches[0].touched.wait(5)
    start = time.monotonic()
    decode.close()
    assert reason(future) in ("closed", "peer_gone")
    assert time.monotonic() - start < 3
    assert instance.returned()[0]
    with pytest.raises(TransferError, match="closed"):
        decode.pull(instance.lease([3]), [3])


def test_an_idle_pair_is_closed_and_made_again(instance: Instance) -> None:
    decode = Decode(Shape(), idle_s=0.1)
    try:
        for _ in range(2):
            decode.pull(instance.lease([1]), [1])[0].result(15)
            assert soon(lambda: not decode.pullers[0].pairs)
            assert soon(lambda: not instance.sources[0].stats().pairs)
    finally:
        decode.close()


def test_the_shared_secret_is_checked_by_both_ends() -> None:
    instance = Instance(Shape(), secret=b"one")
    try:
        for secret in (None, b"two"):
            stranger = Decode(Shape(), secret=secret)
            error = stranger.pull(instance.lease([1]), [1])[0].exception(15)
            assert isinstance(error, TransferError)
            assert error.reason == "unauthenticated"
            stranger.close()
        friend = Decode(Shape(), secret=b"one")
        friend.pull(instance.lease([1]), [1])[0].result(15)
        friend.close()
    finally:
        instance.close()


def test_other_machines_are_reached_with_a_secret_only(decode: Decode) -> None:
    with pytest.raises(TransferError, match="only loopback"):
        KVSource(RankPages(LAYOUT, 0, 1), None, Shape(), 0, LAYOUT, "p0", 1, host="0.0.0.0")  # type: ignore[arg-type]
    handle = Handle("p0", 1, "r", b"0" * 16, 4, 1, LAYOUT, ("192.0.2.1:4000",))
    assert reason(decode.pull(handle, [1])[0]) == "no_secret"


@pytest.mark.parametrize("target", ["distserve.transfer.memory._map", "os.memfd_create"])
def test_memory_that_cannot_be_shared_gives_way_to_gloo(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    def fails(*args: object) -> None:
        raise PermissionError

    monkeypatch.setattr(target, fails)
    decode = Decode(Shape())
    try:
        decode.pull(instance.lease([1, 2]), [1, 2])[0].result(15)
        assert decode.differing([1, 2], [1, 2]) == 0
        receiver = decode.pullers[0]._receivers.popitem()[1]
        assert isinstance(receiver._channel, GlooChannel)
    finally:
        decode.close()


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "huge": b"\xff" * 64,
    "cut short": b"\0\0\0\2\x81\xa1",
    "no msgpack": b"\0\0\0\1\xc1",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_strangers_do_not_disturb_a_source(instance: Instance, decode: Decode, garbage: bytes) -> None:
    host, port = instance.sources[0].address.rsplit(":", 1)
    # until the source hangs up, perhaps in the middle of what is sent here
    with socket.create_connection((host, int(port)), timeout=5) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(garbage)
        with contextlib.suppress(OSError):  # not connected any more
            sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    decode.pull(instance.lease([1]), [1])[0].result(15)
