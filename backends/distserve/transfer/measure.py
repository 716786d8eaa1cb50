"""How fast KV moves between two processes of this host, beside a plain TCP stream between the same two."""

from __future__ import annotations

import multiprocessing
import random
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgpack
import torch
from torch import Tensor

from distserve.core.model_config import ModelConfig
from distserve.core.shapes import Shape
from distserve.transfer.handle import Handle, Layout, new_nonce
from distserve.transfer.leases import LeaseTable
from distserve.transfer.puller import KVPuller
from distserve.transfer.source import STAGING_BYTES, KVSource

LIMIT_S = 60.0  # of one measurement
STREAM_PIECE = 1 << 20  # bytes per call of the plain stream


@dataclass(frozen=True, slots=True)
class KVShape:
    """Whose KV is moved; the default is a LLaMA of 125M parameters in fp32 (24 KiB per token)."""

    layers: int = 12
    kv_heads: int = 4
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, model: ModelConfig) -> KVShape:
        """A model's, in fp32."""
        return cls(model.num_layers, model.num_kv_heads, model.head_dim)

    @property
    def block_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.block_size * self.dtype.itemsize

    def layout(self) -> Layout:
        return Layout(
            model_hash="measure",
            dtype=str(self.dtype),
            block_size=self.block_size,
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            tp=1,
            pp=1,
            page_format="nhd",
        )


@dataclass(frozen=True, slots=True)
class TransferRate:
    """Medians over the repetitions. `bytes`: the KV of `tokens` tokens; rates in bytes per second."""

    channel: str  # "gloo" or "memory"
    tokens: int
    bytes: int
    pull_s: float  # from `pull` until the future has ended, on a pair that exists
    pull_bytes_s: float
    stream_bytes_s: float

    @property
    def share(self) -> float:
        """Of the plain stream's rate."""
        return self.pull_bytes_s / self.stream_bytes_s


