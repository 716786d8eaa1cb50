"""Every attention implementation against the reference, over shapes, dtypes, ragged lengths and strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distserve_kernels.backend import PROVIDERS, AttentionBackend, PrefillMeta, choose_backend, pad_tables
from distserve_kernels.layout import TOKENS, TRANSPOSED, fold_padding
from distserve_kernels.reference import ReferenceBackend
from distserve_kernels.sdpa import SdpaBackend

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [
    (4, 4, 64),
    (12, 3, 64),
    (8, 1, 64),
    (4, 1, 80),
    (6, 2, 96),
    (4, 2, 128),
    (3, 1, 8),
    (2, 2, 16),
    (20, 1, 32),
]


class Case:
    """Pages with random contents, random block tables and the twin's answers."""

    def __init__(
        self, backend: AttentionBackend, heads: tuple[int, int, int], block_size: int, dtype: torch.dtype
    ) -> None:
        torch.manual_seed(1)
        self.backend, self.dtype, self.block_size = backend, dtype, block_size
        self.q_heads, self.kv_heads, self.dim = heads
        self.num_blocks = 64
        size = (self.num_blocks, block_size, self.kv_heads, self.dim)
        self.keys, self.values = backend.allocate(*size, dtype, CPU)
        for pages in (self.keys, self.values):
            pages.copy_(torch.randn(pages.shape))
        layout = TRANSPOSED if backend.kv_head_axis == 1 else TOKENS
        self.twin = ReferenceBackend(layout)
        self.scale = self.dim**-0.5

    def tables(self, lengths: list[int]) -> list[list[int]]:
        free = torch.randperm(self.num_blocks).tolist()
        return [[free.pop() for _ in range(-(-n // self.block_size))] for n in lengths]

    def qkv(self, tokens: int, strided: bool) -> tuple[Tensor, Tensor, Tensor]:
        """As slices of one merged tensor if `strided`."""
        sizes = (self.q_heads, self.kv_heads, self.kv_heads)
        merged = torch.randn(tokens, sum(sizes), self.dim).to(self.dtype)
        parts = merged.split(sizes, dim=1)
        q, k, v = parts if strided else [x.contiguous() for x in parts]
        return q, k, v

    def close(self, got: Tensor, want: Tensor) -> None:
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        assert got.is_contiguous()
        torch.testing.assert_close(got, want, atol=TOLERANCE[self.dtype], rtol=TOLERANCE[self.dtype])


def backends(dtype: torch.dtype, dim: int, block_size: int) -> list[AttentionBackend]:
    """The compiled one where it can be had, and both layouts of the torch one."""
    both: list[AttentionBackend] = [SdpaBackend(TRANSPOSED), SdpaBackend(TOKENS)]
    return [choose_backend(CPU, dtype, dim, block_size), *both]


@pytest.mark.parametrize("block_size", [16, 32, 48])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_decode(heads: tuple[int, int, int], block_size: int, dtype: torch.dtype, window: int | None) -> None:
    for backend in backends(dtype, heads[2], block_size):
        case = Case(backend, heads, block_size, dtype)
        lengths = [1, block_size - 1, block_size, block_size + 1, 0, 5 * block_size + 3, 300]
        tables = pad_tables(case.tables(lengths), CPU)
        lens = torch.tensor(lengths, dtype=torch.int32)
        q = case.qkv(len(lengths), strided=True)[0]
        call = (q, case.keys, case.values, tables, lens, case.scale, window)
        case.close(backend.decode(*call), case.twin.decode(*call))


@pytest.mark.parametrize("block_size", [16, 32, 48])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 20])
def test_prefill(
    heads: tuple[int, int, int], block_size: int, dtype: torch.dtype, window: int | None
) -> None:
    queries = [1, block_size - 1, block_size, block_size + 1, 37, 5, 150]
    starts = [0, 0, 0, 0, 2 * block_size, 3 * block_size + 5, 130]
    for backend in backends(dtype, heads[2], block_size):
        case = Case(backend, heads, block_size, dtype)
        tables = case.tables([q + s for q, s in zip(queries, starts, strict=True)])
        meta = PrefillMeta.build(queries, starts, tables, CPU)
        q, k, v = case.qkv(sum(queries), strided=True)
        positions = [p for n, s in zip(queries, starts, strict=True) for p in range(s, s + n)]
        owners = [i for i, n in enumerate(queries) for _ in range(n)]
        slots = [
            tables[i][p // block_size] * block_size + p % block_size
            for i, p in zip(owners, positions, strict=True)
        ]
        backend.store(k, v, case.keys, case.values, torch.tensor(slots))
        call = (q, k, v, case.keys, case.values, meta, case.scale, window)
        case.close(backend.prefill(*call), case.twin.prefill(*call))


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_store(block_size: int, dtype: torch.dtype, strided: bool) -> None:
    for backend in backends(dtype, 24, block_size):
        case = Case(backend, (6, 2, 24), block_size, dtype)
        slots = [*range(5, 45), 200, 100, 199, -1, 201]  # a run over several blocks, single ones, padding
        _, k, v = case.qkv(len(slots), strided)
        want = case.keys.clone(), case.values.clone()
        case.twin.store(k, v, *want, torch.tensor(slots))
        backend.store(k, v, case.keys, case.values, torch.tensor(slots))
        assert torch.equal(case.keys, want[0])
        assert torch.equal(case.values, want[1])


def test_reads_back_what_was_stored() -> None:
    """The twin itself: a sequence stored token by token attends like plain attention over its tokens."""
    for layout in (TRANSPOSED, TOKENS):
        backend = ReferenceBackend(layout)
        case = Case(backend, (4, 2, 16), 16, torch.float32)
        q, k, v = case.qkv(40, strided=False)
        table = case.tables([40])
        slots = torch.tensor([table[0][p // 16] * 16 + p % 16 for p in range(40)])
        backend.store(k, v, case.keys, case.values, slots)
        meta = PrefillMeta.build([40], [0], table, CPU)
        got = backend.prefill(q, k, v, case.keys, case.values, meta, 0.25)
        repeated = [x.repeat_interleave(2, dim=1).transpose(0, 1) for x in (k, v)]
        want = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), *repeated, is_causal=True, scale=0.25
        ).transpose(0, 1)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_empty_batch(dtype: torch.dtype) -> None:
    for backend in backends(dtype, 64, 16):
        case = Case(backend, (4, 2, 64), 16, dtype)
        q, k, v = case.qkv(0, strided=False)
        none = torch.zeros(0, dtype=torch.int32)
        out = backend.decode(q, case.keys, case.values, none.view(0, 1), none, case.scale)
        assert out.shape == (0, 4, 64)
        meta = PrefillMeta.build([], [], [], CPU)
        assert backend.prefill(q, k, v, case.keys, case.values, meta, case.scale).shape == (0, 4, 64)
        backend.store(k, v, case.keys, case.values, torch.zeros(0, dtype=torch.int64))


def test_decode_does_not_depend_on_the_batch() -> None:
    """Bit for bit: what lets a request's text be the same alone and among others."""
    backend = choose_backend(CPU, torch.float32, 64, 16)
    case = Case(backend, (12, 4, 64), 16, torch.float32)
    lengths = [50, 300, 17]
    tables, lens = pad_tables(case.tables(lengths), CPU), torch.tensor(lengths, dtype=torch.int32)
    q = case.qkv(3, strided=False)[0]
    together = backend.decode(q, case.keys, case.values, tables, lens, case.scale)
    for i in range(3):
        one = slice(i, i + 1)
        alone = backend.decode(q[one], case.keys, case.values, tables[one], lens[one], case.scale)
        assert torch.equal(alone[0], together[i])


def test_several_threads_give_the_same() -> None:
    threads = torch.get_num_threads()
    backend = choose_backend(CPU, torch.float32, 64, 16)
    case = Case(backend, (12, 4, 64), 16, torch.float32)
    tables, lens = pad_tables(case.tables([300]), CPU), torch.tensor([300], dtype=torch.int32)
    q = case.qkv(1, strided=False)[0]
    one = backend.decode(q, case.keys, case.values, tables, lens, case.scale)
    try:
        torch.set_num_threads(2)
        two = backend.decode(q, case.keys, case.values, tables, lens, case.scale)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, two)


def test_choice_is_by_shape_and_can_be_forced() -> None:
    assert choose_backend(CPU, torch.float16, 64, 16).name == "sdpa"
    assert choose_backend(CPU, torch.float32, 64, 8).name == "sdpa"
    assert choose_backend(CPU, torch.float32, 64, 16, "reference").name == "reference"
    with pytest.raises(ValueError, match=r"attention_backend='fast': must be one of .*sdpa"):
        choose_backend(CPU, torch.float32, 64, 16, "fast")
    with pytest.raises(ValueError, match="attention_backend='flash_attn' can't serve: flash_attn: "):
        choose_backend(CPU, torch.float32, 64, 16, "flash_attn")
    assert set(PROVIDERS) == {"flash_attn", "triton", "c", "sdpa", "reference"}


def test_padding_is_folded_into_a_real_row() -> None:
    """The way devices other than CPUs skip rows: what is stored is what the filtered rows store."""
    k, v = torch.randn(4, 2, 8), torch.randn(4, 2, 8)
    slots = torch.tensor([3, -1, 7, -1])
    folded = fold_padding(k, v, slots)
    for layout in (TRANSPOSED, TOKENS):
        want, got = (
            layout.allocate(2, 16, 2, 8, torch.float32, CPU),
            layout.allocate(2, 16, 2, 8, torch.float32, CPU),
        )
        layout.write(k, v, *want, slots)
        layout.write(folded[0], folded[1], *got, folded[2])
        assert torch.equal(want[0], got[0])
        assert torch.equal(want[1], got[1])
