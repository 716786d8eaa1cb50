"""Sources of KV in a process of their own, for tests that kill, stop and slow them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, ClassVar

import torch
from torch import Tensor

from distserve.core.shapes import Shape, head_range, layer_range
from distserve.transfer import packing
from distserve.transfer.handle import Handle, Layout, new_nonce
from distserve.transfer.leases import LeaseTable
from distserve.transfer.puller import KVPuller
from distserve.transfer.source import KVSource
from distserve_kernels.page_rows import PageRows

ANSWER_S = 20.0
LAYOUT = Layout("tiny", "fp32", 4, 5, 4, 8, 1, 1, "nhd")
BLOCKS = 24
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRELOAD = ["distserve.transfer.source", "distserve.transfer.puller"]  # imported once, the children are forks


def layout_of(shape: Shape, base: Layout = LAYOUT) -> Layout:
    return replace(base, tp=shape.tp, pp=shape.pp)


def soon(condition: Callable[[], object], timeout_s: float = 5.0) -> bool:
    """Whether `condition` comes true in time."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


class RankPages:
    """One rank's part of a model's random pages; equal seeds, equal content. `delay_s` slows each access."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        seed: int | None,
        blocks: int = BLOCKS,
        head_axis: int = 1,
        device: str = "cpu",
    ) -> None:
        pp_rank, tp_rank = layout.shape.coordinates(rank)
        heads = head_range(layout.kv_heads, layout.tp, tp_rank)
        self.num_blocks = blocks
        self.kv_head_axis = head_axis
        self.delay_s = 0.0
        self.touched = threading.Event()
        self._pages = []
        for layer in layer_range(layout.layers, layout.pp, pp_rank):
            parts = []
            for number in (0, 1):
                size = [blocks, layout.block_size, layout.head_dim]
                size.insert(head_axis, layout.kv_heads)
                if seed is None:
                    whole = torch.zeros(size)
                else:
                    generator = torch.Generator().manual_seed(seed * 1000 + layer * 2 + number)
                    whole = torch.randn(size, generator=generator)
                part = whole.narrow(head_axis, heads.start, len(heads)).contiguous()
                parts.append(part.to(device, DTYPES[layout.dtype]))
            self._pages.append((parts[0], parts[1]))
        WatchedRows.caches[self._pages[0][0].data_ptr()] = self

    @property
    def num_layers(self) -> int:
        return len(self._pages)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        self.accessed()
        return self._pages[layer]

    def accessed(self) -> None:
        self.touched.set()
        if self.delay_s:
            time.sleep(self.delay_s)


class WatchedRows(PageRows):
    """The compiled copy, which takes the pages once and for all: their owner sees each tensor's copy, too."""

    caches: ClassVar[weakref.WeakValueDictionary[int, RankPages]] = weakref.WeakValueDictionary()

    def pack(self, members: range, blocks: Tensor, heads: range, buffer: Tensor) -> int:
        self._tell(members)
        return super().pack(members, blocks, heads, buffer)

    def unpack(self, members: range, blocks: Tensor, heads: range, buffer: Tensor) -> int:
        self._tell(members)
        return super().unpack(members, blocks, heads, buffer)

    def _tell(self, members: range) -> None:
        cache = self.caches.get(self._tensors[0].data_ptr())
        for _ in members:
            if cache is not None:
                cache.accessed()


packing.PageRows = WatchedRows  # type: ignore[misc]


class Instance:
    """A prefill instance without its engine: all ranks' sources, and their leases as one."""

    def __init__(
        self, shape: Shape, epoch: int = 1, delay_s: float = 0.0, layout: Layout = LAYOUT, **options: Any
    ):
        self.layout = layout_of(shape, layout)
        self.epoch = epoch
        self.name = options.pop("name", "p0")
        device, head_axis = options.pop("device", "cpu"), options.pop("head_axis", 1)
        ranks = range(shape.ranks)
        self.caches = [
            RankPages(self.layout, rank, seed=1, device=device, head_axis=head_axis) for rank in ranks
        ]
        self.leases = [LeaseTable(time.monotonic) for _ in ranks]
        self.sources = [
            KVSource(self.caches[r], self.leases[r], shape, r, self.layout, self.name, epoch, **options)
            for r in ranks
        ]
        for cache in self.caches:
            cache.delay_s = delay_s
            cache.touched.clear()
        self._count = 0

    def lease(self, blocks: Sequence[int], ttl: float = 30.0, tokens: int | None = None) -> Handle:
        self._count += 1
        handle = Handle(
            self.name,
            self.epoch,
            f"{self.name}.{self.epoch}.{self._count}",
            new_nonce(),
            tokens or len(blocks) * self.layout.block_size,
            5,
            self.layout,
            tuple(source.address for source in self.sources),
        )
        for leases in self.leases:
            leases.add(handle, blocks, ttl)
        return handle

    def returned(self, timeout_s: float = 5.0) -> list[list[tuple[str, list[int]]]]:
        """What each rank has released, once each has released something."""
        out: list[list[tuple[str, list[int]]]] = [[] for _ in self.leases]

        def all_have() -> bool:
            for rank, leases in enumerate(self.leases):
                out[rank] += leases.released()
            return all(out)

        soon(all_have, timeout_s)
        return out

    def slow_down(self, delay_s: float) -> None:
        for cache in self.caches:
            cache.delay_s = delay_s
        for source in self.sources:
            packer = source._config.packer
            if packer.device.type == "cuda":  # its pages are looked up once
                packer.pack = _after(delay_s, packer.pack)  # type: ignore[method-assign]

    def close(self) -> None:
        for source in self.sources:
            source.close()


