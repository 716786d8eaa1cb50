"""Each Triton-language kernel against its twin in torch.

With a CUDA device they run compiled (`pytest -m gpu`). Without one they need Triton's interpreter, chosen by
TRITON_INTERPRET=1 before Triton is first imported: `test_triton_kernels_interpreted` runs this file so.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distserve_kernels import ops_reference, page_copy
from distserve_kernels.backend import PrefillMeta, pad_tables
from distserve_kernels.layout import TOKENS
from distserve_kernels.reference import ReferenceBackend

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 80, 96, 128)
GROUPS = (1, 4, 8)
PAGES = (16, 32)
KV_HEADS = 2
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Shape:
    dtype: torch.dtype
    head_dim: int
    group: int
    page: int

    def __str__(self) -> str:
        return f"{str(self.dtype)[6:]}-dim{self.head_dim}-group{self.group}-page{self.page}"


EVERY = [Shape(*case) for case in itertools.product(DTYPES, HEAD_DIMS, GROUPS, PAGES)]
# Every dtype with every head size, each with all groups and pages somewhere; a page of flash-attn's size.
SOME = [
    Shape(dtype, head_dim, GROUPS[(i + j) % 3], PAGES[(i + j // 2) % 2])
    for i, dtype in enumerate(DTYPES)
    for j, head_dim in enumerate(HEAD_DIMS)
] + [Shape(torch.bfloat16, 128, 4, 256), Shape(torch.float16, 64, 7, 16)]
shapes = pytest.mark.parametrize(
    "shape",
    [*SOME, *[pytest.param(s, marks=pytest.mark.slow) for s in EVERY if s not in SOME]],
    ids=str,
)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: str(t)[6:])


@pytest.fixture
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")
    torch.set_num_threads(1)
    return torch.device("cpu")


@pytest.fixture
def backend(device: torch.device, tmp_path: Path):
    from distserve_kernels.triton_lang.backend import TritonBackend
    from distserve_kernels.triton_lang.tiles import Chip

    chip = Chip.of(device) if device.type == "cuda" else Chip("interpreter", 80, 4)
    return TritonBackend(chip, tmp_path)


class Pool:
    """Random pages in which the blocks of some sequences are scattered; free blocks hold NaN."""

    def __init__(self, shape: Shape, lengths: Sequence[int], device: torch.device) -> None:
        counts = [-(-n // shape.page) for n in lengths]
        order = (torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(1)) + 1).tolist()
        self.tables = [[order.pop() for _ in range(n)] for n in counts]
        size = (sum(counts) + 2, shape.page, KV_HEADS, shape.head_dim)
        self.keys, self.values = (
            torch.full(size, torch.nan, dtype=shape.dtype, device=device) for _ in range(2)
        )
        for table, length in zip(self.tables, lengths, strict=True):
            places = torch.arange(length)
            blocks = torch.tensor(table, dtype=torch.int64)[places // shape.page]
            for pages in (self.keys, self.values):
                rows = torch.randn(length, KV_HEADS, shape.head_dim).to(device, shape.dtype)
                pages[blocks.to(device), (places % shape.page).to(device)] = rows


def queries(rows: int, shape: Shape, device: torch.device) -> Tensor:
    """Random queries as a slice of a merged qkv tensor: the rows are not adjacent."""
    heads = KV_HEADS * shape.group
    merged = torch.randn(rows, heads + 2 * KV_HEADS, shape.head_dim).to(device, shape.dtype)
    return merged[:, :heads]


def truncates(dtype: torch.dtype, device: torch.device) -> bool:
    """The interpreter cuts the last bits of fp32 off to make bf16, where a device rounds."""
    return dtype == torch.bfloat16 and device.type == "cpu"


def assert_near(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype] * (1.5 if truncates(actual.dtype, actual.device) else 1)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def check_decode(backend, shape: Shape, lengths: Sequence[int], window: int | None, device) -> None:
    pool = Pool(shape, lengths, device)
    q = queries(len(lengths), shape, device)
    tables = pad_tables(pool.tables, device)
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    arguments = (q, pool.keys, pool.values, tables, lens, shape.head_dim**-0.5, window)
    actual = backend.decode(*arguments)
    assert actual.is_contiguous()
    assert_near(actual, ReferenceBackend(TOKENS).decode(*arguments))


@shapes
def test_decode(shape: Shape, backend, device: torch.device) -> None:
    check_decode(backend, shape, [1, shape.page, 0, 3 * shape.page + 5], None, device)


@dtypes
@pytest.mark.parametrize("window", [None, 40, 300])
def test_decode_in_splits(dtype: torch.dtype, window: int | None, backend, device: torch.device) -> None:
    """Contexts that are cut into several parts, beside ones that have fewer parts than the longest."""
    check_decode(backend, Shape(dtype, 64, 4, 16), [1100, 0, 3, 300], window, device)


def test_decode_with_more_heads_than_a_tile_has_rows(backend, device: torch.device) -> None:
    check_decode(backend, Shape(torch.float16, 64, 71, 16), [21, 2], None, device)


@pytest.mark.parametrize("splits", [1, 3])
def test_splits_do_not_change_the_result(splits: int, device: torch.device) -> None:
    from distserve_kernels.triton_lang.decode import paged_decode
    from distserve_kernels.triton_lang.tiles import Tile

    shape = Shape(torch.float32, 64, 1, 16)
    lengths = [700, 257, 256]
    pool = Pool(shape, lengths, device)
    q = queries(3, shape, device)
    tables = pad_tables(pool.tables, device)
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    arguments = (q, pool.keys, pool.values, tables, lens, 0.125, None)
    expected = ReferenceBackend(TOKENS).decode(*arguments)
    assert_near(paged_decode(*arguments, Tile(n=32, warps=4, stages=2), splits), expected)


def test_decode_of_an_empty_batch(backend, device: torch.device) -> None:
    shape = Shape(torch.float32, 64, 1, 16)
    pool = Pool(shape, [4], device)
    none = torch.zeros(0, dtype=torch.int32, device=device)
    tables = none.view(0, 1)
    out = backend.decode(queries(0, shape, device), pool.keys, pool.values, tables, none, 1.0)
    assert out.shape == (0, KV_HEADS, 64)


def check_prefill(
    backend,
    shape: Shape,
    parts: Sequence[tuple[int, int]],
    window: int | None,
    device: torch.device,
) -> None:
    """`parts`: (start, length) of each sequence's chunk."""
    starts, lens = [start for start, _ in parts], [n for _, n in parts]
    pool = Pool(shape, [start + n for start, n in parts], device)
    meta = PrefillMeta.build(lens, starts, pool.tables, device)
    q = queries(sum(lens), shape, device)
    new = torch.empty(sum(lens), KV_HEADS, shape.head_dim, device=device)  # only the pages are read
    arguments = (q, new, new, pool.keys, pool.values, meta, shape.head_dim**-0.5, window)
    actual = backend.prefill(*arguments)
    assert actual.is_contiguous()
    assert_near(actual, ReferenceBackend(TOKENS).prefill(*arguments))


