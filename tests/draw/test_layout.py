from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtop.draw.layout import PANELS, Rect, focusable, layout
from kvtop.draw.view import Detail, Player, View
from kvtop.model.snapshot import Finding

FINE = Finding("diagnosis.memory-fine", "info", 0.0, 1, "All is well.")
SIZES = {"width": st.integers(1, 300), "height": st.integers(1, 100)}
VIEWS = st.builds(
    View,
    focus=st.sampled_from(PANELS) | st.just("no such panel"),
    zoom=st.booleans(),
    stacks_on=st.booleans(),
    detail=st.none() | st.just(Detail("r")),
    findings=st.just(()) | st.just((FINE,)),
    player=st.none() | st.just(Player(1.0, 0.0, 2.0)),
)


def cells(rect: Rect) -> set[tuple[int, int]]:
    return {
        (x, y)
        for x in range(rect.x, rect.x + rect.width)
        for y in range(rect.y, rect.y + rect.height)
    }


@given(**SIZES, view=VIEWS, found=st.booleans())
def test_no_size_overlaps_or_leaves_the_screen(
    width: int, height: int, view: View, found: bool
) -> None:
    rects = layout(width, height, view, found)
    seen: set[tuple[int, int]] = set()
    for name, rect in rects.items():
        assert rect.width >= 1, name
        assert rect.height >= 1, name
        assert rect.x >= 0, name
        assert rect.y >= 0, name
        assert rect.x + rect.width <= width, name
        assert rect.y + rect.height <= height, name
        mine = cells(rect)
        assert not mine & seen, name
        seen |= mine
    # Nothing of the screen is left over.
    assert len(seen) == width * height


@given(**SIZES, view=VIEWS)
def test_the_focused_panel_is_on_screen_at_every_size(width: int, height: int, view: View) -> None:
    rects = layout(width, height, view)
    if height < 2:
        assert set(rects) == {"header"}
        return
    focus = view.focus if view.focus in focusable(view) else "requests"
    assert (focus in rects) or (focus == "requests" and "detail" in rects)


@given(
    width=st.integers(80, 300),
    height=st.integers(24, 100),
    stacks=st.booleans(),
    found=st.sampled_from([(), (FINE,)]),
)
def test_from_80x24_on_requests_and_blocks_are_there(
    width: int, height: int, stacks: bool, found: tuple[Finding, ...]
) -> None:
    rects = layout(width, height, View(stacks_on=stacks, findings=found))
    assert {"header", "footer", "kv", "requests", "gpu"} <= set(rects)
    # A line of counts, at least one of the map, two below it.
    assert rects["kv"].height - 2 >= 5
    assert rects["requests"].height - 2 >= 5


@pytest.mark.parametrize("focus", PANELS)
def test_every_panel_can_be_reached_at_80x24(focus: str) -> None:
    rects = layout(80, 24, View(focus=focus))
    assert focus in rects
    assert {"kv", "requests"} <= set(rects)


def test_zoom_gives_one_panel_everything() -> None:
    rects = layout(120, 40, View(focus="kv", zoom=True))
    assert set(rects) == {"header", "kv", "footer"}
    assert rects["kv"] == Rect(0, 1, 120, 38)


def test_a_hidden_panel_gives_its_place_away() -> None:
    assert "stacks" not in layout(160, 50, View(stacks_on=False))
    assert layout(160, 50, View(stacks_on=False))["trend"].width == 160


def test_an_open_request_stands_in_the_place_of_the_list() -> None:
    closed, opened = layout(160, 50, View()), layout(160, 50, View(detail=Detail("r")))
    assert opened["detail"] == closed["requests"]
    assert "requests" not in opened


def test_side_by_side_when_wide() -> None:
    rects = layout(160, 50, View())
    assert rects["gpu"].y == rects["kv"].y
    assert rects["stacks"].y == rects["trend"].y
    assert rects["kv"].width > rects["gpu"].width


def test_the_diagnosis_and_the_timeline_take_a_line_each() -> None:
    view = View(findings=(FINE,), player=Player(1.0, 0.0, 2.0))
    rects = layout(80, 24, view)
    assert rects["diagnosis"] == Rect(0, 1, 80, 1)
    assert rects["timeline"] == Rect(0, 22, 80, 1)
    assert "diagnosis" not in layout(80, 24, view, found=False)
    assert "diagnosis" not in layout(80, 19, view)


def test_nothing_fits_into_nothing() -> None:
    assert layout(0, 24, View()) == {}
    assert layout(80, 0, View()) == {}
