"""Every delta is the inverse of its application, and damaged ones raise ValueError."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtop.session import delta

LEAF = st.none() | st.integers() | st.text(max_size=3)
TREE = st.recursive(
    LEAF,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abc+-0"), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(TREE, TREE)
def test_trees(old: Any, new: Any) -> None:
    change = json.loads(json.dumps(delta.tree_delta(old, new)))
    assert delta.tree_apply(copy.deepcopy(old), change) == new


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=2000), st.data())
def test_columns(old: bytes, data: st.DataObject) -> None:
    new = bytearray(old)
    for place in data.draw(st.lists(st.integers(0, max(0, len(old) - 1)), max_size=20)):
        if old:
            new[place] = data.draw(st.integers(0, 255))
    gaps, values = delta.column_delta(old, bytes(new))
    assert delta.column_apply(old, gaps, values) == bytes(new)


def test_columns_with_long_gaps() -> None:
    old = bytes(100_000)
    new = bytearray(old)
    for place in (0, 254, 255, 509, 510, 70_000, 99_999):
        new[place] = 7
    gaps, values = delta.column_delta(old, bytes(new))
    assert delta.column_apply(old, gaps, values) == bytes(new)


ROW = st.tuples(st.none() | st.integers(-100, 100), st.none() | st.sampled_from(["x", "yy"]))
TABLE = st.dictionaries(st.integers(0, 40), ROW, max_size=30).map(
    lambda rows: [[key, *row] for key, row in rows.items()]
)


@settings(max_examples=200, deadline=None)
@given(TABLE, TABLE)
def test_rows(old: delta.Table, new: delta.Table) -> None:
    change = json.loads(json.dumps(delta.rows_delta(old, new)))
    assert delta.rows_apply(old, change) == new


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-500, 500), min_size=1, max_size=60), st.integers(-40, 40))
def test_rows_that_all_move(values: list[int], step: int) -> None:
    old = [[index, value] for index, value in enumerate(values)]
    new = [[index, value + step + index % 3] for index, value in enumerate(values)]
    change = json.loads(json.dumps(delta.rows_delta(old, new)))
    assert delta.rows_apply(old, change) == new


@pytest.mark.parametrize(
    ("old", "change"),
    [
        (1, {"a": [1]}),
        ([1], {"5": [1]}),
        ([1], {"-": 7}),
        ([1], {"-": "x"}),
        ([1], {"+": 3}),
        ([1], {"x": [1]}),
        ({}, [1, 2]),
        ({}, 3),
        ({"a": 1}, {"a": {"b": [1]}}),
    ],
)
def test_damaged_trees(old: Any, change: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        delta.tree_apply(old, change)


@pytest.mark.parametrize(
    ("gaps", "values"),
    [
        (b"\x01", b""),
        (b"", b"\x01"),
        (b"\x09", b"\x01"),
        (b"\x00", b"\x01"),
        (b"\xff\x00", b"\x01"),
        (b"\xff\xff\xff\xff\xff", b"\x01"),
    ],
)
def test_damaged_columns(gaps: bytes, values: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        delta.column_apply(bytes(5), gaps, values)


@pytest.mark.parametrize(
    "change",
    [
        {"r": 3},
        {"o": [0, 0]},
        {"o": [0]},
        {"c": {"9": [1, 1]}},
        {"c": {"1": [1]}},
        {"c": {"x": [1, 1]}},
        {"c": {"1": [1, "ab@"]}},
        {"s": [[9, 1, 1]]},
        {"s": [[0, "q", 1]]},
        {"s": [1]},
        {"a": [[1], [2, 3]]},
        {"c": 1},
    ],
)
def test_damaged_rows(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        delta.rows_apply([[1, 2], [3, 4]], change)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=64))
def test_anything_else_is_not_a_stream(data: bytes) -> None:
    try:
        delta.inflate_raw(data, limit=1000)
    except ValueError:
        return


def test_deflate_with_the_help_of_the_last() -> None:
    before, now = b'{"time_s":[1.25]}' * 4000, b'{"time_s":[2.25]}' * 4000
    packed = delta.deflate(now, before)
    assert delta.inflate_raw(packed, before) == now
    with pytest.raises(ValueError, match=r"\w"):
        delta.inflate_raw(delta.deflate(b"abcdefgh" * 9, b"abcdefgh" * 9), b"")
    with pytest.raises(ValueError, match=r"\w"):
        delta.inflate_raw(delta.deflate(bytes(2000)), limit=1999)
