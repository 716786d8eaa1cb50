"""Resharding between any two shapes: everything arrives exactly once, from a rank that has it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from distserve.core.parsing import ConfigError
from distserve.core.shapes import Shape, head_range, layer_range
from distserve.transfer.chunks import message_units, messages, total_units, units
from distserve.transfer.plan import Slice, callers, contacts, plan

DEGREES = st.integers(1, 4)
SHAPES = st.builds(Shape, tp=DEGREES, pp=DEGREES)
LAYERS = st.integers(4, 70)
HEADS = st.integers(1, 17)


def allowed(shape: Shape, heads: int) -> bool:
    return shape.tp <= heads or shape.tp % heads == 0


def cells(layers: range, heads: range) -> list[tuple[int, int]]:
    return [(layer, head) for layer in layers for head in heads]


def held(shape: Shape, rank: int, layers: int, heads: int) -> set[tuple[int, int]]:
    pp_rank, tp_rank = shape.coordinates(rank)
    return set(cells(layer_range(layers, shape.pp, pp_rank), head_range(heads, shape.tp, tp_rank)))


@given(SHAPES, SHAPES, LAYERS, HEADS)
def test_every_cell_arrives_once_from_a_rank_that_holds_it(
    src: Shape, dst: Shape, layers: int, heads: int
) -> None:
    assume(allowed(src, heads) and allowed(dst, heads))
    slices = plan(src, dst, layers, heads)
    for dst_rank in range(dst.ranks):
        arrived = Counter(cell for s in slices if s.dst_rank == dst_rank for cell in cells(s.layers, s.heads))
        assert arrived == Counter(held(dst, dst_rank, layers, heads))
    for s in slices:
        assert set(cells(s.layers, s.heads)) <= held(src, s.src_rank, layers, heads)


@given(SHAPES, SHAPES, LAYERS, HEADS)
def test_every_source_rank_is_called_by_someone(src: Shape, dst: Shape, layers: int, heads: int) -> None:
    assume(allowed(src, heads) and allowed(dst, heads))
    calls = contacts(src, dst, layers, heads)
    assert set(calls) == set(range(dst.ranks))
    assert all(calls.values()), "every destination rank holds something"
    flat = [s for by_source in calls.values() for slices in by_source.values() for s in slices]
    assert sorted(flat, key=repr) == sorted(plan(src, dst, layers, heads), key=repr)
    for src_rank in range(src.ranks):
        who = callers(calls, src_rank)
        assert who
        assert who == {d for d in calls if src_rank in calls[d]}


@given(st.data(), st.integers(1, 4))
def test_replicas_share_the_work(data: st.DataObject, heads: int) -> None:
    """No replica of a head serves two destination ranks more than another one does."""
    degrees = st.sampled_from([tp for tp in range(1, 9) if allowed(Shape(tp), heads)])
    src, dst = Shape(data.draw(degrees)), Shape(data.draw(degrees))
    served: dict[int, Counter[int]] = {}
    for s in plan(src, dst, 4, heads):
        for head in s.heads:
            served.setdefault(head, Counter())[s.src_rank] += 1
    for head, counts in served.items():
        holders = [r for r in range(src.ranks) if head in head_range(heads, src.tp, r)]
        loads = [counts[r] for r in holders]
        assert max(loads) - min(loads) <= 1


def test_the_same_shape_needs_one_slice_per_rank() -> None:
    shape = Shape(2, 2)
    assert plan(shape, shape, 5, 3) == [
        Slice(0, 0, range(0, 3), range(0, 2)),
        Slice(1, 1, range(0, 3), range(2, 3)),
        Slice(2, 2, range(3, 5), range(0, 2)),
        Slice(3, 3, range(3, 5), range(2, 3)),
    ]


@pytest.mark.parametrize(("shape", "heads"), [(Shape(3), 2), (Shape(1, 9), 2)])
def test_a_shape_that_cannot_be_is_refused_by_name(shape: Shape, heads: int) -> None:
    with pytest.raises(ConfigError, match=r"tp=3|pp=9"):
        plan(shape, Shape(), 8, heads)


SLICES = st.lists(
    st.builds(
        lambda first, count, head, heads: Slice(0, 0, range(first, first + count), range(head, head + heads)),
        st.integers(0, 5),
        st.integers(1, 4),
        st.integers(0, 3),
        st.integers(1, 4),
    ),
    max_size=3,
)


@given(SLICES, st.integers(1, 40), st.integers(1, 60))
def test_messages_fit_and_carry_every_block_once(slices: list[Slice], num_blocks: int, limit: int) -> None:
    widest = max((len(s.heads) for s in slices), default=0)
    if widest > limit:
        with pytest.raises(ValueError, match="does not fit"):
            message_units(slices, num_blocks, limit)
        return
    count, size = message_units(slices, num_blocks, limit)
    cut = list(messages(slices, num_blocks, size)) if size else []
    assert len(cut) == count
    assert size <= limit
    assert all(0 < units(message) <= size for message in cut)
    assert sum(units(message) for message in cut) == total_units(slices, num_blocks)
    got = [
        (p.layer, p.part, p.heads, block)
        for message in cut
        for p in message
        for block in range(p.first, p.first + p.count)
    ]
    wanted = [
        (layer, part, s.heads, block)
        for s in slices
        for layer in s.layers
        for part in (0, 1)
        for block in range(num_blocks)
    ]
    assert got == wanted


def test_a_prompt_four_times_the_buffer_is_four_equal_messages() -> None:
    slices = [Slice(0, 0, range(0, 4), range(0, 2))]  # 16 units per block
    count, size = message_units(slices, 40, 160)
    assert (count, size) == (4, 160)
    assert [units(m) for m in messages(slices, 40, size)] == [160] * 4