@shapes
def test_prefill(shape: Shape, backend, device: torch.device) -> None:
    """A whole prompt, one token, a chunk with earlier pages, and nothing at all of a fourth sequence."""
    page = shape.page
    parts = [(0, min(page, 32) + 3), (0, 1), (2 * page + 9, min(page, 32) + 1), (page, 0)]
    check_prefill(backend, shape, parts, None, device)


@dtypes
@pytest.mark.parametrize("window", [None, 5, 70])
def test_prefill_over_several_tiles(
    dtype: torch.dtype,
    window: int | None,
    backend,
    device: torch.device,
) -> None:
    check_prefill(backend, Shape(dtype, 64, 4, 16), [(150, 40), (0, 90)], window, device)


def test_prefill_with_more_heads_than_a_tile_has_rows(backend, device: torch.device) -> None:
    check_prefill(backend, Shape(torch.float32, 64, 71, 16), [(5, 3)], None, device)


def test_prefill_of_an_empty_batch(backend, device: torch.device) -> None:
    shape = Shape(torch.float32, 64, 1, 16)
    pool = Pool(shape, [4], device)
    q = queries(0, shape, device)
    meta = PrefillMeta.build([], [], [], device)
    assert backend.prefill(q, q, q, pool.keys, pool.values, meta, 1.0).shape == (0, KV_HEADS, 64)


