"""The compiled copy of KV blocks on a CPU."""

from __future__ import annotations

import pytest
import torch

from distserve_kernels import compiled
from distserve_kernels.layout import TOKENS, TRANSPOSED, PageLayout
from distserve_kernels.page_rows import PageRows

pytestmark = pytest.mark.skipif(compiled.library() is None, reason="no C compiler")
BLOCKS = torch.tensor([3, 0])


def pages(layout: PageLayout, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """K and V of two layers with 5 blocks, 16 tokens a block, 4 heads of 8."""
    made = [layout.allocate(5, 16, 4, 8, dtype, torch.device("cpu")) for _ in range(2)]
    return [part.copy_(torch.randn(part.shape)) for both in made for part in both]


def rows(layout: PageLayout) -> PageRows:
    made = PageRows.of(pages(layout), layout.kv_head_axis)
    assert made is not None
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", [TOKENS, TRANSPOSED], ids=lambda layout: layout.name)
def test_rows_are_those_of_index_select_and_go_back(layout: PageLayout, dtype: torch.dtype) -> None:
    source, target = pages(layout, dtype), pages(layout, dtype)
    before = [t.clone() for t in target]
    heads, members = range(1, 3), range(1, 4)
    buffer = torch.zeros(10_000, dtype=dtype)
    packing = PageRows.of(source, layout.kv_head_axis)
    unpacking = PageRows.of(target, layout.kv_head_axis)
    assert packing is not None
    assert unpacking is not None
    filled = packing.pack(members, BLOCKS, heads, buffer)
    cut = [t.narrow(layout.kv_head_axis, 1, 2)[BLOCKS] for t in source[1:]]
    assert torch.equal(buffer[:filled], torch.cat([part.reshape(-1) for part in cut]))
    assert not buffer[filled:].any()
    to = torch.tensor([9, 4, 9, 1])[1::2]  # not contiguous
    assert unpacking.unpack(members, to, heads, buffer) == filled
    for number, (now, expected) in enumerate(zip(target, before, strict=True)):
        if number in members:
            expected.narrow(layout.kv_head_axis, 1, 2)[to] = cut[number - 1]
        assert torch.equal(now, expected)


@pytest.mark.parametrize("block", [-1, 5, 1 << 40])
def test_a_block_outside_is_refused_and_nothing_is_written(block: int) -> None:
    made, buffer = rows(TRANSPOSED), torch.full((10_000,), 7.0)
    with pytest.raises(IndexError, match=f"block {block}: there are 5"):
        made.pack(range(4), torch.tensor([0, block]), range(4), buffer)
    assert (buffer == 7.0).all()


def test_ranges_and_buffers_that_do_not_fit_are_refused() -> None:
    made, buffer = rows(TOKENS), torch.empty(10_000)
    with pytest.raises(ValueError, match=r"members=.*consecutive ones of 4"):
        made.pack(range(5), BLOCKS, range(4), buffer)
    with pytest.raises(ValueError, match=r"heads=.*of 4"):
        made.unpack(range(1), BLOCKS, range(3, 5), buffer)
    with pytest.raises(ValueError, match=r"buffer of 100 torch\.float32: 4096 torch\.float32 are needed"):
        made.pack(range(4), BLOCKS, range(4), torch.empty(100))
    with pytest.raises(ValueError, match="float16"):
        made.pack(range(4), BLOCKS, range(4), buffer.half())


def test_it_serves_contiguous_pages_of_one_size() -> None:
    page = torch.zeros(5, 4, 16, 8)
    assert PageRows.of([page, page.transpose(2, 3).contiguous()], 1) is not None
    assert PageRows.of([page.transpose(2, 3)], 1) is None
    assert PageRows.of([page, page[:2].contiguous()], 1) is None
    assert PageRows.of([page, page.half()], 1) is None


def test_none_without_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "library", lambda: None)
    assert PageRows.of([torch.zeros(5, 4, 16, 8)], 1) is None
