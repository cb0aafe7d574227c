"""A session file gives back exactly what was recorded, and refuses what is none."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtop.errors import BadDataError, KvtopError, NotFoundError, UsageError
from kvtop.model.detail import Detail
from kvtop.model.snapshot import Engine, Snapshot
from kvtop.session.format import APPLICATION_ID
from kvtop.session.reader import SessionReader
from kvtop.session.timeline import timeline
from kvtop.session.writer import SessionWriter
from tests.model.strategies import snapshots
from tests.session.common import recorded, small, stored


def test_round_trip_of_a_busy_engine(tmp_path: Path) -> None:
    path = tmp_path / "a.kvtop"
    live = recorded(path, blocks=200, requests=12)
    assert any(r.preemptions for s in live for r in s.engines[0].requests or ())
    with SessionReader(path) as reader:
        assert list(reader.snapshots()) == [stored(snapshot) for snapshot in live]


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(snapshots(), min_size=1, max_size=5), st.integers(1, 3))
def test_round_trip_of_anything(tmp_path: Path, live: list[Snapshot], key_every: int) -> None:
    path = tmp_path / "a.kvtop"
    path.unlink(missing_ok=True)
    writer = SessionWriter(path, key_every=key_every)
    for snapshot in live:
        writer.write(snapshot)
    writer.close()
    with SessionReader(path) as reader:
        assert list(reader.snapshots()) == [stored(snapshot) for snapshot in live]


def test_random_access_equals_playing_through(tmp_path: Path) -> None:
    path = tmp_path / "a.kvtop"
    live = recorded(path, 90)
    order = list(range(1, 91)) * 2
    random.Random(3).shuffle(order)
    with SessionReader(path) as reader:
        for number, tick in enumerate(order):
            columns = number % 3 != 0
            want = stored(live[tick - 1])
            got = reader.load(tick, columns=columns)
            if not columns:
                assert all(pool.states is None for e in got.engines for pool in e.pools)
                assert got.engines[0].requests == want.engines[0].requests
            else:
                assert got == want


def test_by_time(tmp_path: Path) -> None:
    path = tmp_path / "a.kvtop"
    live = recorded(path, 50)
    with SessionReader(path) as reader:
        assert reader.snapshot_at(live[10].time_s + 0.2) == stored(live[10])
        assert reader.snapshot_at(0.0) == stored(live[0])
        assert reader.snapshot_at(1e18) == stored(live[-1])
        assert reader.tick_at_percent(0) == 1
        assert reader.tick_at_percent(100) == 50
        assert 20 <= reader.tick_at_percent(50) <= 30
        with pytest.raises(BadDataError, match="no tick 51"):
            reader.load(51)


def test_it_describes_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.kvtop"
    recorded(path, 3)
    head = path.read_bytes()[:100]
    assert int.from_bytes(head[68:72], "big") == APPLICATION_ID
    assert path.stat().st_mode & 0o777 == 0o600
    with SessionReader(path) as reader:
        assert reader.info.closed_reason == "stopped"
        assert reader.info.interval_s == 1.0
        assert [marker.note for marker in reader.markers()] == ["half"]


def test_anyone_can_query_it(tmp_path: Path) -> None:
    path = tmp_path / "a.kvtop"
    live = recorded(path, 40)
    db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    rows = db.execute("SELECT blocks_used, blocks_free, time_utc FROM engine ORDER BY tick")
    counts = [snapshot.engines[0].blocks for snapshot in live]
    got = rows.fetchall()
    assert [(row[0], row[1]) for row in got] == [(c.used, c.free) for c in counts if c is not None]
    assert got[0][2].startswith("2025-11-29T22:05:0")
    (peak,) = db.execute("SELECT max(mem_used_bytes) FROM gpu").fetchone()
    assert peak == max(s.gpus[0].mem_used_bytes or 0 for s in live)
    ids = {row[0] for row in db.execute("SELECT id FROM request")}
    assert ids == {r.id for s in live for r in s.engines[0].requests or ()}
    db.close()


def test_sums_over_requests(tmp_path: Path) -> None:
    path = tmp_path / "a.kvtop"
    live = recorded(path, 60)
    want: dict[str, int] = {}
    for snapshot in live:
        for request in snapshot.engines[0].requests or ():
            want[request.id] = max(want.get(request.id, 0), request.blocks or 0)
    with SessionReader(path) as reader:
        got = dict(reader.sql("SELECT id, peak_blocks FROM request"))
    assert got == want


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.kvtop"
    path.write_bytes(b"precious")
    with pytest.raises(UsageError, match="already there"):
        SessionWriter(path)
    assert path.read_bytes() == b"precious"


def test_a_growing_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "a.kvtop"
    churn = small()
    writer = SessionWriter(path)
    live = [churn.tick()]
    writer.write(live[0])
    with SessionReader(path) as reader:
        for _ in range(30):
            live.append(churn.tick())
            writer.write(live[-1])
            assert reader.refresh()
            assert reader.load(reader.last_tick) == stored(live[-1])
        assert not reader.refresh()
        assert not reader.closed()
        assert writer.waiting == 0
        writer.close()
        assert reader.closed()
    assert os.listdir(tmp_path) == ["a.kvtop"]


def test_a_reader_that_keeps_the_file_locked_delays_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.kvtop"
    churn = small()
    writer = SessionWriter(path)
    live = [churn.tick()]
    writer.write(live[0])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN")
    other.execute("SELECT count(*) FROM tick").fetchone()
    for _ in range(3):
        live.append(churn.tick())
        writer.write(live[-1])
    assert writer.waiting == 3
    other.execute("COMMIT")
    live.append(churn.tick())
    writer.write(live[-1])
    assert writer.waiting == 0
    writer.close()
    other.close()
    with SessionReader(path) as reader:
        assert list(reader.snapshots()) == [stored(snapshot) for snapshot in live]


def test_reading_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.kvtop"
    recorded(path, 30)
    before = (path.read_bytes(), path.stat().st_mtime_ns)
    with SessionReader(path) as reader:
        list(reader.snapshots())
        timeline(reader)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert os.listdir(tmp_path) == ["a.kvtop"]


def _foreign(tmp_path: Path) -> dict[str, Path]:
    good = tmp_path / "good.kvtop"
    recorded(good, 40)
    data = good.read_bytes()
    out = {name: tmp_path / f"{name}.kvtop" for name in ("text", "empty", "cut", "head", "half")}
    out["text"].write_text("hello " * 100)
    out["empty"].write_bytes(b"")
    out["cut"].write_bytes(data[: len(data) - 9000])
    out["half"].write_bytes(data[: len(data) // 2])
    out["head"].write_bytes(data[:60])
    for name, place, value in (("newer", 63, 99), ("other", 68, 1)):
        out[name] = tmp_path / f"{name}.kvtop"
        changed = bytearray(data)
        changed[place] = value
        out[name].write_bytes(changed)
    out["schema"] = tmp_path / "schema.kvtop"
    shutil.copy(good, out["schema"])
    db = sqlite3.connect(out["schema"])
    db.execute("UPDATE meta SET value = 99 WHERE name = 'model_schema'")
    db.commit()
    db.close()
    out["sqlite"] = tmp_path / "sqlite.kvtop"
    db = sqlite3.connect(out["sqlite"])
    db.execute("CREATE TABLE t(x)")
    db.commit()
    db.close()
    out["directory"] = tmp_path / "directory.kvtop"
    out["directory"].mkdir()
    out["fifo"] = tmp_path / "fifo.kvtop"
    os.mkfifo(out["fifo"])
    return out


def test_what_is_no_session_is_refused_and_left_alone(tmp_path: Path) -> None:
    for name, path in _foreign(tmp_path).items():
        before = path.read_bytes() if path.is_file() else None
        with pytest.raises(BadDataError) as caught:
            SessionReader(path)
        assert str(path) in caught.value.line(), name
        assert "\n" not in caught.value.line()
        if name in ("newer", "schema"):
            assert "upgrade kvtop" in caught.value.line()
        if before is not None:
            assert path.read_bytes() == before
    with pytest.raises(NotFoundError, match="no such file"):
        SessionReader(tmp_path / "missing.kvtop")


def test_flipped_bytes_never_raise_anything_but_a_plain_error(tmp_path: Path) -> None:
    good = tmp_path / "good.kvtop"
    recorded(good, 30)
    data = good.read_bytes()
    rnd = random.Random(5)
    for _ in range(60):
        changed = bytearray(data)
        for _ in range(rnd.choice((1, 5, 100))):
            changed[rnd.randrange(100, len(changed))] = rnd.randrange(256)
        path = tmp_path / "bad.kvtop"
        path.write_bytes(changed)
        with contextlib.suppress(KvtopError), SessionReader(path) as reader:
            for tick in range(reader.first_tick, min(reader.last_tick, 40) + 1):
                reader.load(tick)
            timeline(reader)


def test_wrong_json_in_frames_is_damage(tmp_path: Path) -> None:
    from kvtop.session.delta import deflate

    for text in (b"{}", b"[1]", b"[{}]", b'[{"gpus":3}]', b"nonsense", b'[{"a":' + b"[" * 2000):
        path = tmp_path / "a.kvtop"
        recorded(path, 3)
        db = sqlite3.connect(path)
        db.execute("UPDATE frame SET state = ? WHERE tick = 1", (deflate(text),))
        db.commit()
        db.close()
        with SessionReader(path) as reader, pytest.raises(BadDataError, match="damaged at tick 1"):
            reader.load(1)
        path.unlink()


def test_details_that_were_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "a.kvtop"
    churn = small()
    writer = SessionWriter(path)
    writer.write(churn.tick())
    seen = Detail("r1", 7, ((0, 16, (4, 5)),), ((1, 2),), {5: ("r2",)})
    writer.detail(churn.pid, seen)
    writer.write(churn.tick())
    writer.close()
    with SessionReader(path) as reader:
        again = reader.detail(churn.pid, "r1", 2)
        assert again.age_s == reader.last_s - reader.first_s > 0.9
        assert replace(again, age_s=None) == seen
        assert reader.detail(churn.pid, "r1", 1).age_s == 0
        assert "not recorded" in reader.detail(churn.pid, "r9", 2).error


def test_the_timeline(tmp_path: Path) -> None:
    path = tmp_path / "a.kvtop"
    churn = small(blocks=200, requests=12)
    writer = SessionWriter(path, 1.0)
    want: list[int] = []
    last = 0
    for tick in range(1, 101):
        snapshot = churn.tick()
        if tick == 60:
            churn.pid += 1
        if tick == 80:
            churn.now_s += 100
            churn.mono_s += 100
        writer.write(snapshot)
        total = churn.count["preemptions"]
        if total > last and tick > 1:
            want.append(tick)
        last = total
    writer.close()
    with SessionReader(path) as reader:
        events = timeline(reader)
    assert [event.tick for event in events if event.kind == "preemption"] == want
    assert [event.tick for event in events if event.kind == "restart"] == [61]
    assert [event.tick for event in events if event.kind == "gap"] == [81]


def test_engines_that_come_and_go(tmp_path: Path) -> None:
    path = tmp_path / "a.kvtop"
    churn = small()
    live = []
    for tick in range(40):
        snapshot = churn.tick()
        if tick % 7 == 3:
            snapshot = dataclasses.replace(snapshot, engines=())
        elif tick % 7 == 5:
            bare = Engine(None, None, "127.0.0.1:9")
            snapshot = dataclasses.replace(snapshot, engines=(bare, *snapshot.engines))
        live.append(snapshot)
    writer = SessionWriter(path, key_every=15)
    for snapshot in live:
        writer.write(snapshot)
    writer.close()
    with SessionReader(path) as reader:
        assert list(reader.snapshots()) == [stored(snapshot) for snapshot in live]


def test_a_recording_that_ended_before_its_first_tick_is_said_to_be_empty(
    tmp_path: Path,
) -> None:
    SessionWriter(tmp_path / "a.kvtop", 1.0).close("no space is left")
    with pytest.raises(BadDataError, match="nothing was recorded"):
        SessionReader(tmp_path / "a.kvtop")