@dtypes
@pytest.mark.parametrize("size", [(5, 96), (3, 2, 80), (2, 4096)], ids=str)
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_norms(kind: str, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    from distserve_kernels.triton_lang import rows

    wide = torch.randn(*size[:-1], size[-1] + 16).to(device, dtype)
    x = wide[..., : size[-1]]
    parameters = [torch.randn(size[-1]).to(device, dtype) for _ in range(1 if kind == "rms_norm" else 2)]
    actual = getattr(rows, kind)(x, *parameters, 1e-5)
    assert_near(actual, getattr(ops_reference, kind)(x, *parameters, 1e-5))

    residual = torch.randn(size).to(device, dtype)
    kept = residual.clone()
    actual, summed = getattr(rows, f"add_{kind}")(x, residual, *parameters, 1e-5)
    assert summed is residual
    expected, expected_sum = getattr(ops_reference, f"add_{kind}")(x, kept, *parameters, 1e-5)
    assert truncates(dtype, device) or torch.equal(summed, expected_sum)
    assert_near(summed, expected_sum)
    assert_near(actual, expected)


def test_norm_of_no_rows(device: torch.device) -> None:
    from distserve_kernels.triton_lang import rows

    x = torch.empty(0, 64, device=device)
    assert rows.rms_norm(x, torch.ones(64, device=device), 1e-5).shape == (0, 64)


@dtypes
@pytest.mark.parametrize("size", [(3, 2 * 100), (2, 2, 2 * 64), (1, 2 * 1500), (0, 2 * 8)], ids=str)
def test_silu_mul(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    from distserve_kernels.triton_lang import rows

    x = torch.randn(*size[:-1], size[-1] + 8).to(device, dtype)[..., : size[-1]]
    assert_near(rows.silu_mul(x), ops_reference.silu_mul(x))


@dtypes
@pytest.mark.parametrize(
    ("head_dim", "rotated", "group"), [(64, 64, 4), (80, 80, 1), (96, 32, 8), (128, 128, 3)]
)
def test_rotary_and_store(
    head_dim: int, rotated: int, group: int, dtype: torch.dtype, device: torch.device
) -> None:
    """q, k and v are slices of one tensor; some channels may not turn; without a slot nothing is stored."""
    from distserve_kernels.triton_lang import rows

    tokens, page = 5, 16
    slots = torch.tensor([3, 40, -1, 17, 16], dtype=torch.int64, device=device)
    angles = torch.randn(tokens, rotated // 2, device=device)
    merged = torch.randn(tokens, KV_HEADS * (group + 2), head_dim).to(device, dtype)
    pages = [torch.zeros(3, page, KV_HEADS, head_dim, dtype=dtype, device=device) for _ in range(4)]
    results = []
    for run, keys, values in (
        (rows.rotary_store, *pages[:2]),
        (ops_reference.rotary_store, *(p.cpu() for p in pages[2:])),
    ):
        where = keys.device
        copy = merged.to(where, copy=True)
        q, k, v = copy.split_with_sizes((KV_HEADS * group, KV_HEADS, KV_HEADS), dim=1)
        run(q, k, v, angles.cos().to(where), angles.sin().to(where), keys, values, slots.to(where))
        results.append([copy.cpu(), keys.cpu(), values.cpu()])
    for actual, expected in zip(*results, strict=True):
        assert_near(actual, expected)

    alone = merged.clone()
    q, k, _ = alone.split_with_sizes((KV_HEADS * group, KV_HEADS, KV_HEADS), dim=1)
    rows.rotary(q, k, angles.cos(), angles.sin())
    assert torch.equal(alone.cpu(), results[0][0])


@dtypes
@pytest.mark.parametrize(("head_dim", "page"), [(64, 16), (80, 32), (128, 256)])
def test_store(head_dim: int, page: int, dtype: torch.dtype, backend, device: torch.device) -> None:
    merged = torch.randn(4, 9, head_dim).to(device, dtype)
    k, v = merged[:, 3:6], merged[:, 6:]
    slots = torch.tensor([0, 2 * page - 1, -1, page], dtype=torch.int64, device=device)
    actual = backend.allocate(2, page, 3, head_dim, dtype, device)
    expected = TOKENS.allocate(2, page, 3, head_dim, dtype, device)
    backend.store(k, v, *actual, slots)
    TOKENS.write(k, v, *expected, slots)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    backend.store(k[:0], v[:0], *actual, slots[:0])
    assert torch.equal(actual[0], expected[0])


@dtypes
@pytest.mark.parametrize(
    ("heads", "head_dim", "page"),
    [(range(4), 64, 16), (range(1, 3), 80, 32), (range(3, 4), 128, 16)],
)
def test_pack_and_unpack(
    heads: range, head_dim: int, page: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Some blocks and heads of two of three tensors, into a buffer and on into other pages."""
    from distserve_kernels.triton_lang import pages as kernels

    tensors = [torch.randn(6, page, 4, head_dim).to(dtype) for _ in range(3)]
    blocks, members = torch.tensor([4, 0, 5]), range(1, 3)
    twin = page_copy.PageSet.of(tensors, TOKENS.kv_head_axis)
    buffer = torch.zeros(2 * 3 * page * len(heads) * head_dim + 7, dtype=dtype)
    expected = page_copy.pack(twin, members, blocks, heads, buffer)

    there = [t.to(device, copy=True) for t in tensors]
    pages = page_copy.PageSet.of(there, TOKENS.kv_head_axis)
    actual = torch.zeros_like(expected, device=device)
    distances, ids = pages.distances[1:3], blocks.to(device)
    kernels.copy(there[0], distances, ids, heads, actual, pack=True)
    assert torch.equal(actual.cpu(), expected)

    to = torch.tensor([1, 2, 3])
    page_copy.unpack(twin, members, to, heads, buffer)
    kernels.copy(there[0], distances, to.to(device), heads, actual, pack=False)
    for mine, theirs in zip(there, tensors, strict=True):
        assert torch.equal(mine.cpu(), theirs)
    kernels.copy(there[0], distances, ids[:0], heads, actual, pack=False)
    assert torch.equal(there[1].cpu(), tensors[1])


@dtypes
def test_tuning_keeps_the_fastest_tile(
    dtype: torch.dtype,
    backend,
    device: torch.device,
    tmp_path: Path,
) -> None:
    from distserve_kernels.triton_lang.backend import TritonBackend
    from distserve_kernels.triton_lang.tuning import Shape as Load
    from distserve_kernels.triton_lang.tuning import tune

    load = Load(2, 1, 64, 16, dtype, batch=1, context=20, prompt=20)
    later_is_faster = itertools.count(start=0, step=-1)

    def stopwatch(run) -> float:
        run()
        return float(next(later_is_faster))

    chosen = tune(backend, load, device, stopwatch)
    again = TritonBackend(backend.chip, tmp_path)
    assert len(chosen) == 2
    for kernel in ("decode", "prefill"):
        from distserve_kernels.triton_lang.tiles import Case

        case = Case(kernel, dtype, 64, 16, 2)
        assert again.tile(case) == chosen[case.key] == again.table.candidates(case, backend.chip.sm)[-1]
