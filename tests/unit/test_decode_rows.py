"""Batch buckets and the rows of static decode buffers: arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.worker.buckets import CONTEXTS, batch_buckets, bucket_of, table_widths
from distserve.worker.decode_rows import DecodeRows
from distserve.worker.step import LAST_SAMPLED, StepItem

WIDTH = 6


@given(st.integers(1, 2000))
def test_buckets_are_sorted_unique_and_end_at_the_largest_batch(most: int) -> None:
    buckets = batch_buckets(most)
    assert list(buckets) == sorted(set(buckets))
    assert buckets[0] == 1
    assert buckets[-1] == most
    for batch in {1, most, most // 2 or 1, most // 3 or 1}:
        bucket = bucket_of(batch, buckets)
        assert batch <= bucket <= max(batch + 7, 4, 1.5 * batch)
    with pytest.raises(ValueError, match=rf"must be in \[1, {most}\]"):
        bucket_of(most + 1, buckets)
    with pytest.raises(ValueError, match="size=0"):
        bucket_of(0, buckets)


@given(st.integers(1, 20000), st.sampled_from([1, 16, 256, 5000]))
def test_widths_end_at_the_longest_context(width: int, block_size: int) -> None:
    widths = table_widths(width, block_size)
    assert list(widths) == sorted(set(widths))
    assert widths[-1] == width
    assert all(w * block_size in CONTEXTS or w == width for w in widths if block_size != 5000)


class Device:
    """What the static buffers hold."""

    def __init__(self, rows: int) -> None:
        self.table = np.full(rows * WIDTH, -1)
        self.sampled = np.full(rows, -7)


@given(st.lists(st.lists(st.integers(0, 9), unique=True, min_size=1, max_size=6), max_size=25), st.data())
def test_every_sequence_finds_its_blocks_and_its_token(steps: list[list[int]], data: st.DataObject) -> None:
    """Sequences come, go, wait and start again with other blocks, in any order."""
    most = 6
    buckets = batch_buckets(most)
    rows, device = DecodeRows(WIDTH), Device(most)
    tables: dict[int, list[int]] = {}
    starts: dict[int, int] = {}
    last: dict[int, int] = {}
    before: set[int] = set()
    fresh = 0
    for step in steps:
        items = []
        for key in step:
            again = key in tables and data.draw(st.integers(0, 9)) == 0
            if key not in tables or again or len(tables[key]) == WIDTH:
                fresh += 10
                tables[key], starts[key] = [fresh, fresh + 1], starts.get(key, 0) + 2
                token = key
            else:
                starts[key] += 1
                if data.draw(st.booleans()):
                    fresh += 1
                    tables[key].append(fresh)
                known = key not in before or data.draw(st.booleans())
                token = last[key] if known else LAST_SAMPLED
            items.append(StepItem(str(key), [token], starts[key], list(tables[key])))
        bucket = bucket_of(len(items), buckets)
        told = rows.seat(items, bucket)
        assert told.inputs.shape == (3, bucket)
        assert len(set(told.rows.tolist())) == len(items)
        device.table[told.places[0]] = told.places[1]
        ids, positions, source = told.inputs
        ids = np.where(source >= 0, device.sampled[source], ids)
        for key, item, row in zip(step, items, told.rows.tolist(), strict=True):
            assert row < bucket
            found = device.table[row * WIDTH : row * WIDTH + len(item.block_table)]
            assert found.tolist() == item.block_table
            assert positions[row] == item.start
            assert ids[row] == (item.tokens[0] if item.tokens != [LAST_SAMPLED] else last[key])
        assert (np.delete(positions, told.rows) == -1).all()
        for key, row in zip(step, told.rows.tolist(), strict=True):
            last[key] = device.sampled[row] = 1000 * key + starts[key]
        before = set(step)


def test_of_an_unchanged_batch_only_new_blocks_travel() -> None:
    rows = DecodeRows(WIDTH)
    tables = {"a": [4, 5], "b": [7], "c": [9]}
    for start in (31, 32):
        told = rows.seat([StepItem(k, [1], start, t) for k, t in tables.items()], 4)
    assert told.places.tolist() == [[], []]
    tables["b"].append(8)
    told = rows.seat([StepItem(k, [1], 33, tables[k]) for k in "cba"], 4)
    assert told.rows.tolist() == [2, 1, 0]
    assert told.places.tolist() == [[WIDTH + 1], [8]]
    told = rows.seat([StepItem("c", [LAST_SAMPLED], 34, tables["c"])], 1)  # moves to the only row there is
    assert told.rows.tolist() == [0]
    assert told.inputs[:, 0].tolist() == [0, 34, 2]


def test_a_token_that_nobody_has_sampled_is_refused() -> None:
    rows = DecodeRows(WIDTH)
    rows.seat([StepItem("a", [1], 3, [0])], 1)
    with pytest.raises(ValueError, match="sequence b: the step before did not sample"):
        rows.seat([StepItem("a", [1], 4, [0]), StepItem("b", [LAST_SAMPLED], 4, [1])], 2)