def _after(delay_s: float, call: Callable[..., Any]) -> Callable[..., Any]:
    def later(*args: Any) -> Any:
        time.sleep(delay_s)
        return call(*args)

    return later


class InstanceProcess:
    """An `Instance` in another process. `call(name, *args)` calls its method there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._process = context.Process(target=_serve, args=(theirs, args, kwargs), daemon=True)
        self._process.start()
        theirs.close()
        self.call("ready")

    def call(self, name: str, *args: Any) -> Any:
        self._pipe.send((name, args))
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError(f"{name}: no answer")
        return self._pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.join(ANSWER_S)


def _serve(pipe: Connection, args: Any, kwargs: Any) -> None:
    torch.set_num_threads(1)
    instance = Instance(*args, **kwargs)
    while True:
        try:
            name, values = pipe.recv()
        except EOFError:
            return
        if name == "ready":
            pipe.send(None)
        elif name == "stats":
            pipe.send([source.stats() for source in instance.sources])
        else:
            pipe.send(getattr(instance, name)(*values))


class Decode:
    """A decode instance without its engine: all ranks' pullers and pages."""

    def __init__(self, shape: Shape, name: str = "d0", layout: Layout = LAYOUT, **options: Any) -> None:
        self.layout = layout_of(shape, layout)
        ranks = range(shape.ranks)
        device, self._head_axis = options.pop("device", "cpu"), options.pop("head_axis", 1)
        self.caches = [
            RankPages(self.layout, rank, seed=None, device=device, head_axis=self._head_axis)
            for rank in ranks
        ]
        self.pullers = [KVPuller(self.caches[r], shape, r, self.layout, name, 1, **options) for r in ranks]

        for cache in self.caches:
            cache.touched.clear()

    def pull(self, handle: Handle, blocks: Sequence[int], timeout_s: float = 10.0) -> list[Any]:
        """One future per rank."""
        deadline = time.monotonic() + timeout_s
        return [puller.pull(handle, blocks, deadline) for puller in self.pullers]

    def differing(self, src_blocks: Sequence[int], dst_blocks: Sequence[int]) -> int:
        """Pages whose blocks are not what a source has (seed 1), or in which another block was touched."""
        wrong = 0
        others = [block for block in range(BLOCKS) if block not in set(dst_blocks)]
        for rank, cache in enumerate(self.caches):
            wanted = RankPages(self.layout, rank, seed=1, head_axis=self._head_axis)
            for layer in range(len(cache._pages)):
                for got, want in zip(cache.pages(layer), wanted.pages(layer), strict=True):
                    wrong += not torch.equal(got[list(dst_blocks)].cpu(), want[list(src_blocks)])
                    wrong += bool(got[others].any())
        return wrong

    def close(self) -> None:
        for puller in self.pullers:
            puller.close()


class DecodeProcess:
    """A `Decode` in another process that pulls one handle and then waits to be ended."""

    def __init__(self, shape: Shape, **options: Any) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._process = context.Process(target=_pull, args=(theirs, shape, options), daemon=True)
        self._process.start()
        theirs.close()

    def start_pull(self, handle: Handle, blocks: Sequence[int]) -> None:
        self._pipe.send((handle, list(blocks)))

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.join(ANSWER_S)


def _pull(pipe: Connection, shape: Shape, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    decode = Decode(shape, **options)
    handle, blocks = pipe.recv()
    futures = decode.pull(handle, blocks)
    for future in futures:
        future.exception(ANSWER_S)
    pipe.poll(ANSWER_S)
