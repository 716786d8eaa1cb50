"""Compiles what the launchers would launch, for a GPU that need not be there, and reads the machine code.

The launchers run on CPU tensors with the launch itself replaced by a recording, so that the compiled
variants are the ones that serving uses: the same constants, options and argument specialisation.

To be run in processes of its own: elsewhere Triton may have been imported for its interpreter.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from distserve_kernels.backend import PrefillMeta
from distserve_kernels.triton_lang import pages as page_kernels
from distserve_kernels.triton_lang import rows
from distserve_kernels.triton_lang.decode import paged_decode
from distserve_kernels.triton_lang.prefill import paged_prefill
from distserve_kernels.triton_lang.tiles import Tile

_POINTER = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


@dataclass(frozen=True)
class Launch:
    """A kernel with the grid and the arguments of one launch."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


@dataclass(frozen=True)
class Compiled:
    """What one kernel variant needs and contains; `shared` in bytes, `registers` per thread."""

    kernel: str
    threads: int
    registers: int
    shared: int
    stack: int  # bytes of thread-local memory: registers that were spilled
    instructions: frozenset[str]  # SASS operations with their modifiers

    def has(self, pattern: str) -> bool:
        return any(re.match(pattern, operation) for operation in self.instructions)


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Launches inside the block are put into the list instead of being done."""
    launches: list[Launch] = []

    def record(self: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        launches.append(Launch(self, tuple(grid), arguments, keywords))

    original = triton.JITFunction.run
    triton.JITFunction.run = record
    try:
        yield launches
    finally:
        triton.JITFunction.run = original


def compile_case(case: str, sm: int, parameters: Mapping[str, Any]) -> list[Compiled]:
    """The kernels that one of `CASES` launches, compiled for compute capability `sm` / 10."""
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: nothing would be compiled")
    with recorded_launches() as launches:
        CASES[case](**parameters)
    return [_compile(launch, sm) for launch in launches]


def grids(case: str, parameters: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and grids of what one of `CASES` launches."""
    with recorded_launches() as launches:
        CASES[case](**parameters)
    return [(launch.kernel.__name__, launch.grid) for launch in launches]


def _decode(dtype: torch.dtype, head_dim: int, group: int, page: int, tile: Tile, splits: int) -> None:
    q, pages = torch.zeros(2, 2 * group, head_dim, dtype=dtype), _pages(dtype, head_dim, page)
    tables, lens = torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    paged_decode(q, pages, pages, tables, lens, 0.1, None, tile, splits)


def _prefill(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    page: int,
    tile: Tile,
    window: int | None,
    tokens: int = 2,
) -> None:
    q, pages = torch.empty(tokens, 2 * group, head_dim, dtype=dtype), _pages(dtype, head_dim, page)
    meta = PrefillMeta.build([tokens], [0], [[0]], torch.device("cpu"))
    paged_prefill(q, pages, pages, meta, 0.1, window, tile)


def _norm(kind: str, dtype: torch.dtype, size: tuple[int, ...]) -> None:
    """`size` (rows, n) adds to a residual; (rows, heads, n) are heads in the rows of a wider tensor."""
    n = size[-1]
    parameters = [torch.ones(n, dtype=dtype) for _ in range(1 if kind == "rms_norm" else 2)]
    if len(size) == 2:
        x = torch.zeros(size, dtype=dtype)
        getattr(rows, f"add_{kind}")(x, x.clone(), *parameters, 1e-5)
    else:
        wide = torch.zeros(size[0], 2 * size[1], n, dtype=dtype)
        getattr(rows, kind)(wide[:, : size[1]], *parameters, 1e-5)


def _silu_mul(dtype: torch.dtype, n: int, tokens: int = 2) -> None:
    rows.silu_mul(torch.empty(tokens, 2 * n, dtype=dtype))


def _rotary(dtype: torch.dtype, head_dim: int, half: int, store: bool, tokens: int = 2) -> None:
    q, k, v = torch.empty(tokens, 12, head_dim, dtype=dtype).split_with_sizes((8, 2, 2), dim=1)
    angles, slots = torch.empty(tokens, half), torch.zeros(tokens, dtype=torch.int64)
    if store:
        pages = _pages(dtype, head_dim, 16)
        rows.rotary_store(q, k, v, angles, angles, pages, pages, slots)
    else:
        rows.rotary(q, k, angles, angles)


def _store(dtype: torch.dtype, head_dim: int, tokens: int = 2) -> None:
    k, pages = torch.empty(tokens, 2, head_dim, dtype=dtype), _pages(dtype, head_dim, 16)
    page_kernels.store(k, k, pages, pages, torch.zeros(tokens, dtype=torch.int64))


def _copy(dtype: torch.dtype, head_dim: int, pack: bool, blocks: int = 2) -> None:
    pages, ids = _pages(dtype, head_dim, 16), torch.zeros(blocks, dtype=torch.int64)
    buffer = torch.empty(blocks, blocks, 16, 1, head_dim, dtype=dtype)
    page_kernels.copy(pages, ids, ids, range(1, 2), buffer, pack=pack)


def _pages(dtype: torch.dtype, head_dim: int, page: int) -> torch.Tensor:
    return torch.zeros(2, page, 2, head_dim, dtype=dtype)


CASES: Mapping[str, Callable[..., None]] = {
    "decode": _decode,
    "prefill": _prefill,
    "norm": _norm,
    "silu_mul": _silu_mul,
    "rotary": _rotary,
    "store": _store,
    "copy": _copy,
}


def _compile(launch: Launch, sm: int) -> Compiled:
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    values = dict(zip(launch.kernel.arg_names, launch.arguments, strict=False))
    values |= {k: v for k, v in launch.keywords.items() if k not in _OPTIONS}
    for number, parameter in enumerate(launch.kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or (type(value) is int and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = _type(value)
        aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        if aligned and not parameter.do_not_specialize:
            attributes[(number,)] = [["tt.divisibility", 16]]
    options = {k: v for k, v in launch.keywords.items() if k in _OPTIONS}
    source = ASTSource(launch.kernel, signature, constants, attributes)
    built = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    registers, stack = _resources(built.asm["cubin"])
    operations = re.findall(r"\t(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", built.asm["sass"])
    threads = 32 * built.metadata.num_warps
    shared = built.metadata.shared
    return Compiled(launch.kernel.__name__, threads, registers, shared, stack, frozenset(operations))


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTER[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack and local memory per thread, as cuobjdump reports them."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [tool, "--dump-resource-usage", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    found = {key: int(number) for key, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return found["REG"], found["STACK"] + found["LOCAL"]
