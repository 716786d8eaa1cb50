"""All layers of a LLaMA on one token of each sequence, in one call of C (csrc/decoder.c).

A layer is some twenty calls from Python, each a microsecond or two of work for a single row: up to an eighth
of a decode step. Here the interpreter is left once per step. The functions are those of `ops`, `linear`
and `cpu`, in the same order on the same numbers, so the results are theirs bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from distserve_kernels import compiled
from distserve_kernels.cpu import SUFFIX
from distserve_kernels.linear import PackedLinear

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_PRODUCTS = 4


@dataclass(frozen=True)
class LayerWeights:
    """One pre-norm layer: norms [hidden] (of heads: [head_dim], or None), and its four products."""

    attention_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: PackedLinear
    out: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    sliding_window: int | None

    @property
    def products(self) -> tuple[PackedLinear, PackedLinear, PackedLinear, PackedLinear]:
        return self.qkv, self.out, self.gate_up, self.down


@dataclass(frozen=True)
class DecoderShape:
    """What all layers of a rank have in common."""

    q_heads: int
    kv_heads: int
    head_dim: int
    eps: float


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """A step of one token per sequence, over pages in the transposed layout of `cpu.CpuBackend`."""

    slots: Tensor  # int64 [T]; negative: not stored
    block_tables: Tensor  # int32 [T, width]
    context_lens: Tensor  # int32 [T], the new token included
    page_addresses: Tensor  # int64 [layers, 2]: where K and V of each layer begin
    block_size: int


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")),
        ("weights", _POINTER * _PRODUCTS),
        ("biases", _POINTER * _PRODUCTS),
        ("window", _LONG),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, _LONG) for name in ("hidden", "ffn", "q_heads", "kv_heads", "dim", "half")),
        ("eps", _FLOAT),
        ("scale", _FLOAT),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        ("rows", _LONG),
        *((name, _POINTER) for name in ("cosine", "sine", "slots", "tables")),
        ("table_stride", _LONG),
        ("lengths", _POINTER),
        ("pages", _POINTER),
        ("block_size", _LONG),
        ("threads", _LONG),
    )


class Decoder:
    """Not thread-safe: its scratch memory is kept from step to step."""

    def __init__(self, run: Callable[..., int], layers: Sequence[LayerWeights], shape: DecoderShape) -> None:
        """`run`: the function of C, see `decoder`."""
        self._run, self._kept, self._count = run, tuple(layers), len(layers)
        first = layers[0]
        self._dtype, self._hidden = first.attention_norm.dtype, first.qkv.in_features
        ffn, heads = first.down.in_features, shape.q_heads + 2 * shape.kv_heads
        self._per_row = 2 * self._hidden + (heads + shape.q_heads) * shape.head_dim + 3 * ffn
        self._layers = (_Layer * len(layers))(*(_layer(weights) for weights in layers))
        scale = shape.head_dim**-0.5
        self._shape = _Shape(
            self._hidden, ffn, shape.q_heads, shape.kv_heads, shape.head_dim, 0, shape.eps, scale
        )
        self._rows = _Rows()
        self._scratch = torch.empty(0, dtype=self._dtype)

    def __call__(self, residual: Tensor, cos: Tensor, sin: Tensor, step: DecodeRows) -> Tensor:
        """The residual stream [T, hidden] after all layers, **in place**; returns it.

        cos, sin: fp32 [T, half], see `ops.rotary`. K and V of the tokens are stored. Raises `MemoryError`.
        """
        count = residual.shape[0]
        if self._scratch.numel() < count * self._per_row:
            self._scratch = torch.empty(count * self._per_row, dtype=self._dtype)
        self._shape.half = cos.shape[1]
        rows = self._rows
        rows.rows, rows.cosine, rows.sine = count, cos.data_ptr(), sin.data_ptr()
        rows.slots, rows.tables = step.slots.data_ptr(), step.block_tables.data_ptr()
        rows.table_stride, rows.lengths = step.block_tables.stride(0), step.context_lens.data_ptr()
        rows.pages, rows.block_size = step.page_addresses.data_ptr(), step.block_size
        rows.threads = torch.get_num_threads()
        failed = self._run(
            self._layers,
            self._count,
            ctypes.byref(self._shape),
            ctypes.byref(rows),
            residual.data_ptr(),
            self._scratch.data_ptr(),
        )
        if failed:
            raise MemoryError(f"no memory for the scratch rows of a step of {count} rows")
        return residual


def decoder(layers: Sequence[LayerWeights], shape: DecoderShape) -> Decoder | None:
    """The layers as one call; None where C lacks the kernels for them (see `PackedLinear.name`)."""
    dtype = layers[0].attention_norm.dtype
    library, suffix = compiled.library(), SUFFIX.get(dtype)
    by_c = all(product.name == "c" for weights in layers for product in weights.products)
    if library is None or suffix is None or not by_c:
        return None
    run = library[f"decoder_layers_{suffix}"]
    run.argtypes, run.restype = (_POINTER, _INT, *[_POINTER] * 4), _INT
    return Decoder(run, layers, shape)


def _layer(weights: LayerWeights) -> _Layer:
    norms = (weights.attention_norm, weights.mlp_norm, weights.q_norm, weights.k_norm)
    addresses = [product.addresses for product in weights.products]
    return _Layer(
        *(None if norm is None else norm.data_ptr() for norm in norms),
        (_POINTER * _PRODUCTS)(*(weight for weight, _ in addresses)),
        (_POINTER * _PRODUCTS)(*(bias for _, bias in addresses)),
        weights.sliding_window or 0,
    )
