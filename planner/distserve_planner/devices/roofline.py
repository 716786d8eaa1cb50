"""Analytic latency model of any model on a device known by its data sheet and kernel efficiencies.

The operators of a layer are timed one by one and summed: what appendix A of the paper folds into C1..C5,
with grouped-query attention, gated MLP, head, all-reduce and kernel latencies kept apart.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from distserve.core.config import DTYPE_BYTES
from distserve.core.model_config import ModelConfig
from distserve.core.parsing import ConfigError
from distserve.core.shapes import head_range
from distserve_planner.coefficients import DecodePiece, Degree, HeadCost, PrefillPiece
from distserve_planner.devices.spec import DeviceSpec
from distserve_planner.instance_latency import Overhead
from distserve_planner.latency import LatencyModel, allreduce_s

DEGREES = (1, 2, 3, 4, 5, 6, 8, 16)
_KNOTS = (1, 64, 192, 512, 8192)  # rows of a GEMM; between them its time is as good as affine
_ELEMENTWISE_KERNELS = 5  # two norms with residual, rotary or bias, activation, cache store


def roofline_model(model_name: str, model: ModelConfig, device: DeviceSpec, dtype: str) -> LatencyModel:
    """Latency model with every possible degree of `DEGREES` computed (and marked predicted).

    Raises `ConfigError` for a dtype without a peak rate in the specification (only 16-bit ones have).
    """
    if DTYPE_BYTES.get(dtype) != 2:
        raise ConfigError(f"dtype={dtype!r}: {device.name} is specified for fp16 and bf16 only")
    degrees = tuple(roofline_degree(model, device, dtype, tp) for tp in DEGREES if _divides(model, tp))
    overhead = Overhead(iteration_s=device.iteration_overhead_s)
    return LatencyModel(model_name, model, device.name, dtype, degrees, overhead, None, device.source)


def roofline_degree(model: ModelConfig, device: DeviceSpec, dtype: str, tp: int) -> Degree:
    """Coefficients of one degree."""
    width = DTYPE_BYTES[dtype]
    eff, bandwidth = device.efficiency, device.memory_bandwidth_bytes_s
    kv_heads = len(head_range(model.num_kv_heads, tp, 0))
    q_size, kv_size = model.q_size / tp, kv_heads * model.head_dim
    layers = model.num_layers

    def rows(count: float) -> float:
        return layers * _layer_rows_s(model, device, width, tp, count)

    prefill_memory = bandwidth * eff.prefill_attention_memory
    attention = layers * eff.prefill_attention_latency_s
    attention_token = layers * width * (2 * q_size + 2 * kv_size) / prefill_memory
    attention_sq = layers * 2 * q_size / (device.peak_flops * eff.prefill_attention_compute)
    prefill = tuple(
        PrefillPiece(base + attention, slope + attention_token, attention_sq, 0.0, limit)
        for base, slope, limit in _affine_pieces(rows)
    )
    context = layers * 2 * kv_size * width / (bandwidth * eff.decode_attention_memory)
    decode = tuple(
        DecodePiece(
            base + layers * eff.decode_attention_latency_s,
            context,
            slope + layers * eff.decode_attention_per_request_s,
            limit,
        )
        for base, slope, limit in _affine_pieces(rows)
    )
    note = f"analytic, {device.name}"
    return Degree(tp, prefill, decode, _head(model, device, width, tp), predicted=True, note=note)


def _divides(model: ModelConfig, tp: int) -> bool:
    return model.num_heads % tp == 0 and (tp <= model.num_kv_heads or tp % model.num_kv_heads == 0)


def _affine_pieces(seconds: Callable[[float], float]) -> list[tuple[float, float, int | None]]:
    """(base, slope, upper bound) of the chords between `_KNOTS`; the last one is open."""
    pieces: list[tuple[float, float, int | None]] = []
    for low, high in pairwise(_KNOTS):
        slope = (seconds(high) - seconds(low)) / (high - low)
        bound = None if high == _KNOTS[-1] else high
        pieces.append((seconds(low) - slope * low, slope, bound))
    return pieces


def _layer_rows_s(model: ModelConfig, device: DeviceSpec, width: int, tp: int, rows: float) -> float:
    """Everything of one layer that does not depend on context, for `rows` tokens."""
    eff = device.efficiency
    hidden, ffn = model.hidden_size, model.ffn_size / tp
    q_size, kv_size = model.q_size / tp, model.kv_size / min(tp, model.num_kv_heads)
    gate = 2 if model.gated_mlp else 1
    gemms = ((q_size + 2 * kv_size, hidden), (hidden, q_size), (gate * ffn, hidden), (hidden, ffn))
    total = sum(_gemm_s(device, width, rows, columns, inner) for columns, inner in gemms)
    moved = width * rows * (8 * hidden + (gate + 1) * ffn)
    total += _ELEMENTWISE_KERNELS * eff.elementwise_latency_s
    total += moved / (device.memory_bandwidth_bytes_s * eff.gemm_memory)
    if tp > 1:
        total += 2 * _allreduce(device, width * rows * hidden, tp)
    return total


def _gemm_s(device: DeviceSpec, width: int, rows: float, columns: float, inner: float) -> float:
    eff = device.efficiency
    compute = 2 * rows * columns * inner / (device.peak_flops * eff.gemm_compute)
    moved = width * (rows * inner + inner * columns + rows * columns)
    return eff.gemm_latency_s + max(compute, moved / (device.memory_bandwidth_bytes_s * eff.gemm_memory))


def _allreduce(device: DeviceSpec, size_bytes: float, tp: int) -> float:
    eff = device.efficiency
    link = type(device.intra)(device.intra.bandwidth_bytes_s * eff.allreduce, eff.allreduce_latency_s)
    return allreduce_s(size_bytes, tp, link)


def _head(model: ModelConfig, device: DeviceSpec, width: int, tp: int) -> HeadCost:
    """LM head for one row, and what each further row adds (reading and writing its logits)."""
    one, many = (
        _gemm_s(device, width, rows, model.vocab_size / tp, model.hidden_size) for rows in (1.0, 65.0)
    )
    slope = (many - one) / 64
    return HeadCost(one - slope, slope + 2 * width * model.vocab_size / device.memory_bandwidth_bytes_s)