class TensorPages:
    """Pages with random content; blocks x heads x (head_dim x block_size)."""

    kv_head_axis = 1

    def __init__(self, shape: KVShape, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_layers = shape.layers
        size = (num_blocks, shape.kv_heads, shape.head_dim, shape.block_size)
        self._pages = [
            (torch.rand(size).to(shape.dtype), torch.rand(size).to(shape.dtype)) for _ in range(shape.layers)
        ]

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._pages[layer]


def measure(
    token_counts: Sequence[int],
    shape: KVShape | None = None,
    repeats: int = 7,
    shared_memory: bool = False,
    staging_bytes: int = STAGING_BYTES,
    progress: Callable[[TransferRate], None] | None = None,
) -> list[TransferRate]:
    """Pulls the KV of prompts of so many tokens from a second process of this host.

    Over Gloo on loopback, the way to another host, or with `shared_memory`, the way between two instances of
    one host. The blocks lie scattered at both ends. Each pull takes turns with a plain stream of the same
    size, so both see the same load of the machine; the first of each is not counted. `progress` is called for
    each size.
    """
    shape = shape or KVShape()
    num_blocks = -(-max(token_counts) // shape.block_size)
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("forkserver")
    peer = context.Process(target=serve_pulls, args=(theirs, shape, num_blocks, staging_bytes), daemon=True)
    peer.start()
    theirs.close()
    pulls = Pulls(ours, shape, num_blocks, shared_memory, staging_bytes)
    try:
        rates = []
        for tokens in token_counts:
            size = -(-tokens // shape.block_size) * shape.block_bytes
            pull_s, stream_s = _measure_one(pulls, tokens, size, repeats)
            rates.append(TransferRate(pulls.channel, tokens, size, pull_s, size / pull_s, size / stream_s))
            if progress is not None:
                progress(rates[-1])
        return rates
    finally:
        pulls.close()  # ends the peer
        peer.join(10)
        if peer.is_alive():
            peer.kill()
            peer.join()


def _measure_one(pulls: Pulls, tokens: int, size: int, repeats: int) -> tuple[float, float]:
    """Seconds of a pull and of a plain stream."""
    times = [(pulls.pull_s(tokens), pulls.stream_s(size)) for _ in range(repeats + 1)]
    pulled, streamed = zip(*times[1:], strict=True)
    return statistics.median(pulled), statistics.median(streamed)


class Pulls:
    """The side that pulls; `serve_pulls` is at the other end of `peer`, in another process."""

    def __init__(
        self,
        peer: Connection,
        shape: KVShape,
        num_blocks: int,
        shared_memory: bool = False,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self.channel = "memory" if shared_memory else "gloo"
        self._peer = peer
        self._num_blocks = num_blocks
        self._puller = KVPuller(
            TensorPages(shape, num_blocks),
            Shape(),
            0,
            shape.layout(),
            "measure-decode",
            1,
            staging_bytes=staging_bytes,
            shared_memory=shared_memory,
        )

    def pull_s(self, tokens: int) -> float:
        """Seconds that pulling the KV of so many tokens takes."""
        _tell(self._peer, {"op": "lease", "tokens": tokens})
        handle = Handle.from_wire(_hear(self._peer)["handle"])
        blocks = random.sample(range(self._num_blocks), handle.num_blocks)
        start = time.monotonic()
        self._puller.pull(handle, blocks, start + LIMIT_S).result(LIMIT_S + 1)
        return time.monotonic() - start

    def stream_s(self, size: int) -> float:
        """Seconds that a plain TCP stream of so many bytes takes."""
        _tell(self._peer, {"op": "stream", "bytes": size})
        return _receive_stream(_hear(self._peer)["port"], size)

    def close(self) -> None:
        """Ends the other side, too."""
        self._puller.close()
        self._peer.close()


def _receive_stream(port: int, size: int) -> float:
    buffer = memoryview(bytearray(STREAM_PIECE))
    with socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as sock:
        sock.sendall(b"go")
        start = time.monotonic()
        while size > 0:
            count = sock.recv_into(buffer)
            if count == 0:
                raise ConnectionError("the plain stream ended early")
            size -= count
        return time.monotonic() - start


def serve_pulls(
    peer: Connection, shape: KVShape, num_blocks: int, staging_bytes: int = STAGING_BYTES
) -> None:
    """A source, and the sending end of the plain streams, until the other end of `peer` closes."""
    torch.set_num_threads(1)
    leases = LeaseTable(time.monotonic)
    source = KVSource(
        TensorPages(shape, num_blocks),
        leases,
        Shape(),
        0,
        shape.layout(),
        "measure-prefill",
        1,
        staging_bytes=staging_bytes,
        timeout_s=LIMIT_S,
    )
    content = bytes(STREAM_PIECE)
    number = 0
    try:
        while True:
            message = _hear(peer)
            if message["op"] == "stream":
                _send_stream(peer, content, message["bytes"])
                continue
            number += 1
            handle = Handle(
                "measure-prefill",
                1,
                f"r{number}",
                new_nonce(),
                message["tokens"],
                0,
                shape.layout(),
                (source.address,),
            )
            leases.add(handle, random.sample(range(num_blocks), handle.num_blocks), LIMIT_S)
            _tell(peer, {"handle": handle.to_wire()})
            leases.released()
    except EOFError:
        source.close()


def _send_stream(peer: Connection, content: bytes, size: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(LIMIT_S)
        _tell(peer, {"port": listener.getsockname()[1]})
        sock = listener.accept()[0]
    with sock:
        sock.settimeout(LIMIT_S)
        sock.recv(2)
        while size > 0:
            size -= sock.send(content[: min(size, len(content))] if size < len(content) else content)


def _tell(peer: Connection, message: dict[str, object]) -> None:
    peer.send_bytes(msgpack.packb(message))


def _hear(peer: Connection) -> dict[str, Any]:
    if not peer.poll(LIMIT_S):
        raise TimeoutError("the other process does not answer")
    return dict(msgpack.unpackb(peer.recv_bytes()))
