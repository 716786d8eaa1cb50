"""Compiles the kernels for every generation of GPUs with shared memory or products of its own, which needs
no GPU, and looks at the machine code.

Promised of every variant: it fits the device, keeps everything in registers, reads memory 16 bytes at a
time, and multiplies matrices on the tensor cores. The everyday tests take each kernel with its default
tiles, for two generations; the slow ones everything that the tile table has, for all.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from distserve_kernels.triton_lang.tiles import Case, TileTable
from triton_compilation import Compiled, compile_case, grids

# that one program may have
SHARED_BYTES = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
MOST_PROGRAMS = 65535  # of every axis of a grid but the first
REGISTERS, REGISTERS_PER_THREAD = 65536, 255
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
EVERYDAY = (80, 90)
SMS = [pytest.param(sm, marks=() if sm in EVERYDAY else pytest.mark.slow) for sm in SHARED_BYTES]
LARGE_PRODUCTS = {90: "HGMMA", 100: "UTCHMMA"}  # of more than a warp
TABLE = TileTable.shipped()
COMPILE_S = 240  # of one variant on a busy machine


@dataclass(frozen=True)
class Variant:
    """A case of `triton_compilation.CASES`."""

    case: str
    sm: int
    parameters: Mapping[str, Any] = field(hash=False)

    def __str__(self) -> str:
        values = (str(v).removeprefix("torch.").replace(" ", "") for v in self.parameters.values())
        return f"{self.case}-sm{self.sm}-{'-'.join(values)}"


def attention(
    case: str,
    sm: int,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    page: int,
    option: int | None,
    tiles: slice,
) -> list[Variant]:
    """Variants with some of the table's tiles; `option` is the number of splits, or the sliding window."""
    name = "splits" if case == "decode" else "window"
    shape = {"dtype": dtype, "head_dim": head_dim, "group": group, "page": page}
    found = TABLE.candidates(Case(case, dtype, head_dim, page, group), sm)[tiles]
    return [Variant(case, sm, shape | {"tile": tile, name: option}) for tile in found]


def everyday(sm: int) -> Iterator[Variant]:
    """Every kernel; the default tiles, in the shapes that are hardest on registers."""
    default = slice(1)
    yield from attention("decode", sm, BF16, 128, 8, 16, 4, default)
    yield from attention("decode", sm, FP16, 80, 1, 256, 1, default)
    yield from attention("decode", sm, FP32, 128, 4, 16, 4, default)
    yield from attention("prefill", sm, BF16, 128, 4, 16, None, default)
    yield from attention("prefill", sm, FP16, 80, 1, 256, 4096, default)
    yield from attention("prefill", sm, BF16, 64, 8, 16, None, default)
    yield from attention("prefill", sm, FP32, 128, 4, 16, None, default)
    yield Variant("norm", sm, {"kind": "rms_norm", "dtype": BF16, "size": (2, 4096)})
    yield Variant("norm", sm, {"kind": "layer_norm", "dtype": FP16, "size": (2, 5120)})
    yield Variant("norm", sm, {"kind": "rms_norm", "dtype": BF16, "size": (2, 8, 128)})
    yield Variant("silu_mul", sm, {"dtype": BF16, "n": 14336})
    yield Variant("rotary", sm, {"dtype": BF16, "head_dim": 128, "half": 64, "store": True})
    yield Variant("store", sm, {"dtype": BF16, "head_dim": 128})
    yield Variant("copy", sm, {"dtype": BF16, "head_dim": 128, "pack": True})
    yield Variant("copy", sm, {"dtype": BF16, "head_dim": 80, "pack": False})


def attention_sweep(case: str, sm: int) -> Iterator[Variant]:
    """All tiles in all head sizes; half precision in bf16 widely, in fp16 and fp32 once each."""
    every = slice(None)
    for head_dim, option in itertools.product(
        (64, 80, 96, 128), (1, 4) if case == "decode" else (None, 4096)
    ):
        for group, page in itertools.product((1, 8), (16, 256)):
            yield from attention(case, sm, BF16, head_dim, group, page, option, every)
        for dtype in (FP16, FP32):
            yield from attention(case, sm, dtype, head_dim, 4, 32, option, every)


def row_sweep(sm: int) -> Iterator[Variant]:
    for dtype, head_dim in itertools.product((BF16, FP16, FP32), (64, 80, 96, 128)):
        for kind in ("rms_norm", "layer_norm"):
            yield Variant("norm", sm, {"kind": kind, "dtype": dtype, "size": (2, 8, head_dim)})
        for store in (True, False):
            half = head_dim // 2
            yield Variant("rotary", sm, {"dtype": dtype, "head_dim": head_dim, "half": half, "store": store})
            yield Variant("copy", sm, {"dtype": dtype, "head_dim": head_dim, "pack": store})
        yield Variant("store", sm, {"dtype": dtype, "head_dim": head_dim})
    for dtype, n in itertools.product((BF16, FP32), (768, 4096, 8192, 16384)):
        for kind in ("rms_norm", "layer_norm"):
            yield Variant("norm", sm, {"kind": kind, "dtype": dtype, "size": (2, n)})
        yield Variant("silu_mul", sm, {"dtype": dtype, "n": n})


