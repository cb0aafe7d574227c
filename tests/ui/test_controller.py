from __future__ import annotations

from dataclasses import replace

import pytest
from fake_feed import FakeEngine

from kvtop.draw.layout import PANELS, layout
from kvtop.draw.requests import COLUMNS, visible_requests
from kvtop.draw.view import Detail, Dialog, View
from kvtop.ui.controller import INTERVALS_S, MAX_SEARCH, press
from kvtop.ui.effects import (
    Answer,
    FetchDetail,
    Quit,
    Redraw,
    SetInterval,
    SetStacks,
    Suspend,
)
from kvtop.ui.keys import KEYS
from kvtop.ui.mouse import click, wheel
from kvtop.ui.moves import Here, settle

ENGINE = FakeEngine(engines=2)
SNAP = ENGINE.snapshot()
SIZE = (80, 24)


def keys(view: View, *names: str, snap=SNAP, size=SIZE) -> View:
    for name in names:
        view, _ = press(view, name, snap, size)
    return view


def effect(view: View, key: str, snap=SNAP):
    return press(view, key, snap, SIZE)[1]


ROWS = [row.id for row in visible_requests(SNAP, View())]


@pytest.mark.parametrize("key", ["q", "f10", "ctrl+c"])
def test_quit(key: str) -> None:
    assert effect(View(), key) == Quit()


def test_ctrl_c_and_f10_leave_from_everywhere() -> None:
    for view in (View(search_open=True), View(dialog=Dialog("input", "x", action="y"))):
        assert effect(view, "ctrl+c") == Quit()
        assert effect(view, "f10") == Quit()
        assert effect(view, "q") is None


def test_suspend_and_redraw() -> None:
    assert effect(View(), "ctrl+z") == Suspend()
    assert effect(View(), "ctrl+l") == Redraw()


@pytest.mark.parametrize("key", ["h", "?", "f1"])
def test_help_opens_and_closes(key: str) -> None:
    opened = keys(View(), key)
    assert opened.dialog is not None
    assert opened.dialog.kind == "help"
    for close in ("escape", "q", key, "enter"):
        assert keys(opened, close).dialog is None


def test_keys_do_nothing_behind_a_dialog() -> None:
    opened = keys(View(), "h")
    assert keys(opened, "tab", "t", "I", "/", "e") == opened


def test_tab_goes_round_both_ways() -> None:
    view, seen = View(), []
    for _ in PANELS:
        view = keys(view, "tab")
        seen.append(view.focus)
    assert sorted(seen) == sorted(PANELS)
    assert view.focus == "requests"
    assert keys(View(), "tab", "shift+tab").focus == "requests"
    assert "stacks" not in {keys(View(stacks_on=False), *["tab"] * n).focus for n in range(6)}


def test_the_cursor_moves_by_rows_pages_and_to_the_ends() -> None:
    assert keys(View(), "down").cursor_id == ROWS[1]
    assert keys(View(), "down", "down", "up").cursor_id == ROWS[1]
    assert keys(View(), "up").cursor_id == ROWS[0]
    assert keys(View(), "end").cursor_id == ROWS[-1]
    assert keys(View(), "end", "home").cursor_id == ROWS[0]
    page = layout(*SIZE, View())["requests"].height - 3
    assert page >= 5
    assert keys(View(), "pagedown").cursor_id == ROWS[page - 1]
    assert keys(View(), "pagedown", "pagedown", "pageup").cursor_id == ROWS[page - 1]


def test_the_list_scrolls_no_further_than_it_must() -> None:
    rows = layout(*SIZE, View())["requests"].height - 3
    bottom = keys(View(), *["down"] * (rows - 1))
    assert bottom.scroll.get("requests", 0) == 0
    below = keys(bottom, "down")
    assert below.scroll["requests"] == 1
    # Going up again leaves the list where it is until the cursor reaches its top.
    assert keys(below, "up", "up").scroll["requests"] == 1


def test_an_empty_list_takes_no_cursor() -> None:
    snap = replace(SNAP, engines=(replace(SNAP.engines[0], requests=()),))
    view = View()
    assert keys(view, "down", "end", "pageup", snap=snap) == view
    opened, what = press(view, "enter", snap, SIZE)
    assert what is None
    assert opened.detail is None
    assert opened.message


def test_nothing_shown_yet_takes_every_key() -> None:
    for binding in KEYS:
        for key in binding.keys:
            press(View(), key, None, SIZE)
            press(View(), key, replace(SNAP, engines=(), gpus=()), (1, 1))


