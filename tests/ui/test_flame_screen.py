from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_feed import FakeEngine, FakeFeed

from kvtop.draw.view import View
from kvtop.flame import target
from kvtop.flame.capture import Plan
from kvtop.flame.folded import parse
from kvtop.model.capture import StackCapture
from kvtop.model.snapshot import Finding, Snapshot
from kvtop.sources.stacks_spy import find_py_spy
from kvtop.ui.app import KvtopApp
from kvtop.ui.flame_screen import Flames

BUSY = "print('up', flush=True)\ndef hot_loop():\n  while True: pass\nhot_loop()"


class HandFeed(FakeFeed):
    def __init__(self) -> None:
        super().__init__(FakeEngine())
        self.queue: asyncio.Queue[Snapshot] = asyncio.Queue()

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        while True:
            yield await self.queue.get()


@pytest.fixture
def busy() -> subprocess.Popen[str]:
    if find_py_spy() is None:
        pytest.skip("py-spy is not installed")
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child
        child.kill()


def text(app: KvtopApp) -> str:
    return "\n".join("".join(part for part, _ in line) for line in app.canvas.lines)


async def until(pilot: object, ready: Callable[[], bool], what: str) -> None:
    for _ in range(600):
        if ready():
            return
        await pilot.pause(0.05)  # type: ignore[attr-defined]
    raise AssertionError(f"never happened: {what}")


def app_on(pid: int, folder: Path, seconds: float) -> KvtopApp:
    feed = HandFeed()
    snap = feed.engine.snapshot()
    snap = replace(snap, engines=(replace(snap.engines[0], pid=pid),))
    app = KvtopApp(feed, View(), snap)
    app.flames = Flames(app, folder=folder, plan=Plan(0, seconds, 50))
    return app


def children() -> set[int]:
    return {p for p in target.tree_of(os.getpid())[1:] if "py-spy" in target.command_of(p)}


async def test_capture_and_view(busy: subprocess.Popen[str], tmp_path: Path) -> None:
    app = app_on(busy.pid, tmp_path, 1.0)
    async with app.run_test(size=(160, 40)) as pilot:
        await pilot.press("f")
        await until(pilot, lambda: "f cancels" in text(app), "a progress bar")
        await until(pilot, lambda: "flame graph written" in text(app), "the end")
        names = sorted(path.suffix for path in tmp_path.iterdir())
        assert names == [".folded", ".svg"]
        assert all(f"-{busy.pid}-" in path.name for path in tmp_path.iterdir())
        await pilot.press("F")
        await until(pilot, lambda: app.flames.is_open, "the viewer")
        assert "hot_loop" in text(app)
        await pilot.press("i")
        await until(pilot, lambda: "Callers" in text(app), "inverted")
        await pilot.press("d")
        assert "no other capture" in text(app)
        await pilot.press("q")
        assert not app.flames.is_open
        assert "Requests" in text(app)


async def test_f_again_cancels(busy: subprocess.Popen[str], tmp_path: Path) -> None:
    app = app_on(busy.pid, tmp_path, 60.0)
    async with app.run_test(size=(160, 40)) as pilot:
        await pilot.press("f")
        await until(pilot, lambda: bool(children()), "py-spy runs")
        await pilot.press("f")
        await until(pilot, lambda: not app.flames.capturing, "cancelled")
        assert "cancelled" in text(app)
        assert not children()
        assert not list(tmp_path.iterdir())


async def test_leaving_ends_the_capture(busy: subprocess.Popen[str], tmp_path: Path) -> None:
    app = app_on(busy.pid, tmp_path, 60.0)
    async with app.run_test(size=(160, 40)) as pilot:
        await pilot.press("f")
        await until(pilot, lambda: bool(children()), "py-spy runs")
    await app.close_feed(1.0)
    for _ in range(100):
        if not children():
            break
        await asyncio.sleep(0.05)
    assert not children()


async def test_frames_are_sampled_only_while_they_are_seen(tmp_path: Path) -> None:
    app = app_on(1, tmp_path, 1.0)
    feed = app._feed
    assert isinstance(feed, HandFeed)
    async with app.run_test(size=(160, 40)) as pilot:
        await pilot.pause()
        assert feed.visible == []
        # Another panel has the whole screen.
        await pilot.press("z")
        assert feed.visible == [False]
        await pilot.press("z")
        assert feed.visible == [False, True]
        app.flames.show(parse("a 1"))
        await until(pilot, lambda: app.flames.is_open, "the viewer")
        assert feed.visible[2:] == [False]
        await pilot.press("q")
        assert feed.visible[2:] == [False, True]
        await pilot.press("t")
        assert feed.visible[4:] == [False]


