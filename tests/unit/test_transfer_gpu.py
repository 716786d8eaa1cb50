"""Transfers between GPUs: through the host where two instances share one, over NCCL between two."""

from __future__ import annotations

import signal

import pytest
import torch

from distserve.core.shapes import Shape
from distserve.transfer.errors import TransferError
from transfer_peer import LAYOUT, Decode, Instance, InstanceProcess, RankPages

one_gpu = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a CUDA device")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
SRC, DST = list(range(3, 19)), list(range(20, 4, -1))


@pytest.mark.gpu
@one_gpu
@pytest.mark.parametrize(
    "options",
    [{"backend": "gloo", "shared_memory": False}, {"backend": "gloo"}, {"backend": "nccl"}],
    ids=["gloo", "memory", "one gpu instead of nccl"],
)
def test_pages_on_one_gpu_move_through_the_host(options: dict[str, object]) -> None:
    instance = Instance(Shape(), device="cuda:0", staging_bytes=4096, **options)
    decode = Decode(Shape(2), device="cuda:0", **options)
    try:
        for _ in range(2):
            for future in decode.pull(instance.lease(SRC), DST):
                future.result(30)
            assert decode.differing(SRC, DST) == 0
    finally:
        decode.close()
        instance.close()


@pytest.mark.gpu2
@two_gpus
def test_nccl_between_two_gpus_survives_a_killed_and_a_stopped_peer() -> None:
    decode = Decode(Shape(), device="cuda:1", backend="nccl", staging_bytes=4096)
    try:
        for number, code in ((signal.SIGKILL, "UNAVAILABLE"), (signal.SIGSTOP, "DEADLINE_EXCEEDED")):
            peer = InstanceProcess(
                Shape(), epoch=int(number), device="cuda:0", backend="nccl", staging_bytes=4096
            )
            for future in decode.pull(peer.call("lease", SRC), DST, 60.0):
                future.result(60)
            assert decode.differing(SRC, DST) == 0
            peer.call("slow_down", 0.05)
            decode.caches[0].touched.clear()
            future = decode.pull(peer.call("lease", SRC), DST, 3.0)[0]
            assert decode.caches[0].touched.wait(10)
            peer.signal(number)
            error = future.exception(15)
            assert isinstance(error, TransferError)
            assert error.code == code
            peer.end()
    finally:
        decode.close()


def test_nccl_is_refused_by_name_for_pages_on_a_cpu() -> None:
    with pytest.raises(ValueError, match=r"backend='nccl'.*cpu"):
        Decode(Shape(), backend="nccl")
    with pytest.raises(ValueError, match="allowed are 'gloo' and 'nccl'"):
        Instance(Shape(), backend="mpi")
    assert RankPages(LAYOUT, 0, 1).pages(0)[0].device.type == "cpu"


def test_torch_settings_of_a_pair_are_not_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from distserve.transfer.nccl import NcclChannel

    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    with NcclChannel._settings(7):
        assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "1"
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
