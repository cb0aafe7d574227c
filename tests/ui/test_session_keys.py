"""Keys of findings, recordings, replays, baselines and attaching."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_feed import FakeEngine

from kvtop.draw.findings import key_of
from kvtop.draw.layout import layout
from kvtop.draw.requests import visible_requests
from kvtop.draw.view import Detail, Player, View
from kvtop.model.history import engine_key
from kvtop.model.snapshot import Finding
from kvtop.ui.controller import press
from kvtop.ui.effects import Answer, Play, Record, WriteBlackBox
from kvtop.ui.keys import footer_keys
from kvtop.ui.mouse import click
from kvtop.ui.session_keys import IN_REPLAY, ONLY_REPLAY

SNAP = FakeEngine(engines=2).snapshot()
SIZE = (80, 24)
ROWS = [row.id for row in visible_requests(SNAP, View())]
SECOND = SNAP.engines[1]
REPLAY = View(player=Player(10.0, 0.0, 20.0))


def finding(rule: str, **changes: object) -> Finding:
    plain = Finding(rule, "warning", SNAP.time_s, SNAP.engines[0].pid, f"{rule} holds.")
    return replace(plain, **changes)  # type: ignore[arg-type]


FINDINGS = (
    finding("diagnosis.memory-held-badly"),
    finding("leak.ghost-blocks", block_ids=(3, 5), request_ids=("gone", ROWS[7])),
    finding("leak.zombie-request", engine_pid=SECOND.pid, request_ids=(SECOND.requests[0].id,)),
    finding("gpu.nearly-full", engine_pid=None),
)
FOUND = View(findings=FINDINGS)


def keys(view: View, *names: str, snap=SNAP, size=SIZE) -> View:
    for name in names:
        view, _ = press(view, name, snap, size)
    return view


def effect(view: View, key: str, snap=SNAP):
    return press(view, key, snap, SIZE)[1]


def test_w_lists_what_is_wrong_and_the_cursor_stays_on_its_finding() -> None:
    view = keys(FOUND, "w")
    assert view.dialog.kind == "findings"
    assert keys(view, "down").finding_key == key_of(FINDINGS[1])
    assert keys(view, "end", "down").finding_key == key_of(FINDINGS[-1])
    assert keys(view, "end", "home", "up").finding_key == key_of(FINDINGS[0])
    worse = finding("health.stalled", severity="critical")
    moved = replace(keys(view, "down"), findings=(FINDINGS[0], worse, *FINDINGS[1:]))
    assert keys(moved, "down").finding_key == key_of(FINDINGS[2])
    for close in ("escape", "q", "w"):
        assert keys(view, close).dialog is None


def test_enter_shows_all_of_a_finding_lights_its_blocks_and_goes_to_its_request() -> None:
    view = keys(replace(FOUND, search="nothing has this", detail=Detail("x")), "w", "down", "enter")
    assert (view.dialog.kind, view.dialog.title) == ("finding", "leak.ghost-blocks")
    said = "".join(text for line in view.dialog.lines for text, _ in line)
    assert "ref count" in said
    assert view.lit_blocks == {3, 5}
    assert (view.cursor_id, view.search, view.detail) == (ROWS[7], "", None)
    assert view.scroll["requests"] > 0
    closed = keys(view, "escape")
    assert (closed.dialog, closed.lit_blocks) == (None, {3, 5})
    assert keys(closed, "escape").lit_blocks == frozenset()


def test_a_finding_of_another_engine_shows_that_engine() -> None:
    view = keys(FOUND, "w", "down", "down", "enter")
    assert (view.engine, view.cursor_id) == (1, SECOND.requests[0].id)
    assert keys(FOUND, "w", "end", "enter").engine == 0


def test_a_long_finding_scrolls_to_its_end_and_no_further() -> None:
    long = finding("leak.ghost-blocks", evidence={f"number {n}": "1" for n in range(60)})
    view = keys(replace(View(), findings=(long,)), "w", "enter", "end")
    assert view.scroll["dialog"] > 40
    assert keys(view, "down") == view
    assert keys(view, "escape").scroll["dialog"] == 0


def test_nothing_found_is_no_trouble() -> None:
    view = keys(View(), "w", "down", "pagedown")
    assert view.dialog.kind == "findings"
    assert keys(view, "enter").dialog is None
    unknown = replace(View(), findings=(finding("made.up"),))
    assert keys(unknown, "w", "enter").dialog.lines == ()


def test_a_click_on_the_diagnosis_lists_the_findings() -> None:
    at = layout(*SIZE, FOUND)["diagnosis"]
    assert click(FOUND, (5, at.y), SNAP, SIZE)[0].dialog.kind == "findings"
    replayed = replace(REPLAY, findings=FINDINGS)
    line = layout(*SIZE, replayed)["timeline"]
    assert click(replayed, (5, line.y), SNAP, SIZE) == (replayed, None)


def test_record_and_black_box_are_asked_for() -> None:
    assert effect(View(), "R") == Record()
    assert effect(View(), "B") == WriteBlackBox()


def test_a_marker_needs_a_recording_and_takes_a_note() -> None:
    assert keys(View(), "m").dialog is None
    assert "R" in keys(View(), "m").message
    view = keys(View(recording="REC 1 B"), "m", "h", "i", "space", "m")
    assert view.dialog.kind == "input"
    assert effect(view, "enter") == Answer("marker", "hi m")
    assert effect(view, "escape") is None


@pytest.mark.parametrize("key", ["R", "m", "B", "a"])
def test_a_replay_is_not_recorded_again(key: str) -> None:
    view, what = press(REPLAY, key, SNAP, SIZE)
    assert (view.message, view.dialog, what) == (IN_REPLAY, None, None)


def test_the_controls_of_a_replay() -> None:
    wanted = {
        "space": Play("toggle"),
        "[": Play("slower"),
        "-": Play("slower"),
        "]": Play("faster"),
        "+": Play("faster"),
        ",": Play("step", -1),
        ".": Play("step", 1),
        "n": Play("event", 1),
        "N": Play("event", -1),
        "E": Play("kind"),
    }
    assert {key: effect(REPLAY, key) for key in wanted} == wanted
    assert not keys(REPLAY, "space").paused
    assert effect(keys(REPLAY, ":", "5", "0", "%"), "enter") == Answer("seek", "50%")


@pytest.mark.parametrize("key", ["[", "]", ",", ".", ":", "n", "N", "E"])
def test_live_they_say_what_they_need(key: str) -> None:
    view, what = press(View(), key, SNAP, SIZE)
    assert (view.message, view.dialog, what) == (ONLY_REPLAY, None, None)


def test_a_baseline_is_pinned_and_cleared() -> None:
    view = keys(View(), "b")
    assert view.baseline.time_s == SNAP.time_s
    assert view.baseline.counts[engine_key(SECOND)] == SECOND.blocks
    assert keys(view, "b").baseline is None
    bare = replace(SNAP, engines=tuple(replace(e, pools=()) for e in SNAP.engines))
    assert keys(View(), "b", snap=bare).baseline is None
    assert keys(View(), "b", snap=bare).message
    assert keys(REPLAY, "b").baseline is not None


def test_attaching_asks_first_and_says_what_happens() -> None:
    engine = replace(SNAP.engines[0], probe=None, pools=())
    snap = replace(SNAP, engines=(engine,))
    view = keys(View(), "a", snap=snap)
    assert view.dialog.kind == "confirm"
    said = " ".join(text for line in view.dialog.lines for text, _ in line)
    for word in (str(engine.pid), "kvtop detach", "milliseconds"):
        assert word in said
    assert effect(view, "n", snap) is None
    assert effect(view, "y", snap) == Answer(f"attach {engine.pid}", "")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "already"),
        ({"probe": None, "pid": None}, "not on this machine"),
        ({"probe": None, "alive": False}, "gone"),
    ],
)
def test_where_there_is_nothing_to_attach_it_says_why(changes: dict, word: str) -> None:
    snap = replace(SNAP, engines=(replace(SNAP.engines[0], **changes),))
    view = keys(View(), "a", snap=snap)
    assert view.dialog is None
    assert word in view.message
    assert keys(View(), "a", snap=replace(SNAP, engines=())).message


def test_the_footer_of_a_replay_has_its_controls() -> None:
    live, replayed = dict(footer_keys(View())), dict(footer_keys(REPLAY))
    assert {"R", "w"} <= set(live)
    assert "[" not in live
    assert {"Space", ",", ".", "[", "]", ":", "n"} <= set(replayed)
    assert "R" not in replayed
