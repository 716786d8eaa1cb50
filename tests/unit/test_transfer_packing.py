"""Packing against its plain twin, in both page layouts and all dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distserve.transfer.chunks import Piece
from distserve.transfer.packing import Packer, runs

LAYERS, HEADS, DIM, SIZE, BLOCKS = 3, 4, 8, 2, 9
FIRST_LAYER, FIRST_HEAD = 5, 2
MESSAGE = [
    Piece(5, 0, range(2, 6), 0, 4),
    Piece(5, 1, range(3, 5), 1, 3),
    Piece(7, 1, range(5, 6), 2, 1),
    Piece(6, 0, range(2, 3), 0, 5),
]
ORDER = torch.tensor([7, 0, 3, 8, 2])


class Pages:
    def __init__(self, head_axis: int, dtype: torch.dtype, fill: bool) -> None:
        self.num_blocks = BLOCKS
        self.kv_head_axis = head_axis
        self.num_layers = LAYERS
        k_size, v_size = [BLOCKS, DIM, SIZE], [BLOCKS, SIZE, DIM]
        k_size.insert(head_axis, HEADS)
        v_size.insert(head_axis, HEADS)
        make = torch.randn if fill else torch.zeros
        self._pages = [(make(k_size).to(dtype), make(v_size).to(dtype)) for _ in range(LAYERS)]

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._pages[layer]


def twin(pages: Pages, message: list[Piece], order: Tensor) -> list[tuple[int, int, int, int]]:
    """(layer, part, block id, head), local, block by block with all its heads."""
    return [
        (p.layer - FIRST_LAYER, p.part, int(order[p.first + i]), head - FIRST_HEAD)
        for p in message
        for i in range(p.count)
        for head in p.heads
    ]


@pytest.mark.parametrize("one_launch", [None, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_axis", [1, 2])
def test_pack_and_unpack_equal_their_twins(
    head_axis: int, dtype: torch.dtype, one_launch: bool | None
) -> None:
    source, target = Pages(head_axis, dtype, fill=True), Pages(head_axis, dtype, fill=False)
    packer = Packer(source, FIRST_LAYER, FIRST_HEAD, one_launch)
    assert packer.unit == DIM * SIZE
    cells = twin(source, MESSAGE, ORDER)
    buffer = torch.full((len(cells) * packer.unit + 5,), -1.0, dtype=dtype)
    filled = packer.pack(MESSAGE, ORDER, buffer)
    assert filled.numel() == len(cells) * packer.unit
    assert (buffer[filled.numel() :] == -1).all()
    whole_blocks = []
    for p in MESSAGE:
        heads = source.pages(p.layer - FIRST_LAYER)[p.part].narrow(
            head_axis, p.heads.start - FIRST_HEAD, len(p.heads)
        )
        whole_blocks += [heads[int(ORDER[p.first + i])].reshape(-1) for i in range(p.count)]
    expected = torch.cat(whole_blocks)
    assert torch.equal(filled, expected)

    back = torch.tensor([1, 4, 6, 5, 0])  # other blocks at the destination
    Packer(target, FIRST_LAYER, FIRST_HEAD, one_launch).unpack(MESSAGE, back, buffer)
    touched = set()
    for (layer, part, block, head), (_, _, dst, _) in zip(cells, twin(target, MESSAGE, back), strict=True):
        want = source.pages(layer)[part][block].select(head_axis - 1, head)
        got = target.pages(layer)[part][dst].select(head_axis - 1, head)
        assert torch.equal(got, want)
        touched.add((layer, part, dst, head))
    for layer in range(LAYERS):
        for part in (0, 1):
            for block in range(BLOCKS):
                for head in range(HEADS):
                    if (layer, part, block, head) not in touched:
                        assert not target.pages(layer)[part][block].select(head_axis - 1, head).any()


def test_a_whole_page_and_a_single_head_of_one_block() -> None:
    source = Pages(1, torch.float32, fill=True)
    packer = Packer(source, 0, 0)
    buffer = torch.zeros(LAYERS * BLOCKS * HEADS * packer.unit)
    everything = [Piece(0, 0, range(HEADS), 0, BLOCKS)]
    order = torch.arange(BLOCKS)
    assert torch.equal(packer.pack(everything, order, buffer), source.pages(0)[0].reshape(-1))
    one = [Piece(1, 1, range(3, 4), 4, 1)]
    assert torch.equal(packer.pack(one, order, buffer), source.pages(1)[1][4, 3].reshape(-1))


@pytest.mark.parametrize("other", [(range(2, 4), 1, 3), (range(3, 5), 0, 3), (range(3, 5), 1, 2)])
def test_a_run_has_one_range_of_blocks_and_heads(other: tuple[range, int, int]) -> None:
    message = [Piece(5, 0, range(3, 5), 1, 3), Piece(5, 1, *other)]
    assert list(runs(message, FIRST_LAYER)) == [(message[0], range(0, 1)), (message[1], range(1, 2))]


def test_one_launch_copies_what_piece_by_piece_does() -> None:
    source, target = Pages(2, torch.bfloat16, fill=True), Pages(2, torch.bfloat16, fill=False)
    for pages in (source, target):  # as on a GPU: K and V of one shape
        pages._pages = [(v.clone(), v) for _, v in pages._pages]
    heads = range(3, 5)
    message = [Piece(layer, part, heads, 1, 3) for layer in (5, 6, 7) for part in (0, 1)]
    message += [Piece(5, 0, heads, 0, 1), *MESSAGE]
    found = list(runs(message, FIRST_LAYER))
    assert [members for _, members in found][:2] == [range(0, 6), range(0, 1)]
    assert sum(len(members) for _, members in found) == len(message)
    size = sum(p.count * len(p.heads) for p in message) * DIM * SIZE
    by_piece, at_once = torch.zeros(size, dtype=torch.bfloat16), torch.zeros(size, dtype=torch.bfloat16)
    plain = Packer(source, FIRST_LAYER, FIRST_HEAD, one_launch=False)
    whole = Packer(source, FIRST_LAYER, FIRST_HEAD, one_launch=True)
    assert torch.equal(plain.pack(message, ORDER, by_piece), whole.pack(message, ORDER, at_once))
    assert by_piece.any()
    back = torch.tensor([1, 4, 6, 5, 0])
    Packer(target, FIRST_LAYER, FIRST_HEAD, one_launch=True).unpack(message, back, at_once)
    again = torch.zeros_like(at_once)
    Packer(target, FIRST_LAYER, FIRST_HEAD, one_launch=False).pack(message, back, again)
    assert torch.equal(again, at_once)