def test_enter_opens_the_request_under_the_cursor_and_escape_closes_it() -> None:
    view = keys(View(), "down", "down")
    opened, what = press(view, "enter", SNAP, SIZE)
    assert what == FetchDetail(SNAP.engines[0], ROWS[2])
    assert opened.detail == Detail(ROWS[2])
    lit = replace(opened, lit_blocks=frozenset({1, 2}))
    closed = keys(lit, "escape")
    assert closed.detail is None
    assert closed.lit_blocks == frozenset()
    assert closed.cursor_id == ROWS[2]


def test_enter_asks_the_engine_on_screen() -> None:
    what = effect(keys(View(), "e"), "enter")
    assert isinstance(what, FetchDetail)
    assert what.engine == SNAP.engines[1]


def test_an_open_request_scrolls_and_the_cursor_stays() -> None:
    request = max(ENGINE.live, key=lambda one: len(one.blocks))
    view = View(detail=ENGINE.detail(request.id), cursor_id=request.id)
    # Scattered blocks take a line each.
    blocks = tuple(range(2, 200, 2))
    view = replace(view, detail=replace(view.detail, tables=((0, 16, blocks),), refs=((1,) * 99,)))
    down = keys(view, "down", "pagedown")
    assert down.scroll["detail"] > 1
    assert down.cursor_id == request.id
    end = keys(view, "end")
    assert keys(end, "down") == end
    assert keys(end, "home").scroll["detail"] == 0


def test_enter_and_z_zoom_other_panels() -> None:
    view = View(focus="kv")
    assert keys(view, "enter").zoom
    assert keys(view, "z").zoom
    assert not keys(view, "z", "z").zoom
    assert not keys(view, "z", "escape").zoom


def test_escape_closes_one_thing_at_a_time() -> None:
    view = View(search="x", detail=Detail("r"), zoom=True)
    view = keys(view, "escape")
    assert (view.zoom, view.detail is None, view.search) == (False, False, "x")
    view = keys(view, "escape")
    assert (view.detail is None, view.search) == (True, "x")
    assert keys(view, "escape").search == ""


def test_search_narrows_while_it_is_typed() -> None:
    view = keys(View(), "/", "w", "a", "i", "t", "q")
    assert view.search == "waitq"
    view = keys(view, "backspace")
    assert view.search == "wait"
    assert view.search_open
    assert all("waiting" in row.id for row in visible_requests(SNAP, view))
    kept = keys(view, "enter")
    assert (kept.search, kept.search_open) == ("wait", False)
    gone = keys(view, "escape")
    assert (gone.search, gone.search_open) == ("", False)


def test_search_takes_any_text_and_not_too_much() -> None:
    view = keys(View(), "/")
    view, _ = press(view, "left_square_bracket", SNAP, SIZE, "[")
    view, _ = press(view, "x", SNAP, SIZE, "宽")
    view = keys(view, "space", "tab", "f5", "up")
    assert view.search == "[宽 "
    assert len(keys(view, *["x"] * (MAX_SEARCH + 50)).search) == MAX_SEARCH
    assert keys(view, "ctrl+u").search == ""


def test_sorting() -> None:
    seen = []
    view = View()
    for _ in COLUMNS:
        view = keys(view, "f6")
        seen.append(view.sort)
    assert sorted(seen) == sorted(COLUMNS)
    assert view.sort == View().sort
    assert keys(View(), ">", "<").sort == View().sort
    assert keys(View(), "I").reverse is False
    assert keys(View(), "I", "I").reverse is True


def test_pause() -> None:
    assert keys(View(), "space").paused
    assert not keys(View(), "space", "space").paused


def test_the_interval_goes_in_steps_and_stops_at_the_ends() -> None:
    view, asked = View(), []
    for _ in range(8):
        view, what = press(view, "+", SNAP, SIZE)
        if what is not None:
            assert isinstance(what, SetInterval)
            asked.append(what.seconds)
    assert asked == [0.5, 0.25]
    assert view.interval_s == INTERVALS_S[0]
    assert effect(view, "+") is None
    for _ in range(8):
        view = keys(view, "-")
    assert view.interval_s == INTERVALS_S[-1] == 10.0
    # An interval of the command line that is no step.
    assert effect(View(interval_s=3.0), "+") == SetInterval(2.0)
    assert effect(View(interval_s=60.0), "+") == SetInterval(10.0)
    assert effect(View(interval_s=60.0), "-") is None


def test_the_next_engine_begins_afresh() -> None:
    view = View(cursor_id="x", detail=Detail("x"), lit_blocks=frozenset({1}), scroll={"kv": 3})
    view = keys(view, "e")
    assert view.engine == 1
    assert (view.cursor_id, view.detail, view.lit_blocks, view.scroll) == (
        None,
        None,
        frozenset(),
        {},
    )
    assert keys(view, "e").engine == 0
    alone = replace(SNAP, engines=SNAP.engines[:1])
    assert keys(View(), "e", snap=alone).engine == 0
    assert keys(View(), "e", snap=alone).message


