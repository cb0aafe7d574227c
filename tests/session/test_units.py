from __future__ import annotations

import pytest

from kvtop.errors import UsageError
from kvtop.session.units import (
    Span,
    parse_duration,
    parse_moment,
    parse_moment_within,
    parse_size,
    span_text,
    utc,
)

SPAN = Span(1_764_453_904.0, 1_764_453_904.0 + 7200)  # 22:05:04 to 00:05:04 UTC


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("10m", 600), ("2h", 7200), ("1h30m", 5400), ("250ms", 0.25), ("5", 5)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "0s", "-5s", "x", "5 m x", "1h30", "nan", "inf", "5y"])
def test_no_durations(text: str) -> None:
    with pytest.raises(UsageError):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"), [("2G", 2 * 1024**3), ("500M", 500 * 1024**2), ("64KiB", 65536), ("9", 9)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "G", "-1M", "1X", "1.2.3M"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "offset"),
    [
        ("0%", 0),
        ("50%", 3600),
        ("+90s", 90),
        ("-30s", 7170),
        ("22:06:04", 60),
        ("22:06", 56),
        ("00:04:04", 7140),
        ("2025-11-29T22:06:04Z", 60),
        ("2025-11-29 23:06:04+01:00", 60),
        ("1764453964", 60),
    ],
)
def test_moments(text: str, offset: float) -> None:
    assert parse_moment(text, SPAN) == pytest.approx(SPAN.first_s + offset)


@pytest.mark.parametrize("text", ["", "101%", "-1%", "25:00", "12:61", "yesterday", "x%", "+", "-"])
def test_no_moments(text: str) -> None:
    with pytest.raises(UsageError):
        parse_moment(text, SPAN)


@pytest.mark.parametrize("text", ["12:00:00", "+3h", "-3h", "2025-11-28T22:06:04Z", "00:05:06"])
def test_moments_outside(text: str) -> None:
    with pytest.raises(UsageError, match="2025-11-29T22:05:04Z to 2025-11-30T00:05:04Z"):
        parse_moment_within(text, SPAN)


def test_a_shown_second_is_not_outside() -> None:
    begun_within_it = Span(SPAN.first_s + 0.4, SPAN.last_s)
    assert parse_moment_within("22:05:04", begun_within_it) == SPAN.first_s
    assert parse_moment_within("50%", SPAN) == SPAN.first_s + 3600


def test_texts() -> None:
    assert utc(SPAN.first_s) == "2025-11-29T22:05:04Z"
    assert utc(float("nan")) == "-"
    assert utc(1e300) == "-"
    assert span_text(3900) == "1h 05m"
