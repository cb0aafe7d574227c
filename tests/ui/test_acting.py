"""Keys that change an engine: asked for at the start, asked again, no by default, told."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from fake_feed import FakeEngine, FakeFeed

from kvtop.config import Options, load
from kvtop.draw.dialog import dialog_panel, dialog_rect
from kvtop.draw.requests import visible_requests
from kvtop.draw.view import Detail, Dialog, Player, View
from kvtop.errors import UsageError
from kvtop.model.snapshot import Phase, Snapshot
from kvtop.session.anonymize import Anonymizer
from kvtop.ui import act_keys, acting
from kvtop.ui.act_keys import IN_DEMO, IN_REPLAY, NOT_ALLOWED
from kvtop.ui.app import KvtopApp
from kvtop.ui.controller import press
from kvtop.ui.effects import Act, Answer

SNAP = replace(FakeEngine().snapshot(), demo=False)
ENGINE = SNAP.engines[0]
ROWS = visible_requests(SNAP, View())
VIEW = View(allow_actions=True)
SIZE = (100, 30)


def message(view: View, key: str, snap: Snapshot = SNAP) -> str:
    after, effect = press(view, key, snap, SIZE)
    assert effect is None
    return after.message


def renamed(*names: str) -> Snapshot:
    rows = [replace(r, id=name) for r, name in zip(ROWS, names, strict=False)]
    return replace(SNAP, engines=(replace(ENGINE, requests=tuple(rows)),))


@pytest.mark.parametrize("key", ["X", "C"])
def test_without_the_option_the_keys_only_say_which_option_is_needed(key: str) -> None:
    assert message(View(), key) == NOT_ALLOWED
    assert "--allow-actions" in NOT_ALLOWED
    replayed = View(player=Player(1.0, 0.0, 2.0), allow_actions=True)
    assert message(replayed, key) == IN_REPLAY
    assert message(VIEW, key, replace(SNAP, demo=True)) == IN_DEMO
    gone = replace(SNAP, engines=(replace(ENGINE, alive=False),))
    assert "gone" in message(VIEW, key, gone)
    elsewhere = replace(SNAP, engines=(replace(ENGINE, pid=None),))
    assert "not on this machine" in message(VIEW, key, elsewhere)
    assert "no engine" in message(VIEW, key, replace(SNAP, engines=()))


def test_x_is_about_the_request_under_the_cursor_or_the_open_one() -> None:
    view = replace(VIEW, cursor_id=ROWS[3].id)
    _, effect = press(view, "X", SNAP, SIZE)
    assert isinstance(effect, Act)
    assert (effect.what, effect.request) == ("abort", ROWS[3])
    _, effect = press(replace(view, detail=Detail(ROWS[5].id)), "X", SNAP, SIZE)
    assert isinstance(effect, Act)
    assert effect.request == ROWS[5]
    assert message(replace(view, detail=Detail("gone")), "X") == "no request is selected"


def test_x_needs_a_request_that_can_be_aborted() -> None:
    held = replace(ENGINE, requests=(replace(ROWS[0], phase=Phase.HELD),))
    assert "nothing to abort" in message(VIEW, "X", replace(SNAP, engines=(held,)))
    unread = replace(ENGINE, requests=None)
    assert "no probe" in message(VIEW, "X", replace(SNAP, engines=(unread,)))
    plain = replace(ENGINE, prefix_caching=False)
    assert "off" in message(VIEW, "C", replace(SNAP, engines=(plain,)))


@pytest.mark.parametrize(
    ("names", "known"),
    [
        (("cmpl-1-0-0123abcd", "cmpl-2-0-0123abcd"), ("cmpl-1-0",)),
        (("own",), ("own",)),
        # Two requests of one name: the route would abort both.
        (("same-0123abcd", "same-89abcdef"), ()),
        (("same-0123abcd", "same"), ()),
    ],
)
def test_an_id_for_the_route_is_only_one_that_names_this_request_alone(
    names: tuple[str, ...], known: tuple[str, ...]
) -> None:
    view = replace(VIEW, cursor_id=names[0])
    _, effect = press(view, "X", renamed(*names), SIZE)
    assert isinstance(effect, Act)
    assert effect.client_ids == known


def text_of(act: Act, engines: int = 1, *, recording: bool = True) -> str:
    dialog = act_keys.question(act, "code run once", engines, recording=recording, token="7")
    assert (dialog.kind, dialog.action) == ("danger", "act 7")
    return " ".join("".join(part for part, _ in line) for line in dialog.lines)


def test_the_question_says_exactly_what_happens() -> None:
    request = replace(ROWS[0], id="a[/x]b\x1b[2J", blocks=12, shared_blocks=3, output_tokens=40)
    text = text_of(Act("abort", ENGINE, request))
    for part in ("a[/x]b", "12 blocks, 3 of them shared", "40 tokens", '"abort"', "Code run once"):
        assert part in text
    assert "\x1b" not in text
    assert "marker" in text
    reset = text_of(Act("reset", ENGINE), 2, recording=False)
    assert "all 2 engines" in reset
    assert f"{ENGINE.blocks.cached} cached blocks" in reset
    assert "refuses while any block is in use, as now:" in reset
    assert "No recording runs" in reset


def test_the_answer_is_no_unless_y_is_pressed() -> None:
    dialog = act_keys.question(Act("reset", ENGINE), "x", 1, recording=False, token="7")
    asked = replace(VIEW, dialog=dialog)
    for key in ("enter", "escape", "n", "q"):
        view, effect = press(asked, key, SNAP, SIZE)
        assert (view.dialog, effect) == (None, None)
    for key in ("Y", "X", "space", "down"):
        view, effect = press(asked, key, SNAP, SIZE)
        assert (view.dialog, effect) == (dialog, None)
    assert press(asked, "y", SNAP, SIZE)[1] == Answer("act 7", "")


def test_only_the_flag_allows_it(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Options().allow_actions
    assert load({"allow_actions": True}, {}).allow_actions
    file = tmp_path / "config.toml"
    file.write_text("allow_actions = true\n")
    with pytest.raises(UsageError):
        load({}, {}, file)
    assert not load({}, {"KVTOP_ALLOW_ACTIONS": "1"}).allow_actions


def shown(app: KvtopApp) -> str:
    return "\n".join("".join(part for part, _ in line) for line in app.canvas.lines)


class Moving(FakeFeed):
    """Snapshots that the test gives."""

    def __init__(self) -> None:
        super().__init__(FakeEngine())
        self.given: asyncio.Queue[Snapshot] = asyncio.Queue()

    async def snapshots(self):
        while True:
            yield await self.given.get()


def at(snap: Snapshot, seconds: float) -> Snapshot:
    return replace(snap, mono_s=snap.mono_s + seconds, time_s=snap.time_s + seconds)


async def until(pilot, app: KvtopApp, text: str) -> None:
    for _ in range(200):
        await pilot.pause(0.01)
        if text in shown(app):
            return
    raise AssertionError(f"{text!r} is not in:\n{shown(app)}")


async def test_asked_confirmed_done_and_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def run(act: Act) -> tuple[str, str]:
        done.append(act)
        return "aborted", "the API server aborted it"

    monkeypatch.setattr(acting, "plan", lambda act: ("code run once", "", 1))
    monkeypatch.setattr(acting, "run", run)
    feed = Moving()
    app = KvtopApp(feed, replace(VIEW, cursor_id=ROWS[0].id), SNAP)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("X")
        await until(pilot, app, "y does it")
        await pilot.press("enter")
        await pilot.pause(0.05)
        assert done == []
        await pilot.press("X")
        await until(pilot, app, "y does it")
        await pilot.press("y")
        await until(pilot, app, "the API server aborted it")
        assert [act.request for act in done] == [ROWS[0]]
        await feed.given.put(at(SNAP, 1))
        await pilot.pause(0.05)
        assert not any("gone" in note for note in app.notes)
        rest = tuple(r for r in ENGINE.requests if r.id != ROWS[0].id)
        await feed.given.put(at(replace(SNAP, engines=(replace(ENGINE, requests=rest),)), 2))
        await until(pilot, app, "it is gone")
    assert [note.split(" ", 1)[1].split(":")[0] for note in app.notes] == ["action"] * 3
    assert "confirmed" in app.notes[0]


async def test_a_request_that_ends_during_the_question_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Act] = []
    monkeypatch.setattr(acting, "plan", lambda act: ("code run once", "", 1))
    monkeypatch.setattr(acting, "run", done.append)
    feed = Moving()
    app = KvtopApp(feed, replace(VIEW, cursor_id=ROWS[0].id), SNAP)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("X")
        await until(pilot, app, "y does it")
        rest = tuple(r for r in ENGINE.requests if r.id != ROWS[0].id)
        await feed.given.put(at(replace(SNAP, engines=(replace(ENGINE, requests=rest),)), 2))
        await pilot.pause(0.1)
        await pilot.press("y")
        await until(pilot, app, "nothing was done")
    assert done == []
    assert app.notes == []


@pytest.mark.parametrize("open_one", [View(search_open=True), View(dialog=Dialog("help", "Keys"))])
async def test_what_is_typed_elsewhere_is_never_the_answer(
    open_one: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def plan(act: Act) -> tuple[str, str, int]:
        asyncio.run_coroutine_threadsafe(looked.wait(), loop).result()
        return "code run once", "", 1

    done: list[Act] = []
    monkeypatch.setattr(acting, "plan", plan)
    monkeypatch.setattr(acting, "run", done.append)
    app = KvtopApp(Moving(), VIEW, SNAP)
    async with app.run_test(size=(140, 30)) as pilot:
        await pilot.press("C")
        app.view = replace(app.view, search_open=open_one.search_open, dialog=open_one.dialog)
        looked.set()
        for _ in range(200):
            await pilot.pause(0.01)
            if "did not ask" in app.view.message:
                break
        assert "did not ask" in app.view.message
        await pilot.press("y")
        await pilot.pause(0.05)
        assert app.view.dialog == open_one.dialog
    assert done == []
    assert app.notes == []


@pytest.mark.parametrize("size", [(20, 6), (40, 10), (80, 12)])
def test_all_of_the_question_can_be_read_on_a_small_screen(size: tuple[int, int]) -> None:
    act = Act("abort", ENGINE, replace(ROWS[0], id="\x1b[31m\n" + "0123456789abcdefg" * 60_000))
    asked = act_keys.question(act, "code run once", 1, recording=False, token="1")
    view = replace(VIEW, dialog=asked)
    seen: dict[str, None] = {}
    for _ in range(100):
        rect = dialog_rect(asked, *size)
        for line in dialog_panel(SNAP, view, rect.width, rect.height)[1:-2]:
            seen["".join(part for part, _ in line).strip("\u2502 ")] = None
        view, effect = press(view, "down", SNAP, size)
        assert effect is None
    wanted = "".join(part for line in asked.lines for part, _ in line)
    assert "".join(seen).replace(" ", "") == wanted.replace(" ", "")
    assert press(view, "y", SNAP, size)[1] == Answer("act 1", "")


async def test_the_recording_gets_the_whole_id_so_that_hiding_names_finds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "\x1b[31m" + "customer-" * 20
    snap = renamed(name)
    monkeypatch.setattr(acting, "run", lambda act: ("aborted", "done"))
    monkeypatch.setattr(acting, "plan", lambda act: ("code run once", "", 1))
    app = KvtopApp(Moving(), replace(VIEW, cursor_id=name), snap)
    logged: list[str] = []
    log = app._acting._log

    def both(text: str) -> None:
        logged.append(text)
        log(text)

    app._acting._log = both
    async with app.run_test(size=(140, 30)) as pilot:
        await pilot.press("X")
        await until(pilot, app, "y does it")
        await pilot.press("y")
        await until(pilot, app, ": done")
    hide = Anonymizer()
    hide.name("request", name)
    assert "abort request request-1" in hide.text(logged[0])
    assert not any("customer" in hide.text(note) for note in logged)
    assert len(app.notes) == 2
    assert not any("\x1b" in note for note in app.notes)


async def test_what_cannot_be_done_says_why_and_asks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acting, "plan", lambda act: ("", "gdb is not installed", 1))
    app = KvtopApp(Moving(), VIEW, SNAP)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("C")
        await until(pilot, app, "gdb is not installed")
        assert app.view.dialog is not None
        assert app.view.dialog.kind == "message"
    assert app.notes == []


async def test_an_effect_that_is_not_seen_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acting, "plan", lambda act: ("HTTP", "", 1))
    monkeypatch.setattr(acting, "run", lambda act: ("sent", "taken"))
    feed = Moving()
    app = KvtopApp(feed, VIEW, SNAP)
    async with app.run_test(size=(100, 30)) as pilot:
        await feed.given.put(at(SNAP, 1))
        await pilot.press("X")
        await until(pilot, app, "y does it")
        await pilot.press("y")
        await until(pilot, app, "taken")
        await feed.given.put(at(SNAP, 10))
        await feed.given.put(at(SNAP, 30))
        await until(pilot, app, "no effect was seen within 15 s")
