"""KV transfer between two processes beside a plain TCP stream and a copy in memory, in one run."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from distserve.core.model_config import ModelConfig
from distserve_tools.testbed.report_table import table

TOKENS = (128, 512, 1024)
COPY_BYTES = 64 << 20
COPIES = 7


@dataclass(frozen=True)
class TransferRates:
    """One size over one channel; bytes per second."""

    channel: str
    tokens: int
    bytes: int
    pull_bytes_s: float
    stream_bytes_s: float
    copy_bytes_s: float


def transfer_rates(model: ModelConfig) -> list[TransferRates]:
    """Over Gloo on loopback (the way to another host), and through shared memory (two instances of one)."""
    from distserve.transfer.measure import KVShape, measure

    copy = memory_copy_bytes_s()
    shape = KVShape.of(model)
    return [
        TransferRates(r.channel, r.tokens, r.bytes, r.pull_bytes_s, r.stream_bytes_s, copy)
        for shared in (False, True)
        for r in measure(TOKENS, shape, repeats=5, shared_memory=shared)
    ]


def memory_copy_bytes_s() -> float:
    """Median rate of copying an array larger than the caches, counted once."""
    source = np.ones(COPY_BYTES, np.uint8)
    target = np.zeros_like(source)
    times = []
    for _ in range(COPIES):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return COPY_BYTES / statistics.median(times)


def rates_table(rates: list[TransferRates]) -> str:
    """In Markdown."""
    rows = [
        [
            r.channel,
            str(r.tokens),
            f"{r.bytes / 1e6:.1f} MB",
            f"{1e3 * r.bytes / r.pull_bytes_s:.1f} ms",
            f"{r.pull_bytes_s / 1e9:.2f} GB/s",
            f"{r.stream_bytes_s / 1e9:.2f} GB/s",
            f"{r.pull_bytes_s / r.stream_bytes_s:.0%}",
            f"{r.copy_bytes_s / 1e9:.1f} GB/s",
        ]
        for r in rates
    ]
    head = ["channel", "tokens", "KV", "time", "rate", "plain TCP stream", "of the stream", "memcpy"]
    return table(head, rows)
