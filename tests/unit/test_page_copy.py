"""Packing of KV blocks in torch, in both page layouts. The kernel is tested in `test_triton_kernels`."""

from __future__ import annotations

import pytest
import torch

from distserve_kernels.layout import TOKENS, TRANSPOSED, PageLayout
from distserve_kernels.page_copy import PageSet, pack, unpack

BLOCKS = torch.tensor([3, 0])


def page_set(layout: PageLayout, seed: int) -> PageSet:
    """K of four layers with 5 blocks, 16 tokens a block, 4 heads of 8."""
    torch.manual_seed(seed)
    pages = [layout.allocate(5, 16, 4, 8, torch.float32, torch.device("cpu"))[0].normal_() for _ in range(4)]
    return PageSet.of(pages, layout.kv_head_axis)


@pytest.mark.parametrize("layout", [TOKENS, TRANSPOSED], ids=lambda layout: layout.name)
def test_what_was_packed_is_unpacked_elsewhere(layout: PageLayout) -> None:
    source, target = page_set(layout, 0), page_set(layout, 1)
    heads, members = range(1, 3), range(1, len(source.tensors))
    before = [t.clone() for t in target.tensors]
    filled = pack(source, members, BLOCKS, heads, torch.empty(10_000))
    assert filled.shape == (len(members), 2, *source.block_shape(heads))
    to = torch.tensor([4, 1])
    unpack(target, members, to, heads, filled.flatten())
    for number, (now, old) in enumerate(zip(target.tensors, before, strict=True)):
        expected = old.clone()
        if number in members:
            for a, b in zip(to.tolist(), BLOCKS.tolist(), strict=True):
                part = expected[a].narrow(layout.kv_head_axis - 1, 1, 2)
                part.copy_(source.tensors[number][b].narrow(layout.kv_head_axis - 1, 1, 2))
        assert torch.equal(now, expected)


def test_a_buffer_that_is_too_small_is_refused() -> None:
    pages = page_set(TOKENS, 0)
    with pytest.raises(ValueError, match=r"buffer of 100 torch\.float32: 4096 torch\.float32 are needed"):
        pack(pages, range(4), BLOCKS, range(4), torch.empty(100))
    with pytest.raises(ValueError, match="float16"):
        unpack(pages, range(2), BLOCKS, range(4), torch.empty(4096, dtype=torch.float16))


@pytest.mark.parametrize(
    ("members", "heads", "message"),
    [(range(5), range(4), "members=.*consecutive ones of 4"), (range(1), range(3, 5), "heads=.*of 4")],
)
def test_ranges_outside_the_pages_are_refused(members: range, heads: range, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(page_set(TOKENS, 0), members, BLOCKS, heads, torch.empty(10_000))


def test_pages_that_differ_are_refused() -> None:
    page = torch.zeros(5, 16, 4, 8)
    with pytest.raises(ValueError, match="page tensor 1: dtype"):
        PageSet.of([page, page.half()], 2)
    with pytest.raises(ValueError, match="page tensor 1: shape"):
        PageSet.of([page, page[:2]], 2)
    with pytest.raises(ValueError, match="page tensor 0: strides"):
        PageSet.of([page.transpose(1, 2)], 2)
