from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtop.draw.dialog import dialog_rect
from kvtop.draw.frame import box, overlay, section
from kvtop.draw.layout import PANELS, Rect
from kvtop.draw.screen import screen
from kvtop.draw.text import cell_width, fit, line_width
from kvtop.draw.view import Detail, Dialog, Line, Mark, Player, View
from kvtop.model.history import History
from kvtop.model.snapshot import Finding

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "ui"))

from fake_feed import FakeEngine

ENGINE = FakeEngine()
ENGINE.step(1.0)
SNAP = ENGINE.snapshot()
HISTORY = History()
HISTORY.append(SNAP)
ENGINE.step(1.0)
HISTORY.append(ENGINE.snapshot())
KEYS = [("h", "help"), ("q", "quit"), ("/", "search")]
EMPTY = replace(SNAP, engines=())

# By name, since hypothesis prints what it draws.
SNAPS = {"full": SNAP, "empty": EMPTY, "none": None}
DETAILS = {"": None, "gone": Detail("gone"), "open": ENGINE.detail(ENGINE.live[0].id)}
DIALOGS = {
    "": None,
    "help": Dialog("help", "Keys", ((("up  one row up", ""),),) * 30),
    "sources": Dialog("sources", "Sources"),
    "confirm": Dialog("confirm", "Really?", ((("It will be gone.", ""),),), "x"),
    "input": Dialog("input", "Name", (), "x", "宽" * 50),
    "findings": Dialog("findings", "What is wrong"),
    "finding": Dialog("finding", "leak.ghost-blocks", ((("宽" * 90, ""),),)),
    "message": Dialog("message", "宽" * 60, ((("a" * 400, ""),),)),
}


FINDING = Finding(
    "leak.ghost-blocks",
    "critical",
    SNAP.time_s,
    SNAP.engines[0].pid,
    "a[/x]b\x1b[2J 宽",
    {"a": "b"},
)
PLAYER = Player(5.0, 0.0, 9.0, marks=(Mark(3.0, "finding", "critical"), Mark(4.0, "marker")))


def text_of(lines: list[Line]) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]


@settings(max_examples=200, deadline=None)
@given(
    width=st.integers(1, 300),
    height=st.integers(1, 100),
    snap=st.sampled_from(sorted(SNAPS)),
    focus=st.sampled_from(PANELS),
    flags=st.fixed_dictionaries(
        {name: st.booleans() for name in ("ascii", "mono", "zoom", "stacks_on", "search_open")}
    ),
    detail=st.sampled_from(sorted(DETAILS)),
    dialog=st.sampled_from(sorted(DIALOGS)),
    history=st.booleans(),
    found=st.booleans(),
    replay=st.booleans(),
)
def test_every_size_is_filled_exactly(
    width, height, snap, focus, flags, detail, dialog, history, found, replay
) -> None:
    view = View(
        focus=focus,
        detail=DETAILS[detail],
        dialog=DIALOGS[dialog],
        history=HISTORY if history else None,
        findings=(FINDING,) if found else (),
        finding=FINDING,
        player=PLAYER if replay else None,
        recording="REC 1.2 MiB" if found else "",
        **flags,
    )
    lines = screen(SNAPS[snap], view, width, height, KEYS)
    assert len(lines) == height
    assert [line_width(line) for line in lines] == [width] * height
    if view.ascii:
        assert all(text.isascii() for text in text_of(lines))
    assert all(text.isprintable() for text in text_of(lines))


def test_no_room_at_all() -> None:
    assert screen(SNAP, View(), 0, 3) == [(), (), ()]
    assert screen(SNAP, View(), 10, 0) == []


def test_an_id_full_of_markup_and_escapes_is_shown_and_nothing_else() -> None:
    engine = SNAP.engines[0]
    nasty = "a[/x]b[/INST]\x1b[2J\r\n\u202e"
    request = replace(engine.requests[0], id=nasty, blocks=10_000)
    snap = replace(SNAP, engines=(replace(engine, requests=(request,), model=nasty),))
    text = "\n".join(text_of(screen(snap, View(), 160, 50)))
    assert "a[/x]b[/INST]\\x1b[2J" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_titles_and_the_focus() -> None:
    lines = screen(SNAP, View(focus="kv"), 160, 50, KEYS)
    styles = {text.strip(): style for line in lines for text, style in line}
    assert next(s for t, s in styles.items() if t.startswith("KV blocks")) == "title.focus"
    assert next(s for t, s in styles.items() if t.startswith("Requests")) == "title"
    # Not by colour alone.
    assert any("━" in text for text in text_of(lines))


