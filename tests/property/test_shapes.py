"""Which rank holds which layers and heads."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from distserve.core.parsing import ConfigError
from distserve.core.shapes import Shape, head_range, layer_range, query_head_range, split_range


@given(st.integers(0, 300), st.integers(1, 16))
def test_split_covers_everything_once_and_evenly(total: int, parts: int) -> None:
    ranges = [split_range(total, parts, i) for i in range(parts)]
    assert [x for r in ranges for x in r] == list(range(total))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 16))
def test_query_heads_are_covered_once_and_stay_with_their_kv_head(kv: int, group: int, tp: int) -> None:
    assume(tp <= kv or (tp % kv == 0 and group >= tp // kv))
    seen: list[int] = []
    for rank in range(tp):
        queries, heads = query_head_range(kv * group, kv, tp, rank), head_range(kv, tp, rank)
        assert {q // group for q in queries} == set(heads)
        seen += queries
    assert seen == list(range(kv * group))


def test_degrees_that_do_not_fit_are_refused_with_the_allowed_ones() -> None:
    with pytest.raises(ConfigError, match="tp=6: with 4 KV heads allowed are 1 to 4 and multiples of 4"):
        head_range(4, 6, 0)
    with pytest.raises(ConfigError, match="pp=3: the model has 2 layers"):
        layer_range(2, 3, 0)


@given(st.integers(1, 8), st.integers(1, 8))
def test_ranks_and_coordinates_are_inverse(tp: int, pp: int) -> None:
    shape = Shape(tp, pp)
    ranks = [shape.rank(p, t) for p in range(pp) for t in range(tp)]
    assert ranks == list(range(shape.ranks))
    assert [shape.rank(*shape.coordinates(rank)) for rank in ranks] == ranks
