"""What was committed is readable after kill -9 and on a full disk, and stays as it is."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtop.errors import StorageError
from kvtop.session.reader import SessionReader
from kvtop.session.recorder import Recorder
from kvtop.session.timeline import timeline
from kvtop.session.writer import DiskFullError, SessionWriter
from tests.session.common import offer, small, stored

ROOT = Path(__file__).resolve().parents[2]
TICKS = 150
KILLS = int(os.environ.get("KVTOP_TEST_KILLS", "12"))


def _kill_while_writing(path: Path, after_s: float) -> int:
    """The last tick the child said it had committed."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.session.child", str(path)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as child:
        assert child.stdout is not None
        first = child.stdout.readline()
        time.sleep(after_s)
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read()
    said = (first + rest).split(b"\n")
    return int(said[-2])


def test_every_committed_tick_survives_kill_9(tmp_path: Path) -> None:
    rnd = random.Random()
    churn = small()
    live = [churn.tick() for _ in range(3000)]
    for number in range(KILLS):
        path = tmp_path / f"{number}.kvtop"
        said = _kill_while_writing(path, rnd.uniform(0, 0.3))
        before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
        with SessionReader(path) as reader:
            assert reader.last_tick >= said
            assert not reader.closed()
            for tick in {1, said // 2 or 1, said, reader.last_tick}:
                assert reader.load(tick) == stored(live[tick - 1])
            timeline(reader)
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
        for left in tmp_path.iterdir():
            left.unlink()


def _crash_inside_a_commit(path: Path) -> None:
    """A file and its journal as a writer leaves them that dies between the two."""
    churn = small()
    writer = SessionWriter(path, key_every=20)
    for _ in range(TICKS):
        writer.write(churn.tick())
    db = writer._db
    assert db is not None
    # A tiny cache that may spill writes changed pages to the file before the commit.
    db.execute("PRAGMA cache_spill = 1")
    db.execute("PRAGMA cache_size = 1")
    db.execute("BEGIN IMMEDIATE")
    db.execute("UPDATE tick SET time_us = 0")
    db.execute("UPDATE frame SET state = zeroblob(900), requests = zeroblob(900)")
    file, journal = path.read_bytes(), path.with_name(path.name + "-journal").read_bytes()
    db.execute("ROLLBACK")
    writer.close()
    path.write_bytes(file)
    path.with_name(path.name + "-journal").write_bytes(journal)


def test_a_commit_that_was_cut_off_is_rolled_back_in_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "a.kvtop"
    _crash_inside_a_commit(path)
    bad = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    assert bad.execute("SELECT min(time_us) FROM tick").fetchone() == (0,)
    bad.close()
    churn = small()
    live = [churn.tick() for _ in range(TICKS)]
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert len(before) == 2
    with SessionReader(path) as reader:
        assert list(reader.snapshots()) == [stored(snapshot) for snapshot in live]
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 kB."""
    where = tmp_path / "disk"
    where.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(where)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"a small tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def test_a_full_disk_loses_no_committed_tick(small_disk: Path) -> None:
    path = small_disk / "a.kvtop"
    churn = small()
    live = []
    writer = SessionWriter(path, key_every=20)

    def fill() -> None:
        for _ in range(5000):
            live.append(churn.tick())
            writer.write(live[-1])

    with pytest.raises(DiskFullError, match="no space is left"):
        fill()
    writer.abandon("disk full")
    assert os.listdir(small_disk) == ["a.kvtop"]
    with SessionReader(path) as reader:
        assert reader.last_tick == len(live) - 1 > 50
        assert list(reader.snapshots()) == [stored(snapshot) for snapshot in live[:-1]]


def test_the_recorder_stops_with_a_plain_line_on_a_full_disk(small_disk: Path) -> None:
    recorder = Recorder(small_disk / "a.kvtop")
    recorder.start()
    churn = small()
    while offer(recorder, churn.tick()):
        assert recorder.status.ticks < 5000
    status = recorder.stop()
    assert status.state == "failed"
    assert status.reason == f"no space is left for {small_disk / 'a.kvtop'}"
    assert not recorder.offer(churn.tick())
    with SessionReader(small_disk / "a.kvtop") as reader:
        assert reader.last_tick == status.ticks


def test_a_full_disk_at_the_start(small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(380_000))
    recorder = Recorder(small_disk / "a.kvtop")
    with pytest.raises(StorageError, match="cannot write"):
        recorder.start()
    assert os.listdir(small_disk) == ["filler"]


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "a.kvtop"
    churn = small()
    writer = SessionWriter(path)
    live = [churn.tick() for _ in range(3)]
    for snapshot in live:
        writer.write(snapshot)
    writer.close()
    path.chmod(0o400)
    tmp_path.chmod(0o500)
    try:
        with SessionReader(path) as reader:
            assert list(reader.snapshots()) == [stored(snapshot) for snapshot in live]
    finally:
        tmp_path.chmod(0o700)


def test_read_only_media(tmp_path: Path) -> None:
    path = tmp_path / "disk" / "a.kvtop"
    path.parent.mkdir()
    _crash_inside_a_commit(path)
    where = str(path.parent)
    done = subprocess.run(
        ["mount", "--bind", where, where], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"a bind mount cannot be made here: {done.stderr.strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", where], check=True)
        with pytest.raises(OSError, match="Read-only"):
            (path.parent / "x").write_bytes(b"")
        with SessionReader(path) as reader:
            assert len(list(reader.snapshots())) == TICKS
    finally:
        subprocess.run(["umount", where], check=True)
