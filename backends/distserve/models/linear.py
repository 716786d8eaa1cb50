"""One linear layer, with its weight in the form (or the two forms) that this host multiplies fastest.

`PackedLinear` serves every row count best (its figures stand there), with one exception: where it has only
oneDNN's form, MKL's plain fp32 product on Intel wins at one row (a whole decode step takes 33 ms instead of
40) and, by a little, at many rows. Measured on one core of a Xeon, K = 768, N = 4096, fp32, microseconds
per call:

    rows                    1      8     32     512
    F.linear (MKL)        881   2596   3009   21312
    oneDNN packed         900   1240   2248   21500
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
    """Which forms of a weight are kept.

    `packed`: `PackedLinear` (off: the ordinary [N, K] form only). `plain`: the ordinary form beside
    oneDNN's, for calls of one row or of 64 and more; the other packed forms need none beside them.
    """

    packed: bool = False
    plain: bool = False


def plan_linears(
    prepack: Prepack,
    device: torch.device,
    dtype: torch.dtype,
    weight_bytes: int,
    memory_bytes: int,
    mkl_is_native: bool,
) -> LinearPlan:
    """The plan for a rank that holds `weight_bytes` of linear weights on a host with `memory_bytes`.

    `auto`: packed, and for fp32 on Intel the plain form beside oneDNN's as long as both together are small (a
    quarter of the memory); `both`, `packed` and `off` force the choice. Devices other than CPUs, and fp16,
    use the plain weight.
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
    """y = x W^T + b for x [M, K], W [N, K], b [N] or None. `weight` is not kept unless the plan says so."""

    __slots__ = ("_bias", "_packed", "_plain", "forms")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, plan: LinearPlan | None = None) -> None:
        plan = plan or LinearPlan()
        packed = PackedLinear(weight, bias) if plan.packed else None
        form = "torch" if packed is None else packed.name
        both = form == "onednn" and plan.plain
        self._packed = None if form == "torch" else packed  # "torch": nothing to pack with in this build
        self._plain = weight if form == "torch" or both else None
        self._bias = bias
        self.forms = f"{form}+torch" if both else form  # for log and status

    @property
    def packed(self) -> PackedLinear | None:
        """The packed form, if it serves every call."""
        return self._packed if self._plain is None else None

    def __call__(self, x: Tensor) -> Tensor:
        plain = self._plain
        if plain is None or (self._packed is not None and 1 < x.shape[0] < _MKL_FROM_ROWS):
            assert self._packed is not None
            return self._packed(x)
        return functional.linear(x, plain, self._bias)
