"""Transfers between GPUs: by CUDA IPC, through the host, and over NCCL."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from distserve.core.shapes import Shape
from distserve.transfer import ipc, nccl_environment
from distserve.transfer.chunks import Piece
from distserve.transfer.control import Control
from distserve.transfer.copies import SETTLE_S
from distserve.transfer.errors import TransferError
from distserve.transfer.ipc import IpcChannel
from distserve.transfer.memory import GPU, shared_kind, without_ipc
from distserve.transfer.nccl import NcclChannel
from distserve.transfer.packing import Packer
from transfer_peer import (
    BLOCKS,
    LAYOUT,
    Decode,
    DecodeProcess,
    Instance,
    InstanceProcess,
    RankPages,
    soon,
)

one_gpu = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
SRC, DST = list(range(3, 19)), list(range(20, 4, -1))
DEADLINES = ((signal.SIGKILL, "UNAVAILABLE"), (signal.SIGSTOP, "DEADLINE_EXCEEDED"))


def channel_of(decode: Decode) -> object:
    """The channel of the only pair."""
    (receiver,) = decode.pullers[0]._receivers.values()
    return receiver._channel


def survives_lost_peers(decode: Decode, source: str, **options: object) -> None:
    """A peer is killed, another stopped, in the middle of a pull: that pull fails, the next pair works."""
    for number, code in DEADLINES:
        peer = InstanceProcess(Shape(), epoch=int(number), device=source, staging_bytes=4096, **options)
        try:
            for future in decode.pull(peer.call("lease", SRC), DST, 60.0):
                future.result(60)
            assert decode.differing(SRC, DST) == 0
            peer.call("slow_down", 0.1)
            page = decode.caches[0].pages(0)[0]
            page.zero_()
            torch.cuda.synchronize(page.device)
            future = decode.pull(peer.call("lease", SRC), DST, 5.0)[0]
            assert soon(lambda page=page: bool(page.any()), 10.0)
            peer.signal(number)
            error = future.exception(15)
            assert isinstance(error, TransferError)
            assert error.code == code
        finally:
            peer.end()


@pytest.mark.gpu
@one_gpu
@pytest.mark.parametrize(
    "options",
    [{"backend": "gloo", "shared_memory": False}, {"backend": "gloo"}, {"backend": "nccl"}],
    ids=["gloo", "memory", "memory instead of nccl"],
)
def test_pages_of_one_process_move_through_the_host(options: dict[str, object]) -> None:
    """CUDA opens no handle in the process that made it, and NCCL takes no two ranks on one GPU."""
    instance = Instance(Shape(), device="cuda:0", staging_bytes=4096, **options)
    decode = Decode(Shape(2), device="cuda:0", **options)
    try:
        for _ in range(2):
            for future in decode.pull(instance.lease(SRC), DST):
                future.result(30)
            assert decode.differing(SRC, DST) == 0
        assert not isinstance(channel_of(decode), IpcChannel)
    finally:
        decode.close()
        instance.close()


@pytest.mark.gpu
@one_gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("head_axis", [1, 2], ids=["heads first", "tokens first"])
def test_two_processes_on_one_gpu_use_ipc(dtype: str, head_axis: int) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    options = {"backend": "nccl", "layout": layout, "head_axis": head_axis, "device": "cuda:0"}
    peer = InstanceProcess(Shape(), staging_bytes=4096, **options)
    decode = Decode(Shape(2), **options)
    try:
        for _ in range(3):
            for future in decode.pull(peer.call("lease", SRC), DST, 60.0):
                future.result(60)
            assert decode.differing(SRC, DST) == 0
        assert isinstance(channel_of(decode), IpcChannel)
        (stats,) = peer.call("stats")
        assert stats.device_bytes == 2 * 2 * 4096  # two pairs, two lanes
    finally:
        decode.close()
        peer.end()


@pytest.mark.gpu
@one_gpu
def test_ipc_survives_a_killed_and_a_stopped_peer() -> None:
    decode = Decode(Shape(), device="cuda:0", backend="nccl", staging_bytes=4096)
    try:
        survives_lost_peers(decode, "cuda:0", backend="nccl")
    finally:
        decode.close()


def busy(seconds: float) -> None:
    """Keeps the current stream of a GPU of 2 GHz so long."""
    torch.cuda._sleep(int(seconds * 2e9))


@pytest.mark.gpu
@one_gpu
def test_a_failed_pull_ends_only_after_the_copies_that_it_has_issued() -> None:
    """Its blocks are given to others then. Here the device is busy while the source is killed."""
    decode = Decode(Shape(), device="cuda:0", backend="nccl", staging_bytes=4096)
    peer = InstanceProcess(Shape(), device="cuda:0", staging_bytes=4096, backend="nccl")
    try:
        for future in decode.pull(peer.call("lease", SRC), DST, 60.0):
            future.result(60)
        (receiver,) = decode.pullers[0]._receivers.values()
        stream = receiver._copies._stream
        with torch.cuda.stream(stream):
            busy(10 * SETTLE_S)
            over = stream.record_event()
        peer.call("slow_down", 0.1)
        future = decode.pull(peer.call("lease", SRC), DST, 60.0)[0]
        time.sleep(0.35)  # some messages have come, others have not
        peer.end()
        assert not over.query()
        assert isinstance(future.exception(30), TransferError)
        assert over.query()
    finally:
        decode.close()
        peer.end()


@pytest.mark.gpu
@one_gpu
def test_lanes_are_used_again_once_their_last_copy_has_ended() -> None:
    pool = ipc.LanePool(torch.device("cuda:0"), 4096)
    lanes = pool.take()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        busy(1.0)
        lanes.filled[1].record()
    pool.give(lanes)
    others = pool.take()
    assert others is not lanes
    pool.give(others)
    stream.synchronize()
    assert pool.take() is lanes


@pytest.mark.gpu
@one_gpu
def test_killed_pullers_leave_no_shared_memory_behind() -> None:
    """torch would keep what a killed process had mapped, for good."""
    instance = Instance(Shape(), device="cuda:0", backend="nccl", staging_bytes=4096)
    source = instance.sources[0]
    try:
        for number in range(3):
            decode = DecodeProcess(Shape(), device="cuda:0", backend="nccl")
            decode.start_pull(instance.lease(SRC), DST)
            assert soon(lambda number=number: source.stats().confirmed == number + 1, 60.0)
            decode.signal(signal.SIGKILL)
            decode.end()
            assert soon(lambda: source.stats().pairs == 0, 30.0)
            assert source.stats().device_bytes == 2 * 4096
    finally:
        instance.close()


@pytest.mark.gpu
@one_gpu
@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_pack_nccl_to_itself_unpack(dtype: str) -> None:
    """On one device NCCL sends to the rank that it is."""
    device = torch.device("cuda:0")
    layout = replace(LAYOUT, dtype=dtype)
    source = RankPages(layout, 0, seed=1, head_axis=2, device="cuda:0")
    target = RankPages(layout, 0, seed=None, head_axis=2, device="cuda:0")
    message = [Piece(layer, part, range(4), 0, len(SRC)) for layer in range(5) for part in (0, 1)]
    group = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, dist.ProcessGroupNCCL.Options())
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))  # the pages have been made there
    try:
        with torch.cuda.stream(stream):
            packer = Packer(source, 0, 0)
            size = sum(piece.count * len(piece.heads) for piece in message) * packer.unit
            sent, received = (torch.zeros(size, dtype=packer.dtype, device=device) for _ in range(2))
            packer.pack(message, torch.tensor(SRC, device=device), sent)
            group._start_coalescing()
            group.send([sent], 0, 0)
            group.recv([received], 0, 0)
            group._end_coalescing().wait()
            Packer(target, 0, 0).unpack(message, torch.tensor(DST, device=device), received)
        stream.synchronize()
    finally:
        group.abort()
    for layer in range(5):
        for got, want in zip(target.pages(layer), source.pages(layer), strict=True):
            assert torch.equal(got[DST], want[SRC])
            rest = [block for block in range(BLOCKS) if block not in DST]
            assert not got[rest].any()


@pytest.mark.gpu2
@two_gpus
@pytest.mark.parametrize("shared_memory", [True, False], ids=["ipc", "nccl"])
def test_between_two_gpus_and_after_lost_peers(shared_memory: bool) -> None:
    options = {"backend": "nccl", "shared_memory": shared_memory}
    decode = Decode(Shape(), device="cuda:1", staging_bytes=4096, **options)
    try:
        survives_lost_peers(decode, "cuda:0", **options)
        peer = InstanceProcess(Shape(), epoch=99, device="cuda:0", **options)
        for future in decode.pull(peer.call("lease", SRC), DST, 60.0):
            future.result(60)
        assert decode.differing(SRC, DST) == 0
        receivers = [r for r in decode.pullers[0]._receivers.values() if r.key.epoch == 99]
        channel = receivers[0]._channel
        assert isinstance(channel, IpcChannel if shared_memory else NcclChannel)
        if isinstance(channel, NcclChannel):
            assert channel.device_bytes > 0  # of the communicator
        peer.end()
    finally:
        decode.close()


def test_nccl_is_refused_by_name_for_pages_on_a_cpu() -> None:
    with pytest.raises(ValueError, match=r"backend='nccl'.*cpu"):
        Decode(Shape(), backend="nccl")
    with pytest.raises(ValueError, match="allowed are 'gloo' and 'nccl'"):
        Instance(Shape(), backend="mpi")
    assert RankPages(LAYOUT, 0, 1).pages(0)[0].device.type == "cpu"


@pytest.mark.parametrize("pid", [0, os.getpid()], ids=["unknown GPU", "same process"])
def test_a_puller_that_cannot_map_the_memory_refuses_it(pid: int) -> None:
    """Both ends then know that the pair takes another way."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        source, puller = Control(listener.accept()[0]), Control(theirs)
    deadline = time.monotonic() + 20
    for end in (source, puller):
        end.unlock(None, None)
    offer = {"op": "ipc", "pid": pid, "bytes": 4096, "token": bytes(16), "lanes": [{}, {}], "uuid": "none"}
    source.send(offer, deadline)
    source.send({"ok": False}, deadline)
    assert ipc.attach(puller, torch.device("cuda:0"), 4096, deadline) is None
    assert source.recv(deadline) == {"ok": False}
    source.send({**offer, "token": "no bytes"}, deadline)
    with pytest.raises(TransferError, match="pid, bytes and token are needed"):
        ipc.attach(puller, torch.device("cuda:0"), 4096, deadline)
    for end in (source, puller):
        end.close()


