"""Collectives and pipes, in shared memory and over process groups: same results, lost ranks noticed."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from distserve.core.shapes import Shape
from distserve.worker.link import Link
from distserve.worker.link_store import LeaderStore, RankStore, Serving, Values
from distserve.worker.memory_group import SLOT_BYTES, pipe_bytes
from distserve.worker.parallel import RankLinks, RankLost
from distserve.worker.process_groups import connect_groups, join_store, listening_store
from distserve.worker.wires import apart, close_wires, connect_wires, lay_wires

T = TypeVar("T")
KINDS = ["memory", "gloo", "gloo over links"]


def on_ranks(shape: Shape, kind: str, work: Callable[[RankLinks], T], timeout_s: float = 20.0) -> list[T]:
    """Runs `work` on every rank of an instance, each in a thread of its own; results by rank."""
    devices = ["cpu:0"] * shape.ranks
    wires = lay_wires(shape, pipe_bytes(1, 1)) if kind == "memory" else []
    store, address = listening_store("127.0.0.1", timeout_s)
    values = Values(timeout_s)
    pairs = [socket.socketpair() for _ in range(1, shape.ranks)]
    Serving(values, [(r, Link(ours, timeout_s)) for r, (ours, _) in enumerate(pairs, 1)], timeout_s)
    alive: list[RankLinks] = []  # until all are done: a rank that has ended is lost to the others

    def run(rank: int) -> T:
        if kind == "memory":
            links = connect_wires(wires[rank], shape, rank, devices, timeout_s)
        else:
            if kind == "gloo":
                own = store if rank == 0 else join_store(address, timeout_s)
            else:
                own = LeaderStore(values) if rank == 0 else RankStore(Link(pairs[rank - 1][1], 9), timeout_s)
            links = connect_groups("gloo", own, shape, rank, torch.device("cpu"), timeout_s, "127.0.0.1")
        alive.append(links)
        return work(links)

    with ThreadPoolExecutor(shape.ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(shape.ranks)]
        return [future.result(60.0) for future in futures]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_sums_of_any_size_are_the_same_on_all_ranks(kind: str, tp: int) -> None:
    sizes = [(0, 8), (1, 1), (5, 64), (3, SLOT_BYTES // 4 + 1)]  # nothing; small; more than one slot

    def sums(links: RankLinks) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(links.rank)
        return [
            links.group.all_reduce(torch.randn(size, generator=generator)) for _ in range(3) for size in sizes
        ]

    found = on_ranks(Shape(tp), kind, sums)
    generators = [torch.Generator().manual_seed(rank) for rank in range(tp)]
    for index, size in enumerate(sizes * 3):
        expected = torch.stack([torch.randn(size, generator=g) for g in generators]).sum(0)
        for result in found:
            torch.testing.assert_close(result[index], expected)
            if kind == "memory":
                assert torch.equal(result[index], found[0][index])


@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_different_widths_are_joined(kind: str) -> None:
    widths = [SLOT_BYTES // 8, 7]

    def gather(links: RankLinks) -> torch.Tensor:
        mine = torch.full((3, widths[links.rank]), float(links.rank), dtype=torch.bfloat16)
        return links.group.all_gather(mine, widths)

    for found in on_ranks(Shape(2), kind, gather):
        assert found.shape == (3, sum(widths))
        assert torch.equal(found[:, : widths[0]], torch.zeros(3, widths[0], dtype=torch.bfloat16))
        assert torch.equal(found[:, widths[0] :], torch.ones(3, 7, dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_stage_sends_arrives_in_order_at_the_same_slice_of_the_next(kind: str) -> None:
    sizes = [(1, 4), (9, SLOT_BYTES // 8), (2, 4)]  # the second fills the ring several times

    def relay(links: RankLinks) -> list[float]:
        seen = []
        for number, size in enumerate(sizes):
            tensor = torch.full(size, float(10 * links.rank + number))
            if links.pipe_in is not None:
                links.pipe_in.receive(tensor)
                assert tensor.min() == tensor.max()
                seen.append(float(tensor[0, 0]))
            if links.pipe_out is not None:
                links.pipe_out.send(tensor)
        return seen

    found = on_ranks(Shape(2, 3), kind, relay)
    for tp_rank in range(2):
        first = [10.0 * tp_rank + number for number in range(3)]
        assert [found[stage * 2 + tp_rank] for stage in range(3)] == [[], first, first]


def test_a_sender_goes_on_while_the_ring_has_room() -> None:
    wires = lay_wires(Shape(1, 2), pipe_bytes(2 * SLOT_BYTES, 2))
    links = connect_wires(wires[0], Shape(1, 2), 0, ["cpu:0", "cpu:0"], 0.2)
    assert links.pipe_out is not None
    for _ in range(3):  # nobody receives
        links.pipe_out.send(torch.zeros(SLOT_BYTES // 4))
    with pytest.raises(RankLost, match=r"rank 1 has not answered within 0\.2 s"):
        links.pipe_out.send(torch.zeros(1))
    close_wires(wires[1:])
    with pytest.raises(RankLost, match="rank 1 is gone"):
        links.pipe_out.send(torch.zeros(1))


def test_a_rank_that_is_gone_or_late_is_named() -> None:
    wires = lay_wires(Shape(3), 0)
    links = connect_wires(wires[0], Shape(3), 0, ["cpu:0"] * 3, 0.2)
    began = time.monotonic()
    with pytest.raises(RankLost, match=r"rank 1 has not answered within 0\.2 s"):
        links.group.all_reduce(torch.zeros(4))
    assert 0.15 < time.monotonic() - began < 5
    close_wires(wires[1:])
    with pytest.raises(RankLost, match="rank 1 is gone"):
        links.group.all_reduce(torch.zeros(4))


def test_gloo_names_no_rank_but_ends_at_the_deadline() -> None:
    def one_leaves(links: RankLinks) -> str:
        if links.rank == 1:
            return ""
        with pytest.raises(RankLost) as error:
            links.group.all_reduce(torch.zeros(4))
        return str(error.value)

    assert on_ranks(Shape(2), "gloo", one_leaves, 1.0)[0].startswith("process group: ")


def test_wires_leave_no_descriptor_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        close_wires(lay_wires(Shape(4, 2), pipe_bytes(1, 1)))
    assert len(os.listdir("/proc/self/fd")) == before


def test_ranks_spin_only_on_cores_of_their_own() -> None:
    assert apart(["cpu:0", "cpu:1", "cpu:2-3"])
    assert not apart(["cpu:0", "cpu:1", "cpu:0-3"])
