from __future__ import annotations

from dataclasses import replace

import pytest
from fake_feed import FakeEngine

from kvtop.draw.icicle import IcicleView, icicle
from kvtop.draw.view import Player, View
from kvtop.flame.folded import parse
from kvtop.flame.tree import build
from kvtop.ui import effects
from kvtop.ui.controller import press as press_main
from kvtop.ui.flame_keys import Shape, Viewer, click, press, wheel
from kvtop.ui.flame_screen import make_viewer

FOLDED = parse(
    'process 1:"x";thread (1): Main;a (f.py:1);b (f.py:2) 60\n'
    'process 1:"x";thread (1): Main;a (f.py:1);c (f.py:3) 30\n'
    'process 1:"x";thread (2): Out;wait (threading.py:3) 9\n'
    'process 1:"x";thread (2): Out;rare (f.py:9);tiny (f.py:8) 1\n'
)
SIZE = (80, 14)


@pytest.fixture
def viewer() -> Viewer:
    return Viewer(build(FOLDED), IcicleView())


def keys(viewer: Viewer, *names: str) -> Viewer:
    for name in names:
        after = press(viewer, name, SIZE, threads=["1 Main", "1 Out"])
        assert after is not None
        icicle(after.tree, after.view, *SIZE)
        viewer = after
    return viewer


def at(viewer: Viewer) -> str:
    return viewer.tree.name(viewer.view.cursor)


def test_arrows_walk_the_tree(viewer: Viewer) -> None:
    viewer = keys(viewer, "down", "down", "down", "down")
    assert at(viewer) == "b (f.py:2)"
    assert at(keys(viewer, "down")) == "b (f.py:2)"
    assert at(keys(viewer, "right")) == "c (f.py:3)"
    assert at(keys(viewer, "right", "left")) == "b (f.py:2)"
    assert at(keys(viewer, "up")) == "a (f.py:1)"
    assert at(keys(viewer, *["up"] * 9)) == "all"


def test_enter_zooms_and_esc_goes_out_step_by_step(viewer: Viewer) -> None:
    zoomed = keys(viewer, *["down"] * 4, "enter")
    assert zoomed.view.zoom == zoomed.view.cursor != 0
    names = []
    now: Viewer | None = zoomed
    while now is not None:
        names.append(now.tree.name(now.view.zoom))
        now = press(now, "escape", SIZE)
    assert names[-1] == "all"
    assert len(names) == len(zoomed.tree.path(zoomed.view.zoom))


def test_moving_above_the_zoom_zooms_out(viewer: Viewer) -> None:
    zoomed = keys(viewer, *["down"] * 4, "enter", "up")
    assert zoomed.view.zoom == zoomed.view.cursor


def test_search_highlights_and_n_goes_on(viewer: Viewer) -> None:
    typing = keys(viewer, "/", "t", "i", "n", "y")
    assert typing.view.typing
    # Letters that are keys elsewhere are text here.
    found = keys(typing, "enter")
    assert at(found) == "tiny (f.py:8)"
    assert found.view.hit_total == 1
    wide = keys(found, "n")
    share = wide.tree.total[wide.view.cursor] / wide.tree.total[wide.view.zoom]
    assert share * SIZE[0] >= 3
    assert keys(found, "escape").view.hits == frozenset()
    nothing = keys(viewer, "/", "?", "?", "enter", "n")
    assert "nothing" in nothing.view.message
    assert keys(typing, "backspace").view.search == "tin"
    assert not keys(typing, "escape").view.typing


def test_filters_ask_for_another_tree(viewer: Viewer) -> None:
    assert keys(viewer, "i").shape == Shape(inverted=True)
    assert keys(viewer, "t").shape.thread == "1 Main"
    assert keys(viewer, "t", "t", "t").shape.thread == ""
    assert keys(viewer, "c").shape.category == "schedule"
    assert keys(viewer, "d").shape.difference
    # Esc takes filters away before it closes.
    assert keys(viewer, "c", "escape").shape == Shape()


def test_q_closes(viewer: Viewer) -> None:
    assert press(viewer, "q", SIZE) is None
    assert press(viewer, "F", SIZE) is None
    assert press(viewer, "escape", SIZE) is None


def test_a_click_selects_and_a_second_one_zooms(viewer: Viewer) -> None:
    once = click(viewer, (2, 4), SIZE)
    assert at(once) == "thread (1): Main"
    assert once.view.zoom == 0
    twice = click(once, (2, 4), SIZE)
    assert twice.view.zoom == twice.view.cursor
    # The row above the zoomed frame is its caller: one click goes there.
    assert click(twice, (2, 2), SIZE).view.zoom < twice.view.zoom
    assert click(viewer, (2, 13), SIZE) == viewer


def test_the_wheel_scrolls_deep_stacks() -> None:
    deep = Viewer(build(parse(";".join(f"f{n}" for n in range(60)) + " 5")), IcicleView())
    down = wheel(deep, 3, SIZE)
    assert down.view.top == 3
    assert wheel(down, -9, SIZE).view.top == 0
    end = deep
    for _ in range(40):
        end = wheel(end, 3, SIZE)
    text = "".join(part for line in icicle(end.tree, end.view, *SIZE) for part, _ in line)
    assert "f59" in text
    # The selected frame is always in sight.
    walked = deep
    for _ in range(60):
        walked = keys(walked, "down")
    text = "".join(
        part for line in icicle(walked.tree, walked.view, *SIZE)[2:-2] for part, _ in line
    )
    assert "f59" in text


def test_a_viewer_is_made_for_every_shape() -> None:
    view = IcicleView(search="tiny")
    made = make_viewer(FOLDED, FOLDED, Shape(thread="1 Out"), view)
    assert made.tree.total[0] == 10
    assert made.view.hit_total == 1
    inverted = make_viewer(FOLDED, None, Shape(inverted=True, category="wait"), view)
    assert inverted.tree.inverted
    assert inverted.tree.total[0] == 9
    assert make_viewer(FOLDED, FOLDED, Shape(difference=True), view).view.change is not None


def test_keys_of_the_main_screen() -> None:
    snap = FakeEngine().snapshot()
    assert press_main(View(), "f", snap)[1] == effects.Flame("capture")
    assert press_main(View(), "F", snap)[1] == effects.Flame("view")
    replayed = View(player=Player(0.0, 0.0, 1.0))
    view, effect = press_main(replayed, "f", snap)
    assert effect is None
    assert "no process" in view.message


def test_p_goes_through_the_processes() -> None:
    snap = FakeEngine().snapshot()
    engine = snap.engines[0]
    one = snap.stacks[0]
    worker = replace(one, pid=engine.worker_pids[0], role="worker")
    both = replace(snap, stacks=(replace(one, pid=engine.pid or 0), worker))
    view, _ = press_main(View(), "p", both)
    assert view.stacks_role == "engine"
    view, _ = press_main(view, "p", both)
    assert view.stacks_role == "worker"
    assert "of the Worker" in view.message
    view, _ = press_main(view, "p", both)
    assert view.stacks_role == "api"
    view, _ = press_main(view, "p", both)
    assert view.stacks_role == ""
    alone = replace(engine, worker_pids=(), api_pids=())
    view, _ = press_main(View(), "p", replace(snap, engines=(alone,)))
    assert "no other process" in view.message
    # Of a recording only what was sampled can be chosen.
    replayed = View(player=Player(0.0, 0.0, 1.0))
    view, _ = press_main(replayed, "p", replace(snap, stacks=()))
    assert "no other process" in view.message
    view, _ = press_main(replace(replayed, stacks_role="worker"), "p", both)
    assert view.stacks_role == ""
