"""Judging and recording beside the screen."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from fake_feed import START_S, FakeEngine

from kvtop.model.capture import StackCapture
from kvtop.model.detail import Detail
from kvtop.model.snapshot import Engine, Finding
from kvtop.session.blackbox import BlackBox
from kvtop.session.reader import SessionReader
from kvtop.ui.desk import NO_BLACKBOX, NOT_RECORDING, Desk

BAD = Finding("leak.ghost-blocks", "critical", START_S, 1, "12 blocks are lost.")


def sessions(folder: Path) -> list[Path]:
    return sorted(folder.glob("kvtop-2*.kvtop"))


async def test_a_recording_holds_what_was_taken_and_its_marker(tmp_path: Path) -> None:
    desk, engine = Desk(folder=tmp_path), FakeEngine()
    assert desk.recording == ""
    said = await desk.toggle(START_S, 1.0)
    (path,) = sessions(tmp_path)
    assert str(path) in said
    assert desk.recording.startswith("REC ")
    taken = []
    for _ in range(5):
        engine.step(1.0)
        taken.append(desk.take(engine.snapshot()))
    assert desk.mark(engine.time, "here") == "marker set: here"
    desk.detail(taken[-1].engines[0].pid, engine.detail(engine.live[0].id))
    said = await desk.toggle(engine.time, 1.0)
    assert "5 snapshots" in said
    assert desk.recording == ""
    with SessionReader(path) as reader:
        assert [s.time_s for s in reader.snapshots()] == [s.time_s for s in taken]
        assert [marker.note for marker in reader.markers()] == ["here"]
        kept = reader.detail(taken[-1].engines[0].pid, engine.live[0].id, reader.last_tick)
        assert kept.tables == engine.detail(engine.live[0].id).tables
    assert desk.close(1.0) == []


async def test_a_folder_that_cannot_be_written_is_one_plain_message(tmp_path: Path) -> None:
    desk = Desk(folder=tmp_path / "missing")
    said = await desk.toggle(START_S, 1.0)
    assert said.startswith("cannot record: ")
    assert "\n" not in said
    assert desk.recording == ""


async def test_a_disk_that_does_not_keep_up_is_counted_in_the_snapshots(tmp_path: Path) -> None:
    desk, engine = Desk(folder=tmp_path), FakeEngine()
    await desk.toggle(START_S, 1.0)
    going_on = threading.Event()
    desk._recorder._put(going_on.wait)
    last = [desk.take(engine.snapshot()) for _ in range(40)][-1]
    assert last.dropped >= 20
    going_on.set()
    assert "dropped because the disk did not keep up" in "; ".join(desk.close(5.0))


async def test_a_recording_that_fails_says_so_once(tmp_path: Path) -> None:
    desk, engine = Desk(folder=tmp_path), FakeEngine()
    await desk.toggle(START_S, 1.0)
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise OSError("no space left")

    desk._recorder._put(fail)
    assert failed.wait(10)
    desk._recorder._thread.join(10)
    desk.take(engine.snapshot())
    (said,) = desk.messages()
    assert "no space left" in said
    assert "safe" in said
    assert desk.messages() == []
    assert desk.recording == ""
    assert desk.mark(START_S, "x") == NOT_RECORDING


async def test_a_session_that_is_recorded_at_the_end_is_closed(tmp_path: Path) -> None:
    desk, engine = Desk(folder=tmp_path), FakeEngine()
    await desk.toggle(START_S, 1.0)
    desk.take(engine.snapshot())
    (said,) = desk.close(5.0)
    assert "1 snapshots" in said
    with SessionReader(sessions(tmp_path)[0]) as reader:
        assert reader.info.closed_reason == "stopped"


def test_what_the_judge_says_is_kept_for_the_newest_snapshot() -> None:
    seen = []

    def judge(snapshot):
        seen.append(snapshot.time_s)
        return (BAD,) if len(seen) == 2 else ()

    desk, engine = Desk(judge), FakeEngine()
    desk.take(engine.snapshot())
    assert desk.findings == ()
    desk.take(engine.snapshot())
    assert desk.findings == (BAD,)
    assert seen == [START_S, START_S]


@pytest.mark.parametrize("by_key", [True, False])
def test_the_black_box_writes_at_a_finding_and_at_a_key(tmp_path: Path, by_key: bool) -> None:
    blackbox = BlackBox(tmp_path, 60.0)
    blackbox.start()
    desk, engine = Desk((lambda _: ()) if by_key else (lambda _: (BAD,)), blackbox), FakeEngine()
    desk.take(engine.snapshot())
    if by_key:
        assert desk.write_blackbox().startswith("writing ")
    said = desk.close(10.0)
    (path,) = tmp_path.glob("kvtop-blackbox-*.kvtop")
    assert any(str(path) in line for line in said)
    assert ("key-b" if by_key else "ghost") in path.name
    assert not list(tmp_path.glob("kvtop-ring-*"))


def test_without_a_black_box_its_key_says_how_to_get_one() -> None:
    assert Desk().write_blackbox() == NO_BLACKBOX


def test_a_judge_that_fails_is_told_once_and_the_rest_goes_on(tmp_path: Path) -> None:
    def judge(_snapshot):
        raise ZeroDivisionError("told to fail")

    desk, engine = Desk(judge), FakeEngine()
    snapshot = engine.snapshot()
    assert desk.take(snapshot) == snapshot
    (said,) = desk.messages()
    assert "judging has stopped" in said
    assert "told to fail" in said
    desk.take(snapshot)
    assert desk.messages() == []
    assert desk.findings == ()


async def test_stacks_and_the_tables_that_matter_are_recorded(tmp_path: Path) -> None:
    desk, engine = Desk(folder=tmp_path), FakeEngine()
    asked: list[str] = []

    async def ask(_engine: Engine, name: str) -> Detail:
        asked.append(name)
        return engine.detail(name)

    desk.take(engine.snapshot())
    assert desk.tables_due() == []
    stacks = StackCapture(engine.time, 20, (20,), 4.0, 50, folded="main (a.py:1) 7\n", samples=7)
    desk.capture(stacks)
    await desk.toggle(engine.time, 1.0)
    rounds = 0
    for number in range(1, 71):
        engine.step(1.0)
        snapshot = desk.take(engine.snapshot())
        recorder = desk._recorder
        while recorder is not None and recorder.status.ticks < number:
            await asyncio.sleep(0.001)
        if due := desk.tables_due():
            rounds += 1
            await desk.keep_tables(due, ask)
    desk.capture(stacks)
    await desk.toggle(engine.time, 1.0)
    assert rounds == 3
    largest = max(snapshot.engines[0].requests or (), key=lambda request: request.blocks or 0)
    (path,) = sessions(tmp_path)
    with SessionReader(path) as reader:
        (kept,) = reader.captures()
        assert reader.stacks_of(kept).folded == stacks.folded
        assert {detail.request_id for _, detail in reader.details(0, 100)} == set(asked)
        # The newest round is ten seconds old.
        found = reader.detail(snapshot.engines[0].pid, largest.id, reader.last_tick)
        assert found.error == "" or "twice a minute" in found.error


async def test_the_black_box_writes_again_when_a_findings_stacks_are_there(tmp_path: Path) -> None:
    blackbox = BlackBox(tmp_path, 600)
    blackbox.start()
    desk, engine = Desk(blackbox=blackbox, folder=tmp_path), FakeEngine()
    desk.take(engine.snapshot())
    desk.capture(StackCapture(1.0, 20, folded="a (a.py:1) 3\n"))
    desk.capture(StackCapture(2.0, 20, why="health.stalled", folded="b (a.py:1) 3\n"))
    desk.close(5.0)
    (path,) = tmp_path.glob("kvtop-blackbox-*.kvtop")
    assert "stacks-for-health-stalled" in path.name
    with SessionReader(path) as reader:
        assert [reader.stacks_of(one).folded for one in reader.captures()] == [
            "a (a.py:1) 3\n",
            "b (a.py:1) 3\n",
        ]
