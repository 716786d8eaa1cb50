"""Linear layers with weights in the layout that the device's matrix product likes best.

Measured on one core of an AMD EPYC, K = 768, N = 4096, weights from memory, microseconds per call:

    Zen 4 (AVX-512)
    rows                      1      8      16      32      512
    fp32  F.linear (MKL)   1056   1756    2317    3454    36248
    fp32  oneDNN packed     807    831    1153    2171    28732
    fp32  C kernel          380    475     964    1845    29057
    bf16  F.linear          967    913    1143    1540    15883
    bf16  oneDNN packed     432    515     678    1163    15079
    bf16  C kernel          201    239     537     933    15250

    Zen 3 (AVX2)
    rows                      1      8      16      32      512
    fp32  F.linear (MKL)   1156   3123    3791    5009    41838
    fp32  oneDNN packed    1449   2063    2810    4047    41879
    fp32  C kernel         1359   1234    1453    2519    43631
    bf16  F.linear          911   5654       -   21729        -
    bf16  C kernel          636   1113       -    4405        -

The C kernel (csrc/gemm.c) streams the weights at the memory's full rate for few rows and multiplies at the
core's full rate for many. The packed copy replaces the plain weight, so memory does not double. torch's
packed operators are private; this file is the only place that knows them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from distserve_kernels import compiled, memory
from distserve_kernels.cpu import SUFFIX, bind

PACK_ROWS_HINT = 32  # oneDNN picks its blocking for this many rows; it serves every other count well

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


class PackedLinear:
    """y = x W^T + b for x [..., K]; W [N, K] is packed once at construction and need not be kept by the
    caller.

    `name` says which product was chosen: "c" (CPUs with AVX2 or AVX-512; bf16 with AVX-512 only if it has the
    bf16 dot product), "onednn" (other CPUs) or "torch" (`F.linear`, everything else).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = int(weight.shape[0]), int(weight.shape[1])
        self._product: _Product
        for self.name, form in (("c", _CProduct), ("onednn", _OneDnnProduct), ("torch", _TorchProduct)):
            product = form.pack(weight, bias)
            if product is not None:
                self._product = product
                break

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x)

    @property
    def addresses(self) -> tuple[int, int | None]:
        """Of the packed weight and of the bias, for C that multiplies by itself (`name` "c" only)."""
        assert isinstance(self._product, _CProduct)
        return self._product.addresses


class _Product(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...


class _TorchProduct:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> _TorchProduct | None:
        return cls(weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self._weight, self._bias)


class _OneDnnProduct:
    """oneDNN's own blocking of the weight."""

    def __init__(self, packed: Tensor, bias: Tensor | None) -> None:
        self._packed, self._bias = packed, bias

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> _OneDnnProduct | None:
        """None where this build, device or dtype has no such product."""
        if not weight.is_cpu or weight.dtype not in (torch.float32, torch.bfloat16):
            return None
        if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            return None
        try:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS_HINT)
            product = cls(packed, bias)
            product(torch.zeros(1, weight.shape[1], dtype=weight.dtype))
        except (RuntimeError, NotImplementedError):
            return None
        return product

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out


class _CProduct:
    """Panels of outputs in huge pages, for csrc/gemm.c."""

    def __init__(
        self, kernels: _Kernels, packed: Tensor, bias: Tensor | None, outputs: int, inputs: int
    ) -> None:
        self._packed, self._outputs, self._inputs = packed, outputs, inputs
        self._dtype = packed.dtype
        self._bias = None if bias is None else bias.contiguous()
        self.addresses = packed.data_ptr(), None if self._bias is None else self._bias.data_ptr()
        self._multiply = kernels.multiply

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None) -> _CProduct | None:
        """None where the C kernel is absent or not at home on this CPU."""
        kernels = _kernels(weight.dtype) if weight.is_cpu else None
        if kernels is None:
            return None
        outputs, inputs = weight.shape
        depth = 4 // weight.dtype.itemsize  # inputs that lie together
        shape = (-(-outputs // kernels.panel), -(-inputs // depth), kernels.panel, depth)
        weight, packed = weight.contiguous(), memory.zeros(shape, weight.dtype)
        kernels.pack(weight.data_ptr(), packed.data_ptr(), outputs, inputs)
        return cls(kernels, packed, bias, outputs, inputs)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dim() != 2 or x.stride(1) != 1:
            return self(x.reshape(-1, self._inputs).contiguous()).view(*x.shape[:-1], self._outputs)
        rows = x.shape[0]
        if x.dtype != self._dtype or x.shape[1] != self._inputs:
            raise ValueError(f"x {list(x.shape)} {x.dtype}: must be {self._dtype} [rows, {self._inputs}]")
        out = torch.empty((rows, self._outputs), dtype=self._dtype)
        failed = self._multiply(
            x.data_ptr(),
            x.stride(0),
            *self.addresses,
            out.data_ptr(),
            rows,
            self._outputs,
            self._inputs,
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError(f"no memory for the scratch rows of a product of {rows} rows")
        return out


@dataclass(frozen=True)
class _Kernels:
    panel: int  # outputs that lie together
    pack: Callable[..., None]
    multiply: Callable[..., int]


@lru_cache(maxsize=4)
def _kernels(dtype: torch.dtype) -> _Kernels | None:
    library, suffix = compiled.library(), SUFFIX.get(dtype)
    if library is None or suffix is None:
        return None
    panel = library[f"gemm_panel_{suffix}"]()
    if panel == 0:
        return None
    pack = bind(library, f"gemm_pack_{suffix}", (_POINTER, _POINTER, _LONG, _LONG))
    multiply = library[f"gemm_{suffix}"]
    multiply.argtypes = (_POINTER, _LONG, *[_POINTER] * 3, _INT, _LONG, _LONG, _INT)
    multiply.restype = _INT
    return _Kernels(panel, pack, multiply)