def test_at_80x24_the_map_and_the_requests_are_there() -> None:
    lines = text_of(screen(SNAP, View(), 80, 24, KEYS))
    assert sum("▀" in line for line in lines) >= 2
    assert sum("decode" in line or "prefill" in line for line in lines) >= 5
    assert "help" in lines[-1]


def test_without_colour_the_map_is_letters() -> None:
    lines = text_of(screen(SNAP, View(mono=True), 80, 24, KEYS))
    assert not any("▀" in line for line in lines)
    assert any("UUUU" in line for line in lines)
    assert any("│" in line for line in lines)


def test_before_the_first_snapshot_it_claims_nothing() -> None:
    text = "\n".join(text_of(screen(None, View(), 80, 24)))
    assert "Reading" in text
    assert "found" not in text


def test_without_an_engine_it_says_so_and_shows_the_gpu() -> None:
    text = "\n".join(text_of(screen(EMPTY, View(), 80, 24)))
    assert "No vLLM" in text
    assert "GPU 0" in text


@given(
    width=st.integers(1, 200),
    height=st.integers(1, 80),
    dialog=st.sampled_from(list(filter(None, DIALOGS.values()))),
)
def test_a_dialog_stands_inside_the_screen(width: int, height: int, dialog: Dialog) -> None:
    rect = dialog_rect(dialog, width, height)
    assert rect.x >= 0
    assert rect.y >= 0
    assert 1 <= rect.width <= width - rect.x
    assert 1 <= rect.height <= height - rect.y


def test_the_end_of_a_long_input_is_shown() -> None:
    dialog = Dialog("input", "Name", (), "x", "x" * 300 + "END")
    text = "\n".join(text_of(screen(SNAP, View(dialog=dialog), 80, 24)))
    assert "END" in text
    assert "xxx" in text


def test_help_scrolls() -> None:
    dialog = Dialog("help", "Keys", tuple(((f"line {at}", ""),) for at in range(100)))
    text = "\n".join(text_of(screen(SNAP, View(dialog=dialog, scroll={"dialog": 90}), 80, 24)))
    assert "line 99" in text
    assert "line 10 " not in text


@given(
    runs=st.lists(st.tuples(st.text("a宽 ", max_size=6), st.just("ok")), max_size=4),
    bounds=st.tuples(st.integers(0, 24), st.integers(0, 24)),
)
def test_a_section_has_the_cells_of_the_line(runs, bounds) -> None:
    line = fit(runs, 24)
    start, end = min(bounds), max(bounds)
    part = section(line, start, end)
    assert line_width(part) == end - start
    whole = "".join(c if cell_width(c) == 1 else c + "\0" for text, _ in line for c in text)
    got = "".join(c if cell_width(c) == 1 else c + "\0" for text, _ in part for c in text)
    expected = whole[start:end]
    if expected.startswith("\0"):
        expected = " " + expected[1:]
    if expected and cell_width(expected[-1]) == 2:
        expected = expected[:-1] + " "
    assert got == expected


def test_an_overlay_leaves_the_rest_alone() -> None:
    lines = [fit((("0123456789", ""),), 10)] * 3
    out = overlay(lines, Rect(2, 1, 3, 1), [(("abc", "ok"),)], 10)
    assert text_of(out) == ["0123456789", "01abc56789", "0123456789"]


@pytest.mark.parametrize("width", range(9))
@pytest.mark.parametrize("height", range(4))
def test_boxes_of_any_size(width: int, height: int) -> None:
    inside = [fit((), max(width - 2, 0))] * max(height - 2, 0)
    lines = box("a title", inside, width, height, ascii=True, focused=True)
    assert [line_width(line) for line in lines] == [width] * height
