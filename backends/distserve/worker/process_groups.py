"""Links between ranks through `torch.distributed`: NCCL between GPUs, Gloo between CPUs.

The groups are made directly from a store, outside the default group, so that several engines and their
transfer groups can live in one process.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from distserve.core.shapes import Shape
from distserve.transfer import nccl_environment
from distserve.worker.link_store import NamedStore
from distserve.worker.parallel import ParallelGroup, Pipe, RankLinks, RankLost

IN_FLIGHT = 2  # messages of a pipe whose tensors are kept, unless told otherwise


class CheckedGroup:
    """`Collectives` over a process group whose failures become `RankLost`."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def rank(self) -> int:
        return int(self._group.rank())

    def size(self) -> int:
        return int(self._group.size())

    def allreduce(self, tensors: list[Tensor]) -> CheckedWork:
        return CheckedWork(self._group.allreduce, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> CheckedWork:
        return CheckedWork(self._group.allgather, outputs, inputs)


class CheckedWork:
    """An operation that runs. `wait` orders a GPU's current stream after it, or blocks on a CPU."""

    def __init__(self, start: Any, *arguments: Any) -> None:
        with _lost():
            self._work = start(*arguments)

    def wait(self) -> None:
        with _lost():
            self._work.wait()


class GroupPipe:
    """A `Pipe` over a group of two, the sender being rank 0 of it."""

    def __init__(self, group: Any, messages: int) -> None:
        """`messages`: sent and not received, before the sender waits."""
        self._group = group
        self._messages = messages
        self._works: deque[tuple[CheckedWork, Tensor]] = deque()

    def send(self, tensor: Tensor) -> None:
        if len(self._works) == self._messages:
            self._works.popleft()[0].wait()
        content = tensor.contiguous()
        self._works.append((CheckedWork(self._group.send, [content], 1, 0), content))

    def receive(self, into: Tensor) -> None:
        CheckedWork(self._group.recv, [into], 0, 0).wait()


def listening_store(host: str, timeout_s: float) -> tuple[Any, str]:
    """A store that this process serves on `host`, at a free port: the store, and its "host:port"."""
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        # the store takes the descriptor over and closes it
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, f"{host}:{port}"


def join_store(address: str, timeout_s: float) -> Any:
    """The store that another process serves."""
    host, _, port = address.rpartition(":")
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, int(port), is_master=False, timeout=timeout, wait_for_workers=False
    )


def connect_groups(
    kind: str,
    store: Any,
    shape: Shape,
    rank: int,
    device: torch.device,
    timeout_s: float,
    host: str,
    messages: int = IN_FLIGHT,
) -> RankLinks:
    """A rank's links; all ranks call this at the same time. Raises `RankLost`.

    `kind`: "gloo" or "nccl". `timeout_s` bounds every later operation. `host`: the address of this process
    for the others (Gloo). `messages`: of a pipe, before its sender waits.
    """
    stage, tp_rank = shape.coordinates(rank)

    def join(name: str, index: int, size: int) -> Any:
        prefixed = store.part(name) if isinstance(store, NamedStore) else dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        with _lost():
            if kind == "gloo":
                return _gloo(prefixed, index, size, timeout_s, host)
            return _nccl(prefixed, index, size, timeout_s)

    group = ParallelGroup()
    if shape.tp > 1:
        group = ParallelGroup(CheckedGroup(join(f"tp{stage}", tp_rank, shape.tp)))
    pipe_in: Pipe | None = None
    pipe_out: Pipe | None = None
    if stage > 0:
        pipe_in = GroupPipe(join(f"pipe{stage - 1}.{tp_rank}", 1, 2), messages)
    if stage + 1 < shape.pp:
        pipe_out = GroupPipe(join(f"pipe{stage}.{tp_rank}", 0, 2), messages)
    links = RankLinks(shape, rank, group, pipe_in, pipe_out)
    _first_contact(links, device)
    return links


def _first_contact(links: RankLinks, device: torch.device) -> None:
    """NCCL connects with the first operation: better now than within a request."""
    token = torch.ones(1, device=device)
    links.group.all_reduce(token)
    if links.pipe_in is not None:
        links.pipe_in.receive(token)
    if links.pipe_out is not None:
        links.pipe_out.send(token)
    if float(token) != links.group.size:
        raise RankLost(f"rank {links.rank}: a sum over {links.group.size} ranks gave {float(token):g}")


def _gloo(store: Any, rank: int, size: int, timeout_s: float, host: str) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """Its watchdog ends this process when an operation takes longer than `timeout_s`: on a GPU nothing else
    can end a wait for a rank that has died, and the instance starts again as a whole. (It dumps nothing, and
    torch takes a minute more for that.)
    """
    nccl_environment.settle()
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, rank, size, options)


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RankLost:  # from the store
        raise
    except RuntimeError as error:
        raise RankLost(f"process group: {str(error).splitlines()[0][:256]}") from None
