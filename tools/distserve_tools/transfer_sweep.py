"""Times KV transfers between two processes of this host, over the channel that instances use."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from distserve.core.config import EngineConfig
from distserve.core.model_config import ModelConfig
from distserve.core.parsing import ConfigError
from distserve.core.shapes import Shape
from distserve.transfer.handle import Handle, Layout
from distserve_planner.cluster import Link
from distserve_planner.fit import residual
from distserve_planner.least_squares import relative_nnls
from distserve_planner.profile_file import Residual

TRANSFER_TOKENS = (16, 64, 256, 1024, 2048)
_START_S = 60.0  # for the peer to import torch and allocate its pages
_PULL_S = 20.0
_STOP_S = 5.0


@dataclass(frozen=True)
class TransferPeers:
    """The two sides: `config.devices[0]` pulls into its pages, `source_device` holds the KV."""

    config: EngineConfig
    model: ModelConfig
    source_device: str
    tokens: tuple[int, ...] = TRANSFER_TOKENS
    repeats: int = 5
    shared_memory: bool = True  # where both are on this host, as instances have it
    backend: str = "auto"  # of the channel to another host: "gloo", "nccl"; "auto" by device

    def __post_init__(self) -> None:
        if self.backend == "auto":
            by_device = "nccl" if self.source_device.startswith("cuda") else "gloo"
            object.__setattr__(self, "backend", by_device)

    @property
    def num_blocks(self) -> int:
        return -(-max(self.tokens) // self.config.block_size)


def other_device(device: str) -> str:
    """A second device of the same kind for the source: the cores that are left, or the next GPU.

    On a host with no other one both sides share it, as two instances would.
    """
    from distserve.worker.device import parse_device

    parsed = parse_device(device)
    if parsed.kind != "cpu":
        import torch

        others = [i for i in range(torch.cuda.device_count()) if i != parsed.index]
        return f"{parsed.kind}:{others[0]}" if others else device
    left = [core for core in range(os.cpu_count() or 1) if core not in parsed.cores]
    return f"cpu:{left[0]}" if left else device


def measure_transfer(peers: TransferPeers, done: Callable[[], None]) -> tuple[Link, Residual]:
    """Fits latency + bytes / bandwidth to the median times of pulls of `peers.tokens` tokens.

    `done` is called once per size. Raises `ConfigError` if the other side does not start or a pull
    fails.
    """
    return fit_link(transfer_times(peers, done))


def transfer_times(peers: TransferPeers, done: Callable[[], None]) -> list[tuple[int, float]]:
    """(bytes, median seconds) of pulls of each size; see `measure_transfer`."""
    from distserve.transfer.errors import TransferError
    from distserve.transfer.puller import KVPuller

    cache, page_format = _pages(peers, peers.config.devices[0])
    layout = _layout(peers, page_format)
    with _source(peers) as handles:
        options: dict[str, Any] = {"backend": peers.backend, "shared_memory": peers.shared_memory}
        puller = KVPuller(cache, Shape(), 0, layout, "profile-decode", 1, **options)
        try:
            return [_timed(puller, group, done) for group in handles]
        except TransferError as error:
            raise ConfigError(f"the KV transfer failed: {error}; --no-transfer leaves it out") from None
        finally:
            puller.close()


def fit_link(points: Sequence[tuple[int, float]]) -> tuple[Link, Residual]:
    """Latency and bandwidth from (bytes, seconds), by least squares on relative error."""
    size, seconds = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    features = np.stack([np.ones_like(size), size], axis=1)
    solution = relative_nnls(features, seconds)
    latency, per_byte = (float(v) for v in solution)
    if per_byte <= 0:
        raise ConfigError("transfer: larger transfers took no longer; measure on an idle machine")
    return Link(1 / per_byte, latency), residual(1, "transfer", features @ solution, seconds)


def _timed(puller: Any, handles: Sequence[Handle], done: Callable[[], None]) -> tuple[int, float]:
    """(bytes, median seconds) of pulling handles of one size; the first is not counted."""
    times, size = [], 0
    for handle in handles:
        start = time.perf_counter()
        deadline = time.monotonic() + _PULL_S
        future = puller.pull(handle, range(handle.num_blocks), deadline)
        size = future.result(timeout=_PULL_S + 1).bytes
        times.append(time.perf_counter() - start)
    done()
    return size, statistics.median(times[1:])


@contextmanager
def _source(peers: TransferPeers) -> Iterator[list[list[Handle]]]:
    """The other process, for as long as the block runs; gives its handles by size."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(peers, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_S):
            raise ConfigError(f"transfer: no answer from {peers.source_device} within {_START_S:g} s")
        try:
            wires = ours.recv()
        except EOFError:
            raise ConfigError(f"transfer: the source process on {peers.source_device} died") from None
        yield [[Handle.from_wire(wire) for wire in group] for group in wires]
    finally:
        ours.close()  # ends the other side's wait
        process.join(_STOP_S)
        if process.is_alive():
            process.kill()
            process.join(_STOP_S)


def _serve(peers: TransferPeers, connection: Connection) -> None:
    """The source process: offers every size `repeats` + 1 times until the connection closes."""
    from distserve.transfer.leases import LeaseTable
    from distserve.transfer.source import KVSource
    from distserve.worker.device import bind_device, parse_device

    bind_device(parse_device(peers.source_device))
    cache, page_format = _pages(peers, peers.source_device)
    layout, leases = _layout(peers, page_format), LeaseTable(time.monotonic)
    options: dict[str, Any] = {"backend": peers.backend, "shared_memory": peers.shared_memory}
    source = KVSource(cache, leases, Shape(), 0, layout, "profile-prefill", 1, **options)
    life_s = (peers.repeats + 1) * len(peers.tokens) * _PULL_S
    try:
        groups = [
            [
                _offer(leases, layout, source.address, tokens, index, life_s)
                for index in range(peers.repeats + 1)
            ]
            for tokens in peers.tokens
        ]
        connection.send([[handle.to_wire() for handle in group] for group in groups])
        connection.poll(life_s)  # until the other end closes
    finally:
        source.close()


def _offer(leases: Any, layout: Layout, address: str, tokens: int, index: int, life_s: float) -> Handle:
    from distserve.transfer.handle import new_nonce

    name = f"profile-{tokens}-{index}"
    handle = Handle("profile-prefill", 1, name, new_nonce(), tokens, 0, layout, (address,))
    leases.add(handle, range(handle.num_blocks), life_s)
    return handle


def _pages(peers: TransferPeers, device: str) -> tuple[Any, str]:
    """KV pages of the whole model on `device`, and the name of their format."""
    from distserve.worker.device import parse_device
    from distserve.worker.kv_cache import CacheShape, KVCache
    from distserve.worker.runner import TORCH_DTYPE
    from distserve_kernels.backend import choose_backend

    model, config = peers.model, peers.config
    target, dtype = parse_device(device).torch_device, TORCH_DTYPE[config.dtype]
    backend = choose_backend(target, dtype, model.head_dim, config.block_size, config.attention_backend)
    shape = CacheShape(model.num_layers, model.num_kv_heads, model.head_dim, config.block_size, dtype)
    return KVCache(backend, shape, peers.num_blocks, target), backend.name


def _layout(peers: TransferPeers, page_format: str) -> Layout:
    model, config = peers.model, peers.config
    return Layout(
        "profile", config.dtype, config.block_size, model.num_layers, model.num_kv_heads, model.head_dim,
        1, 1, page_format,
    )  # fmt: skip
