"""A replay on the screen."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_feed import FakeEngine

from kvtop.draw.view import View
from kvtop.errors import KvtopError
from kvtop.flame.capture import Capture, Plan
from kvtop.flame.folded import parse
from kvtop.flame.record import failed, recorded
from kvtop.model.snapshot import Finding, Snapshot
from kvtop.session.reader import SessionReader
from kvtop.session.replay import Replay
from kvtop.session.writer import SessionWriter
from kvtop.sources.base import SystemClock
from kvtop.ui.app import KvtopApp
from kvtop.ui.deck import Deck
from kvtop.ui.effects import Play

TICKS = 60


class Late:
    """Finds a leak from the 40th snapshot of the session on, if it saw those before."""

    def __init__(self) -> None:
        self.first: float | None = None

    def __call__(self, snapshot: Snapshot) -> tuple[Finding, ...]:
        self.first = snapshot.time_s if self.first is None else self.first
        if snapshot.time_s - self.first < 38.5:
            return ()
        leak = Finding(
            "leak.ghost-blocks", "critical", self.first, snapshot.engines[0].pid, "Lost."
        )
        return (leak,)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    engine, path = FakeEngine(blocks=256, requests=4), tmp_path / "a.kvtop"
    writer = SessionWriter(path, 1.0)
    for tick in range(TICKS):
        engine.step(1.0)
        writer.write(engine.snapshot())
        if tick == 19:
            writer.marker(engine.time, "here")
    writer.close()
    return path


@pytest.fixture
def deck(path: Path) -> Iterator[Deck]:
    with SessionReader(path) as reader:
        deck = Deck(Replay(reader, SystemClock(), playing=False), Late)
        yield deck
        deck.close()


async def worked(deck: Deck, ready) -> None:
    task = asyncio.ensure_future(deck.work(lambda: None))
    try:
        for _ in range(3000):
            if ready():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("never ready")
    finally:
        task.cancel()


async def shown(deck: Deck) -> int:
    """What the player shows next."""
    async for _ in deck._replay.snapshots():
        break
    deck.moved()
    return deck._replay.position().tick


async def test_a_jump_shows_what_holds_there(deck: Deck) -> None:
    deck.seek("100%")
    assert await shown(deck) == TICKS
    assert deck.findings == ()
    await worked(deck, lambda: deck.findings)
    assert [f.rule for f in deck.findings] == ["leak.ghost-blocks"]
    assert len(deck.history) == TICKS
    deck.seek("0%")
    assert await shown(deck) == 1
    await worked(deck, lambda: len(deck.history) == 1)
    assert deck.findings == ()


async def test_a_step_is_walked_at_once(deck: Deck) -> None:
    await shown(deck)
    await worked(deck, lambda: len(deck.history) == 1)
    deck.control(Play("step", 1))
    assert await shown(deck) == 2
    assert len(deck.history) == 2


async def test_events_are_jumped_to_by_kind(deck: Deck) -> None:
    await worked(deck, lambda: deck._scan.events)
    assert "marker: here" in deck.control(Play("event", 1))
    assert await shown(deck) == 20
    assert "finding: critical leak.ghost-blocks" in deck.control(Play("event", 1))
    assert await shown(deck) == 40
    assert "no event after" in deck.control(Play("event", 1))
    kinds = [deck.control(Play("kind")) for _ in range(6)]
    assert [kind.rsplit(" ", 1)[1] for kind in kinds] == [
        "marker",
        "finding",
        "preemption",
        "restart",
        "stacks",
        "any",
    ]
    deck.control(Play("kind"))
    assert "marker: here" in deck.control(Play("event", -1))
    assert await shown(deck) == 20
    assert "no marker before" in deck.control(Play("event", -1))


async def test_the_timeline_has_markers_and_findings(deck: Deck) -> None:
    await worked(deck, lambda: deck._scan.events)
    marks = {(mark.kind, mark.severity) for mark in deck.player().marks}
    assert {("marker", ""), ("finding", "critical")} <= marks


async def test_typed_moments(deck: Deck, monkeypatch: pytest.MonkeyPatch) -> None:
    first = deck.player().first_s
    deck.seek("+10s")
    assert await shown(deck) == 11
    deck.seek("50%")
    assert await shown(deck) == 30
    assert "is not a moment" in deck.seek("soon")
    # As the screen shows it: local time.
    from kvtop.draw.numbers import clock

    assert deck.seek(clock(first + 15)) == ""
    assert await shown(deck) == 16
    # The nearest is shown, and it is said that it is another one.
    assert f"is outside the recording; it holds {clock(first)} to" in deck.seek("+3h")
    assert await shown(deck) == 60


def test_speed_and_pause(deck: Deck) -> None:
    deck.control(Play("toggle"))
    deck.control(Play("faster"))
    assert (deck.player().playing, deck.player().speed) == (True, 2.0)
    deck.control(Play("slower"))
    deck.control(Play("toggle"))
    assert (deck.player().playing, deck.player().speed) == (False, 1.0)


async def test_the_screen_plays_a_session(path: Path) -> None:
    with SessionReader(path) as reader:
        replay = Replay(reader, SystemClock(), playing=False)
        app = KvtopApp(replay, View(), reader.load(1), deck=Deck(replay, Late))
        async with app.run_test(size=(120, 40)) as pilot:

            async def until(text: str) -> str:
                for _ in range(500):
                    lines = ["".join(t for t, _ in line) for line in app.canvas.lines]
                    if text in "\n".join(lines):
                        return "\n".join(lines)
                    await pilot.pause(0.02)
                raise AssertionError("\n".join(lines))

            assert "PAUSED" in await until("REPLAY")
            await pilot.press("colon", "1", "0", "0", "percent_sign", "enter")
            await until("critical: Lost.")
            await pilot.press("w", "enter")
            await until("What it means")
            await pilot.press("escape", "b", "comma")
            await until("before ")
            await pilot.press("space")
            await until("END")
        assert app.fault is None


def captured(path: Path, *at: int) -> Path:
    """A session with stacks that ended at these ticks, and one capture without any at 50."""
    engine = FakeEngine(blocks=256, requests=4)
    writer = SessionWriter(path, 1.0)
    for tick in range(1, TICKS + 1):
        engine.step(1.0)
        writer.write(engine.snapshot())
        if tick in at:
            plan = Plan(20, 4, 50)
            one = Capture(plan, parse(f"main (a.py:1);at_{tick} (b.py:2) {tick}"), 1.0, 4, tick, 0)
            writer.capture(recorded(one))
        if tick == 50:
            writer.capture(failed(Plan(20), 1.0, KvtopError("no rights")))
    writer.close()
    return path


async def test_stacks_are_those_of_the_moment_shown(tmp_path: Path) -> None:
    with SessionReader(captured(tmp_path / "b.kvtop", 10, 30, 40)) as reader:
        deck = Deck(Replay(reader, SystemClock(), playing=False), Late)
        try:
            seen = []
            for tick in (9, 10, 29, 30, 45, 60):
                deck._replay.seek(tick)
                assert await shown(deck) == tick
                found = deck.stacks()
                new, old = found or (None, None)
                seen.append((new.total if new else 0, old.total if old else 0))
            assert seen == [(0, 0), (10, 0), (10, 0), (30, 10), (40, 30), (40, 30)]
        finally:
            deck.close()


async def test_a_damaged_capture_hides_none_of_the_others(tmp_path: Path) -> None:
    path = captured(tmp_path / "b.kvtop", 10, 30)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE flame_capture SET folded = x'00' WHERE tick = 30")
        db.commit()
    with SessionReader(path) as reader:
        deck = Deck(Replay(reader, SystemClock(), playing=False), Late)
        try:
            deck._replay.seek(60)
            await shown(deck)
            found = deck.stacks()
            assert found is not None
            assert (found[0].total, found[1]) == (10, None)
        finally:
            deck.close()
