"""No size and no snapshot makes a panel raise, or draw one cell too many or too few."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtop.draw import detail, gpu, kv, requests, stacks, status, trend
from kvtop.draw.blockmap import block_map
from kvtop.draw.text import cell_width, line_width
from kvtop.draw.view import Line
from tests.draw import strategies

PANELS = (
    gpu.gpu_panel,
    kv.kv_panel,
    requests.requests_panel,
    detail.detail_panel,
    stacks.stacks_panel,
    trend.trend_panel,
    status.nothing_found,
    status.sources_panel,
)
TITLES = (gpu.title, kv.title, requests.title, detail.title, stacks.title, trend.title)
KEYS = [("F1", "Help"), ("q", "Quit"), ("宽", "wide")]

SLOW = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def _is_clean(line: Line, plain: bool) -> None:
    for text, style in line:
        assert text
        assert isinstance(style, str)
        assert text.isprintable(), repr(text)
        text.encode("ascii" if plain else "utf-8")


@SLOW
@given(st.data(), st.integers(1, 200), st.integers(0, 60))
def test_every_panel_fills_its_space(data: st.DataObject, width: int, height: int) -> None:
    snap = data.draw(strategies.SNAPSHOTS)
    view = data.draw(strategies.views(snap))
    for panel in PANELS:
        lines = panel(snap, view, width, height)
        assert len(lines) == height, panel
        for line in lines:
            assert line_width(line) == width, (panel, line)
            _is_clean(line, view.ascii)
    for title in TITLES:
        text = title(snap, view, width)
        assert cell_width(text) <= width, title
        assert text.isprintable()
    for line in (
        status.header(snap, view, width, True),
        status.footer(snap, view, width, KEYS[:2]),
    ):
        assert line_width(line) == width
        _is_clean(line, view.ascii)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=3000),
    st.integers(0, 120),
    st.integers(0, 40),
    st.frozensets(st.integers(-10, 3100), max_size=50),
    st.booleans(),
)
def test_the_map_fills_its_space(
    states: bytes, width: int, height: int, lit: frozenset[int], plain: bool
) -> None:
    lines = block_map(states, width, height, lit, plain)
    assert [line_width(line) for line in lines] == [width] * height