def test_the_next_gpu() -> None:
    assert keys(View(), "g").gpu == 1
    assert keys(View(), "g", "g").gpu == 0


def test_hidden_frames_are_not_sampled_and_lose_the_focus() -> None:
    hidden, what = press(View(focus="stacks"), "t", SNAP, SIZE)
    assert what == SetStacks(False)
    assert (hidden.stacks_on, hidden.focus) == (False, "requests")
    assert effect(hidden, "t") == SetStacks(True)


def test_sources_scroll_to_their_end_and_no_further() -> None:
    many = replace(SNAP, sources=SNAP.sources * 20)
    view = keys(View(), "s", snap=many)
    assert view.dialog is not None
    assert view.dialog.kind == "sources"
    end = keys(view, "end", snap=many)
    assert end.scroll["sources"] > 50
    assert keys(end, "down", snap=many) == end
    assert keys(end, "up", snap=many).scroll["sources"] == end.scroll["sources"] - 1
    assert keys(end, "escape", snap=many).scroll["sources"] == 0


def test_a_message_goes_with_the_next_key() -> None:
    view = keys(View(), "I")
    assert view.message
    assert keys(view, "down").message == ""


def test_questions() -> None:
    view = View(dialog=Dialog("confirm", "Detach?", action="detach"))
    for yes in ("y", "enter"):
        answered, what = press(view, yes, SNAP, SIZE)
        assert what == Answer("detach", "")
        assert answered.dialog is None
    for no in ("n", "escape", "q"):
        answered, what = press(view, no, SNAP, SIZE)
        assert what is None
        assert answered.dialog is None
    assert press(view, "x", SNAP, SIZE) == (view, None)


def test_a_line_of_input() -> None:
    view = View(dialog=Dialog("input", "File", action="record", value="a"))
    view = keys(view, "b", "space", "q", "backspace")
    answered, what = press(view, "enter", SNAP, SIZE)
    assert what == Answer("record", "ab ")
    assert answered.dialog is None
    assert press(view, "escape", SNAP, SIZE)[1] is None
    assert keys(view, "escape").dialog is None


def test_the_cursor_follows_its_request_and_stays_on_the_row_of_one_that_left() -> None:
    view = keys(View(), *["down"] * 4)
    engine = SNAP.engines[0]
    moved = tuple(replace(row, blocks=0) if row.id == ROWS[4] else row for row in engine.requests)
    here = Here(replace(SNAP, engines=(replace(engine, requests=moved),)), SIZE)
    followed = settle(view, SNAP, here)
    assert followed.cursor_id == ROWS[4]
    assert followed.scroll["requests"] > 0
    left = tuple(row for row in engine.requests if row.id != ROWS[4])
    here = Here(replace(SNAP, engines=(replace(engine, requests=left),)), SIZE)
    assert settle(view, SNAP, here).cursor_id == ROWS[5]
    nobody = Here(replace(SNAP, engines=(replace(engine, requests=()),)), SIZE)
    assert settle(view, SNAP, nobody).cursor_id == ROWS[4]


def test_a_click_focuses_selects_opens_and_sorts() -> None:
    rects = layout(*SIZE, View())
    kv, requests = rects["kv"], rects["requests"]
    assert click(View(), (5, kv.y + 1), SNAP, SIZE)[0].focus == "kv"
    row = (5, requests.y + 2 + 3)
    selected, what = click(View(focus="kv"), row, SNAP, SIZE)
    assert (selected.focus, selected.cursor_id, what) == ("requests", ROWS[3], None)
    opened, what = click(selected, row, SNAP, SIZE)
    assert what == FetchDetail(SNAP.engines[0], ROWS[3])
    assert opened.detail is not None
    sorted_by, _ = click(View(), (1, requests.y + 1), SNAP, SIZE)
    assert sorted_by.sort == "ID"
    for at in ((0, 0), (0, SIZE[1] - 1), (5000, 5000)):
        assert click(View(), at, SNAP, SIZE) == (View(), None)


def test_the_wheel_moves_what_is_under_it() -> None:
    requests = layout(*SIZE, View())["requests"]
    down, _ = wheel(View(focus="kv"), (5, requests.y + 3), 1, SNAP, SIZE)
    assert (down.cursor_id, down.focus) == (ROWS[3], "kv")
    up, _ = wheel(down, (5, requests.y + 3), -1, SNAP, SIZE)
    assert up.cursor_id == ROWS[0]
    helped = keys(View(), "h")
    assert wheel(helped, (5, 5), 1, SNAP, SIZE)[0].scroll["dialog"] == 3
