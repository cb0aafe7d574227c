from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kvtop.errors import UsageError
from kvtop.model.capture import StackCapture
from kvtop.model.detail import Detail
from kvtop.model.snapshot import Snapshot
from kvtop.session import recorder as recorder_module
from kvtop.session.reader import SessionReader
from kvtop.session.recorder import QUEUE, Recorder
from kvtop.session.writer import SessionWriter
from tests.session.common import insist, offer, small, stored


def test_it_records_in_its_own_thread(tmp_path: Path) -> None:
    path = tmp_path / "a.kvtop"
    recorder = Recorder(path, interval_s=1.0)
    recorder.start()
    churn = small()
    live = [churn.tick() for _ in range(30)]
    for snapshot in live:
        offer(recorder, snapshot)
    seen = Detail("r", 1, ((0, 16, (1,)),), ((1,),))
    assert insist(lambda: recorder.detail(churn.pid, seen), recorder)
    assert not recorder.detail(churn.pid, Detail("r", error="gone"))
    assert insist(lambda: recorder.marker(live[-1].time_s, "now"), recorder)
    status = recorder.stop()
    assert (status.state, status.ticks, status.markers, status.reason) == ("stopped", 30, 1, "")
    assert status.size_bytes == path.stat().st_size
    with SessionReader(path) as reader:
        assert list(reader.snapshots()) == [stored(snapshot) for snapshot in live]
        assert reader.markers()[0].tick == 30
        assert reader.detail(churn.pid, "r", 30).step == 1
    assert recorder.stop() == status


def test_a_disk_that_cannot_keep_up_costs_ticks_and_never_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    write = SessionWriter.write

    def slow(self: SessionWriter, snapshot: Snapshot) -> None:
        gate.wait(30)
        write(self, snapshot)

    monkeypatch.setattr(recorder_module.SessionWriter, "write", slow)
    recorder = Recorder(tmp_path / "a.kvtop")
    recorder.start()
    churn = small()
    live = [churn.tick() for _ in range(60)]
    taken = [snapshot for snapshot in live if recorder.offer(snapshot)]
    assert len(taken) in (QUEUE, QUEUE + 1)
    assert recorder.status.dropped == len(live) - len(taken)
    gate.set()
    status = recorder.stop(timeout_s=30)
    assert status.dropped == len(live) - len(taken)
    with SessionReader(tmp_path / "a.kvtop") as reader:
        assert list(reader.snapshots()) == [stored(snapshot) for snapshot in taken]


def test_quitting_does_not_wait_for_a_hanging_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(
        recorder_module.SessionWriter, "write", lambda self, snapshot: gate.wait(30)
    )
    recorder = Recorder(tmp_path / "a.kvtop")
    recorder.start()
    recorder.offer(small().tick())
    status = recorder.stop(timeout_s=0.05)
    assert status.state == "failed"
    assert "did not answer" in status.reason
    gate.set()


def test_a_size_limit_ends_it(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.kvtop", max_bytes=400_000)
    recorder.start()
    churn = small()
    while offer(recorder, churn.tick()):
        assert recorder.status.ticks < 5000
    status = recorder.stop()
    assert (status.state, status.reason) == ("stopped", "the size limit is reached")
    assert 400_000 <= status.size_bytes < 500_000
    with SessionReader(tmp_path / "a.kvtop") as reader:
        assert reader.info.closed_reason == "size limit"
        assert reader.last_tick == status.ticks


def test_rotation_keeps_the_last_parts(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.kvtop", max_bytes=250_000, rotate=True, keep=2)
    recorder.start()
    churn = small()
    while recorder.status.parts < 5:
        offer(recorder, churn.tick())
    status = recorder.stop()
    assert status.state == "stopped"
    parts = sorted(path.name for path in tmp_path.iterdir())
    assert parts == ["a.3.kvtop", "a.4.kvtop", "a.kvtop"]
    total = 0
    for name in parts:
        with SessionReader(tmp_path / name) as reader:
            snapshots = list(reader.snapshots())
            total += len(snapshots)
    assert status.ticks > total


def test_rotation_takes_no_name_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a.1.kvtop").write_text("mine")
    recorder = Recorder(tmp_path / "a.kvtop", max_bytes=250_000, rotate=True)
    recorder.start()
    churn = small()
    while recorder.status.parts < 3:
        offer(recorder, churn.tick())
    recorder.stop()
    assert (tmp_path / "a.1.kvtop").read_text() == "mine"
    assert (tmp_path / "a.2.kvtop").exists()


def test_a_file_that_is_there_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.kvtop").write_text("mine")
    recorder = Recorder(tmp_path / "a.kvtop")
    with pytest.raises(UsageError):
        recorder.start()
    assert not recorder.offer(small().tick())
    assert recorder.stop().state == "stopped"


def test_a_dump_is_a_session_of_its_own(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.kvtop")
    recorder.start()
    churn = small()
    live: list[Any] = [churn.tick() for _ in range(10)]
    for snapshot in live:
        offer(recorder, snapshot)
    assert recorder.dump(tmp_path / "b.kvtop", "a reason", timeout_s=30) == ""
    assert "already there" in recorder.dump(tmp_path / "b.kvtop", "again", timeout_s=30)
    offer(recorder, churn.tick())
    recorder.stop()
    assert recorder.dump(tmp_path / "c.kvtop", "late") == "nothing is recorded"
    with SessionReader(tmp_path / "b.kvtop") as reader:
        assert list(reader.snapshots()) == [stored(snapshot) for snapshot in live]
        assert reader.info.closed_reason == "a reason"
    with SessionReader(tmp_path / "a.kvtop") as reader:
        assert reader.last_tick == 11


def test_stacks_are_not_lost_to_a_full_queue(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.kvtop")
    recorder.start()
    churn = small()
    offer(recorder, churn.tick())
    going_on = threading.Event()
    recorder._put(going_on.wait)
    while recorder.offer(churn.tick()):
        pass
    stacks = StackCapture(1.0, 20, folded="main (a.py:1) 3\n")
    assert [recorder.capture(stacks) for _ in range(6)] == [True] * 4 + [False] * 2
    going_on.set()
    assert recorder.stop(timeout_s=20).state == "stopped"
    assert not recorder.capture(stacks)
    with SessionReader(tmp_path / "a.kvtop") as reader:
        assert [reader.stacks_of(one).folded for one in reader.captures()] == [stacks.folded] * 4