def test_which_channel_two_processes_choose() -> None:
    host, other = "boot pid:[1] 0", "boot pid:[2] 0"
    assert shared_kind(host, host, "gloo") == "memory"
    assert shared_kind(host, other, "gloo") == "gloo"
    assert shared_kind("", "", "gloo") == "gloo"
    one, two = f"{host}{GPU}GPU-1", f"{host}{GPU}GPU-2"
    assert shared_kind(one, one, "nccl") == "ipc"
    assert shared_kind(one, two, "nccl") == "ipc"
    assert shared_kind(one, f"{other}{GPU}GPU-1", "nccl") == "nccl"
    assert shared_kind(one, host, "gloo") == "gloo"  # one has its pages on a CPU
    assert without_ipc(one, one, "nccl") == "memory"
    assert without_ipc(one, two, "nccl") == "nccl"


def test_torch_settings_of_a_pair_are_not_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # the operator's
    for name in ("BLOCKING_WAIT", "DUMP_ON_TIMEOUT", "NONBLOCKING_TIMEOUT"):
        monkeypatch.setenv(f"TORCH_NCCL_{name}", "")  # so that it is as before after the test
        monkeypatch.delenv(f"TORCH_NCCL_{name}")
    nccl_environment.settle()
    names = set(os.environ)
    with nccl_environment.of_a_pair():
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"
    assert int(os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"]) < 60  # torch's own: half an hour
    assert set(os.environ) == names
