from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtop.draw.chart import Curve, chart
from kvtop.draw.view import Line
from tests.draw.golden import exact, styles_of, text_of

TIMES = [1000.0 + second for second in range(60)]


def curve(values: list[float | None], letter: str = "U", style: str = "state.used") -> Curve:
    return Curve("used", letter, style, values)


def canvas(lines: list[Line]) -> list[str]:
    return [text_of(line)[6:] for line in lines[:-1]]


def test_a_flat_line_is_drawn_where_the_value_is() -> None:
    lines = exact(chart(TIMES, [curve([50.0] * 60)], 46, 10, ascii=True, upper=100.0), 46, 10)
    rows = canvas(list(lines))
    assert [row for row in rows[3:6] if "U" in row] == ["U" * 40]
    assert sum("U" in row for row in rows) == 1


def test_nothing_is_drawn_where_nothing_was_read() -> None:
    values: list[float | None] = [10.0] * 20 + [None] * 20 + [10.0] * 20
    lines = chart(TIMES, [curve(values)], 66, 6, ascii=True, upper=20.0)
    row = next(row for row in canvas(lines) if "U" in row)
    assert row[:19].strip() == "U" * 19
    assert row[21:39].strip() == ""
    assert row[41:].strip() != ""


def test_a_pause_of_the_clock_is_a_gap_too() -> None:
    times = [float(second) for second in range(10)] + [100.0 + second for second in range(10)]
    lines = chart(times, [curve([5.0] * 20)], 66, 6, ascii=True, upper=10.0)
    row = next(row for row in canvas(lines) if "U" in row)
    assert row[10:50].strip() == ""


def test_a_single_spike_survives_thinning() -> None:
    times = [float(second) for second in range(5000)]
    values: list[float | None] = [1.0] * 5000
    values[2500] = 100.0
    lines = chart(times, [curve(values)], 46, 8, ascii=True)
    assert "U" in canvas(lines)[0]
    assert text_of(lines[0]).lstrip().startswith("100")


def test_two_curves_keep_their_own_styles() -> None:
    lines = chart(
        TIMES,
        [curve([10.0] * 60), curve([90.0] * 60, "c", "state.cached")],
        46,
        8,
        upper=100.0,
    )
    assert {"state.used", "state.cached", "chart.axis"} <= set().union(*map(styles_of, lines))


def test_fewer_than_two_points_is_not_a_chart() -> None:
    nothing: list[float | None] = [None] * 59
    for values in ([], [*nothing, 1.0], [*nothing, math.nan], [math.inf] * 60):
        lines = chart(TIMES, [curve(values)], 40, 5)
        assert text_of(lines[0]).strip() == "collecting"
    assert text_of(chart([5.0, 5.0], [curve([1.0, 1.0])], 40, 5)[0]).strip() == "collecting"
    assert text_of(chart([], [], 40, 5)[0]).strip() == "collecting"


def test_a_clock_that_jumps_back_leaves_out_what_has_no_place() -> None:
    times = [100.0, 1e15, 90.0, math.nan, 101.0, 102.0, 103.0]
    lines = chart(times, [curve([5.0, 5.0, 5.0, 5.0, None, 5.0, 5.0])], 46, 8, ascii=True)
    row = next(row for row in canvas(lines) if "U" in row)
    assert row[0] == "U"
    assert row[2:20].strip() == ""
    assert row[-1] == "U"


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.floats(), st.none() | st.floats(), st.none() | st.floats()), max_size=30),
    st.integers(1, 120),
    st.integers(1, 30),
    st.booleans(),
    st.none() | st.floats(1, 1e18),
)
def test_no_values_break_a_chart(
    rows: list[tuple[float, float | None, float | None]],
    width: int,
    height: int,
    plain: bool,
    upper: float | None,
) -> None:
    times = [row[0] for row in rows]
    curves = [curve([row[1] for row in rows]), curve([row[2] for row in rows], "c")]
    exact(chart(times, curves, width, height, ascii=plain, upper=upper), width, height)


def test_a_small_space_says_so() -> None:
    assert text_of(chart(TIMES, [curve([1.0] * 60)], 8, 3)[0]) == "no room "
