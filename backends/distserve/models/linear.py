"""One linear layer, with its weight in the form (or the two forms) that this host multiplies fastest.

Measured on one core, K = 768, N = 4096, fp32, microseconds per call, plain `F.linear` (MKL) | oneDNN packed:

    rows            1           8            32            512
    Intel   881 |  900   2596 | 1240   3009 | 2248   21.3 ms | 21.5 ms
    AMD     947 |  796   1687 |  857   3764 | 2424   41.2 ms | 29.1 ms

In bf16 packed wins for every row count on both (x1.1 to x2.7). So the packed form serves everything, with one
exception: MKL's fp32 product on Intel at one row (a whole decode step is 19 % faster) and, by a little, at
many.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from distserve_kernels.linear import PackedLinear

Prepack = Literal["auto", "both", "packed", "off"]

_MKL_FROM_ROWS = 64  # Intel, fp32: from here on the plain weight is as fast as the packed one
_BOTH_COPIES_SHARE = 0.25  # "auto" keeps two copies while both together stay below this share of the memory


@dataclass(frozen=True)
class LinearPlan:
    """Which forms of a weight are kept, and which one serves a call.

    `packed`: keep oneDNN's form. `plain`: keep the ordinary [N, K] form. With both, calls of 2 to 63 rows
    use the packed one and the others the plain one.
    """

    packed: bool = False
    plain: bool = True


def plan_linears(
    prepack: Prepack,
    device: torch.device,
    dtype: torch.dtype,
    weight_bytes: int,
    memory_bytes: int,
    mkl_is_native: bool,
) -> LinearPlan:
    """The plan for a rank that holds `weight_bytes` of linear weights on a host with `memory_bytes`.

    `auto`: packed only, except for fp32 on Intel, where both are kept as long as that is small (a quarter
    of the memory); `both`, `packed` and `off` force the choice. Devices other than CPUs, and fp16, use the
    plain weight.
    """
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16) or prepack == "off":
        return LinearPlan()
    if prepack == "auto":
        fits = 2 * weight_bytes <= _BOTH_COPIES_SHARE * memory_bytes
        return LinearPlan(packed=True, plain=dtype == torch.float32 and mkl_is_native and fits)
    return LinearPlan(packed=True, plain=prepack == "both")


def host_memory_bytes() -> int:
    """Physical memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def mkl_is_native() -> bool:
    """Whether this is an Intel CPU: elsewhere MKL takes slower code paths."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()[:4096]
    except OSError:
        return False


class Linear:
    """y = x W^T + b for x [M, K], W [N, K], b [N] or None."""

    __slots__ = ("_bias", "_packed", "_plain")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, plan: LinearPlan | None = None) -> None:
        plan = plan or LinearPlan()
        packed = PackedLinear(weight, bias) if plan.packed else None
        if packed is not None and packed.name == "torch":  # this build has no packed product
            packed = None
        self._packed = packed
        self._plain = weight if plan.plain or packed is None else None
        self._bias = bias

    @property
    def forms(self) -> str:
        """What is kept: "packed", "plain" or "packed+plain"."""
        kept = ["packed"] if self._packed is not None else []
        return "+".join([*kept, *(["plain"] if self._plain is not None else [])])

    def __call__(self, x: Tensor) -> Tensor:
        plain = self._plain
        if plain is None or (self._packed is not None and 1 < x.shape[0] < _MKL_FROM_ROWS):
            assert self._packed is not None
            return self._packed(x)
        return functional.linear(x, plain, self._bias)