async def test_a_recording_keeps_the_frames_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = app_on(1, tmp_path, 1.0)
    feed = app._feed
    assert isinstance(feed, HandFeed)
    monkeypatch.setattr(type(app.desk), "writes", True)
    async with app.run_test(size=(160, 40)) as pilot:
        await pilot.press("z")
        assert feed.visible == []
        await pilot.press("z", "t")
        assert feed.visible == [False]


async def test_an_engine_that_is_gone_is_said(tmp_path: Path) -> None:
    app = app_on(2**22 + 5, tmp_path, 1.0)
    async with app.run_test(size=(160, 40)) as pilot:
        await pilot.press("F")
        await until(pilot, lambda: "no flame graph yet" in text(app), "nothing to show")
        await pilot.press("f")
        await until(pilot, lambda: "no process" in text(app), "why not")
        assert app.fault is None


async def test_an_older_file_is_opened_and_compared(tmp_path: Path) -> None:
    for number, stacks in enumerate(("a 3\nb 1\n", "a 1\nb 3\n")):
        path = tmp_path / f"kvtop-h-{number}.folded"
        path.write_text(stacks)
        os.utime(path, (number, number))
    app = app_on(1, tmp_path, 1.0)
    async with app.run_test(size=(160, 40)) as pilot:
        await pilot.press("F")
        await until(pilot, lambda: app.flames.is_open, "the viewer")
        await pilot.press("d")
        await until(pilot, lambda: "+50.0 b" in text(app), "a difference")
        assert "-50.0 a" in text(app)


class _Owner:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.taken: list[StackCapture] = []
        self.closed = False

    def flame_says(self, text: str) -> None:
        self.said.append(text)

    def flame_changed(self) -> None: ...

    def flame_taken(self, capture: StackCapture) -> None:
        self.taken.append(capture)

    def flame_closed(self) -> None:
        self.closed = True

    def flame_failed(self, error: BaseException) -> None:
        raise error


async def test_a_finding_starts_one_capture(busy: subprocess.Popen[str], tmp_path: Path) -> None:
    owner = _Owner()
    flames = Flames(owner, folder=tmp_path, plan=Plan(0, 1.0, 50))
    stall = Finding("health.stalled", "critical", 5.0, busy.pid, "s")
    flames.judged((stall,), 1.0)
    assert not flames.capturing
    flames.at_start(None, frozenset({"health.stalled"}))
    flames.judged((stall,), 1.0)
    assert flames.capturing
    flames.judged((replace(stall, since_s=9.0),), 100.0)
    while flames.capturing:
        await asyncio.sleep(0.05)
    assert any("flame graph for health.stalled" in said for said in owner.said)
    assert len(list(tmp_path.glob("*.svg"))) == 1
    (taken,) = owner.taken
    assert (taken.pid, taken.pids, taken.why) == (busy.pid, (busy.pid,), "health.stalled")
    assert (taken.outcome, taken.mode, taken.rate_hz) == ("ok", "non-blocking, idle", 50)
    assert "hot_loop" in taken.folded
    assert taken.samples > 0


async def test_a_cancelled_capture_is_told_without_stacks(
    busy: subprocess.Popen[str], tmp_path: Path
) -> None:
    owner = _Owner()
    flames = Flames(owner, folder=tmp_path, plan=Plan(0, 60.0, 50))
    flames.toggle(busy.pid)
    await asyncio.sleep(0.3)
    flames.toggle(busy.pid)
    while flames.capturing:
        await asyncio.sleep(0.05)
    (taken,) = owner.taken
    assert taken.outcome == "the capture was cancelled"
    assert (taken.folded, taken.pids, taken.pid) == ("", (), busy.pid)
    assert list(tmp_path.iterdir()) == []


def test_only_a_viewer() -> None:
    owner = _Owner()
    flames = Flames(owner, ascii_only=True)
    flames.at_start((parse("a;b 3"), None), frozenset())
    assert flames.is_open
    assert len(flames.lines(80, 24)) == 24
    flames.press("q", "q", (80, 24))
    assert owner.closed
