"""A device by its data sheet, and how much of it real kernels reach (`schema: device/1`)."""

from __future__ import annotations

from dataclasses import dataclass

from distserve.core.parsing import ConfigError
from distserve_planner.cluster import Link

DEVICE_SCHEMA = "device/1"


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the peak rates, and constant times per kernel, fitted to measured operators.

    gemm: latency + max(flops / (peak x compute), bytes / (bandwidth x memory))
    prefill attention: latency + causal flops / (peak x compute) + q, k, v, o bytes / (bandwidth x memory)
    decode attention: latency + per_request x batch + KV bytes / (bandwidth x memory)
    all-reduce: latency + 2 (tp - 1) / tp x bytes / (link x share)
    element-wise kernels (norms, rotary, activation, cache store): latency each, bytes at the gemm's share
    """

    gemm_compute: float
    gemm_memory: float
    gemm_latency_s: float
    prefill_attention_compute: float
    prefill_attention_memory: float
    prefill_attention_latency_s: float
    decode_attention_memory: float
    decode_attention_latency_s: float
    decode_attention_per_request_s: float
    allreduce: float
    allreduce_latency_s: float
    elementwise_latency_s: float

    def __post_init__(self) -> None:
        for name in ("gemm_compute", "gemm_memory", "prefill_attention_compute", "prefill_attention_memory",
                     "decode_attention_memory", "allreduce"):  # fmt: skip
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ConfigError(f"{name}={value}: must be in (0, 1]")


@dataclass(frozen=True)
class DeviceSpec:
    """Peak rates of one device (dense 16-bit), its links, and the efficiencies of its kernels.

    `intra` is the link to another device of the node (per device, one direction); `inter` is one device's
    share of the network in a usual node, for want of a cluster file that says better.
    """

    name: str
    memory_bytes: int
    peak_flops: float
    memory_bandwidth_bytes_s: float
    intra: Link
    inter: Link
    efficiency: Efficiency
    iteration_overhead_s: float
    source: str
    residuals: dict[str, tuple[float, ...]]  # operator -> relative error p50, p95 of the fit
