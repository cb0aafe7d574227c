"""Attaching from the screen: never in its way, and plain about what failed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from fake_feed import FakeEngine, FakeFeed

from kvtop.draw.view import View
from kvtop.model.snapshot import Snapshot
from kvtop.ui import attaching
from kvtop.ui.app import KvtopApp


@pytest.fixture
def stranger() -> Iterator[int]:
    """A process that has nothing to do with vLLM."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process.pid
    process.communicate()


def test_a_process_that_is_no_engine_is_refused_in_plain_words(stranger: int) -> None:
    worked, text = attaching.attach(stranger)
    assert not worked
    assert f"process {stranger}" in text
    assert "is not part of a vLLM server" in text
    assert "Traceback" not in text


def test_a_relative_search_path_still_finds_kvtop(
    stranger: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(request.config.rootpath)
    monkeypatch.setenv("PYTHONPATH", ".")
    assert "is not part of a vLLM server" in attaching.attach(stranger)[1]


def bare() -> Snapshot:
    """An engine that no probe is in."""
    snap = FakeEngine().snapshot()
    engine = replace(snap.engines[0], probe=None, pools=(), requests=None, pid=4740)
    return replace(snap, engines=(engine,))


class Bare(FakeFeed):
    async def snapshots(self):
        yield bare()
        await asyncio.Event().wait()


def shown(app: KvtopApp) -> str:
    return "\n".join("".join(part for part, _ in line) for line in app.canvas.lines)


async def until(app: KvtopApp, pilot, text: str) -> None:
    for _ in range(500):
        if text in shown(app):
            return
        await pilot.pause(0.01)
    raise AssertionError(shown(app))


async def test_the_screen_goes_on_while_it_attaches(monkeypatch: pytest.MonkeyPatch) -> None:
    go, pids = threading.Event(), []

    def slow(pid: int) -> tuple[bool, str]:
        pids.append(pid)
        go.wait(30)
        return True, f"engine {pid}: probe attached"

    monkeypatch.setattr(attaching, "attach", slow)
    app = KvtopApp(Bare(), View(), bare())
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("a")
        await until(app, pilot, "Attach the probe")
        await pilot.press("y")
        await until(app, pilot, "this takes some seconds")
        await pilot.press("tab", "h")
        await until(app, pilot, "Keys")
        await pilot.press("escape", "a", "y")
        go.set()
        await until(app, pilot, "probe attached")
        assert pids == [4740]


async def test_what_failed_is_said_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "engine 4740: ptrace is not allowed \x1b[31m; run as root"
    monkeypatch.setattr(attaching, "attach", lambda _pid: (False, text))
    app = KvtopApp(Bare(), View(), bare())
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("a", "enter")
        await until(app, pilot, "Attaching to pid 4740 failed")
        await until(app, pilot, "ptrace is not allowed \\x1b[31m; run as root")
        assert app.view.dialog.kind == "message"


async def test_at_the_start_every_engine_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = []
    monkeypatch.setattr(
        attaching, "attach", lambda pid: (pids.append(pid), (False, "it is too old"))[1]
    )

    class Twice(FakeFeed):
        async def snapshots(self):
            for _ in range(3):
                yield bare()
                await asyncio.sleep(0)
            await asyncio.Event().wait()

    app = KvtopApp(Twice(), View(), attach_first=True)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(app, pilot, "it is too old")
        await pilot.pause()
        assert pids == [4740]