def check(compiled: Compiled, variant: Variant) -> None:
    """Asserts what the module's docstring promises."""
    assert compiled.shared <= SHARED_BYTES[variant.sm], compiled
    assert compiled.registers <= REGISTERS_PER_THREAD
    assert compiled.registers * compiled.threads <= REGISTERS, compiled
    assert compiled.stack == 0, f"{compiled.stack} bytes spilled: {compiled}"
    assert not compiled.has(r"STL|LDL"), compiled
    assert compiled.has(r"(LDG|LDGSTS)\..*\b128\b"), f"no 16-byte load: {compiled}"
    if compiled.kernel != "decode_reduce":  # which writes one row per program
        assert compiled.has(r"STG\..*\b128\b"), f"no 16-byte store: {compiled}"
    if compiled.kernel not in ("decode_reduce", "decode_split"):  # which also write one sum per row
        assert not compiled.has(r"STG\.E(\.U8|\.U16|\.64)?$"), f"narrow store: {compiled}"
    if compiled.kernel == "prefill" and variant.sm in LARGE_PRODUCTS and variant.parameters["dtype"] != FP32:
        product = LARGE_PRODUCTS[variant.sm]
        assert compiled.has(product), f"no {product}: {compiled}"
    elif compiled.kernel in ("decode_split", "prefill"):
        operands = "TF32" if variant.parameters["dtype"] == FP32 else "F32"
        assert compiled.has(rf"HMMA\..*{operands}"), f"no tensor core product: {compiled}"


@pytest.fixture(scope="module")
def compilers() -> Iterator[ProcessPoolExecutor]:
    """Fresh processes, in which Triton is imported to compile."""
    asked = os.environ.pop("TRITON_INTERPRET", None)
    workers = min(4, os.cpu_count() or 1)
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        pool.submit(int).result(timeout=60)  # they have their environment now
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        if asked is not None:
            os.environ["TRITON_INTERPRET"] = asked


def compile_all(pool: ProcessPoolExecutor, variants: list[Variant]) -> None:
    """Compiles and checks, and reports all failures together."""
    started: list[tuple[Variant, Future[list[Compiled]]]] = [
        (variant, pool.submit(compile_case, variant.case, variant.sm, variant.parameters))
        for variant in variants
    ]
    wrong: list[str] = []
    for variant, future in started:
        kernels = future.result(timeout=COMPILE_S)
        assert kernels, f"{variant}: nothing was launched"
        for compiled in kernels:
            try:
                check(compiled, variant)
            except AssertionError as error:
                wrong.append(f"{variant}: {error}")
    assert not wrong, "\n".join(wrong)


def test_no_axis_but_the_first_grows_with_the_prompt(compilers: ProcessPoolExecutor) -> None:
    """One prompt of 200,000 tokens, in the smallest tiles, and as many blocks."""
    tokens = {"tokens": 200_000}
    launches: list[tuple[str, Mapping[str, Any]]] = [
        (variant.case, variant.parameters | tokens)
        for variant in attention("prefill", 80, FP32, 64, 16, 16, None, slice(1))
    ]
    launches += [
        ("norm", {"kind": "rms_norm", "dtype": FP16, "size": (200_000, 64)}),
        ("silu_mul", {"dtype": FP16, "n": 64} | tokens),
        ("rotary", {"dtype": FP16, "head_dim": 64, "half": 32, "store": True} | tokens),
        ("store", {"dtype": FP16, "head_dim": 64} | tokens),
        ("copy", {"dtype": FP16, "head_dim": 64, "pack": True, "blocks": 500}),
    ]
    found = [
        kernel for case in launches for kernel in compilers.submit(grids, *case).result(timeout=COMPILE_S)
    ]
    assert len(found) == len(launches)
    for kernel, grid in found:
        assert max(grid[1:], default=1) <= MOST_PROGRAMS, f"{kernel}: grid {grid}"


@pytest.mark.parametrize("sm", SMS)
def test_every_kernel_with_its_default_tiles(sm: int, compilers: ProcessPoolExecutor) -> None:
    compile_all(compilers, list(everyday(sm)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("head", ["decode", "prefill"])
@pytest.mark.parametrize("sm", SMS)
def test_every_tile_of_attention(head: str, sm: int, compilers: ProcessPoolExecutor) -> None:
    compile_all(compilers, list(attention_sweep(head, sm)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("sm", SMS)
def test_every_shape_of_the_row_kernels(sm: int, compilers: ProcessPoolExecutor) -> None:
    compile_all(compilers, list(row_sweep(sm)))
