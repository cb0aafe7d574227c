from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtop.draw import numbers

FUNCTIONS = (
    numbers.count,
    numbers.short,
    numbers.size,
    numbers.size_short,
    numbers.gib,
    numbers.percent,
    numbers.duration,
    numbers.rate,
    numbers.clock,
)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_unknown_is_a_dash_and_never_zero(function: object, value: float | None) -> None:
    assert function(value) == "-"  # type: ignore[operator]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0%"), (0.2, "<1%"), (0.5, "<1%"), (34.4, "34%"), (99.6, ">99%"), (100, "100%")],
)
def test_what_is_nearly_nothing_or_all_is_not_drawn_as_such(value: float, text: str) -> None:
    assert numbers.percent(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.0s"),
        (1, "1.0s"),
        (9.96, "10s"),
        (59.6, "1m00s"),
        (185, "3m05s"),
        (7800, "2h10m"),
        (86400 * 3 + 3600 * 4, "3d04h"),
        (86400 * 400, "400d"),
        (-60, "-"),
    ],
)
def test_duration(value: float, text: str) -> None:
    assert numbers.duration(value) == text


@pytest.mark.parametrize(
    ("value", "cells", "text"),
    [
        (20480, 5, "20480"),
        (204800, 5, "205k"),
        (1234567, 5, "1.2M"),
        (999, 2, "##"),
        (10**30, 5, ">1e18"),
        (10**30, 4, "####"),
        (-5, 5, "-5"),
        (1500, 4, "1500"),
    ],
)
def test_short_numbers(value: int, cells: int, text: str) -> None:
    assert numbers.short(value, cells) == text


def test_bytes() -> None:
    assert numbers.size(int(2.5 * 2**30)) == "2.5 GiB"
    assert numbers.size(1023) == "1023 B"
    assert numbers.size_short(64 * 2**20) == "64.0M"
    assert numbers.gib(int(68.1 * 2**30)) == "68.1"


def test_rates() -> None:
    assert numbers.rate(0) == "0.0/s"
    assert numbers.rate(0.01) == "<0.1/s"
    assert numbers.rate(2752) == "2,752/s"


@given(st.integers(-(10**400), 10**400) | st.floats(), st.integers(0, 12))
def test_no_number_is_wider_than_its_place(value: float, cells: int) -> None:
    assert len(numbers.short(value, cells)) <= cells
    assert len(numbers.size_short(value, cells)) <= cells
    for function in FUNCTIONS:
        assert function(value)
