"""No size and no snapshot makes a panel raise, or draw one cell too many or too few."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtop.draw import detail, findings, gpu, kv, requests, stacks, status, trend
from kvtop.draw.blockmap import block_map
from kvtop.draw.player import timeline_line
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
    findings.findings_panel,
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
        status.header(snap, replace(view, recording="REC 1.2 MiB"), width),
        status.footer(snap, view, width, KEYS[:2]),
        findings.diagnosis_line(snap, view, width),
        *([timeline_line(view.player, width, view.ascii)] if view.player else []),
    ):
        assert line_width(line) == width
        _is_clean(line, view.ascii)
    for line in findings.finding_panel(snap, view, ["What it means.", "宽" * 80], width):
        assert line_width(line) <= width
        _is_clean([run for run in line if run[0]], view.ascii)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=3000),
    st.integers(0, 120),
    st.integers(0, 40),
    st.frozensets(st.integers(-10, 3100), max_size=50),
    st.booleans(),
    st.frozensets(st.integers(-10, 3100), max_size=50),
)
def test_the_map_fills_its_space(
    states: bytes,
    width: int,
    height: int,
    lit: frozenset[int],
    plain: bool,
    found: frozenset[int],
) -> None:
    lines = block_map(states, width, height, lit, plain, found=found)
    for line in lines:
        assert all(text.isprintable() for text, _ in line)
    assert [line_width(line) for line in lines] == [width] * height
