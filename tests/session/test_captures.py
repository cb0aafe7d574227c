"""Whole stacks in a recording: stored, found again by moment, exported, without names."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from pathlib import Path

import pytest

from kvtop.cli import main
from kvtop.errors import BadDataError, KvtopError
from kvtop.flame.capture import Capture, Plan
from kvtop.flame.folded import parse
from kvtop.flame.record import failed, folded_of, recorded
from kvtop.model.capture import StackCapture
from kvtop.session import export, schema, tables
from kvtop.session.anonymize import Anonymizer
from kvtop.session.format import FORMAT
from kvtop.session.reader import SessionReader
from kvtop.session.timeline import timeline
from kvtop.session.writer import SessionWriter
from tests.session.common import small, stored

STACKS = (
    'process 4740:"VLLM::EngineCore";thread (4740): MainThread;run_busy_loop'
    " (vllm/v1/engine/core.py:1550);schedule (vllm/v1/core/sched/scheduler.py:300) 40\n"
    'process 4740:"VLLM::EngineCore";process 4741:"/home/bob/bin/python --model'
    ' /data/secret-lab/Acme; x";thread (4741): gpu-node-17 pool;run'
    " (/home/bob/app/serve_acme.py:3);select (selectors.py:4) 2\n"
)


def capture(folded: str = STACKS, why: str = "", at: float = 100.0) -> StackCapture:
    plan = Plan(4740, seconds=30, rate_hz=200)
    taken = Capture(plan, parse(folded), at, 29.5, 42, 3)
    return recorded(taken, why)


def written(path: Path, *taken: tuple[int, StackCapture]) -> list[float]:
    """A session of 30 ticks with captures that end at these ticks; the times of the ticks."""
    churn = small()
    writer = SessionWriter(path, 1.0, key_every=10)
    times = []
    for tick in range(1, 31):
        snapshot = churn.tick()
        times.append(snapshot.time_s)
        writer.write(snapshot)
        for at, one in taken:
            if at == tick:
                writer.capture(one)
    writer.close()
    return times


def test_stacks_come_back_as_they_were(tmp_path: Path) -> None:
    first, second = capture(at=100.25), capture("main (a.py:1) 7\n", "health.stalled", 200.5)
    none = failed(Plan(4740), 300.0, KvtopError("no rights", "be root"), "health.stalled")
    times = written(tmp_path / "a", (5, first), (9, none), (20, second))
    with SessionReader(tmp_path / "a") as reader:
        found = reader.captures()
        assert [one.tick for one in found] == [5, 9, 20]
        assert [one.folded for one in found] == ["", "", ""]
        again = reader.stacks_of(found[0])
        assert again.pids == (4740, 4741)
        assert (again.time_s, again.seconds, again.rate_hz) == (100.25, 29.5, 200)
        assert (again.samples, again.errors, again.mode) == (42, 3, "non-blocking")
        assert again.folded == first.folded
        assert dict(folded_of(again, "").stacks) == dict(parse(STACKS).stacks)
        assert reader.stacks_of(found[2]).folded == second.folded
        assert found[1].outcome == "no rights; be root"
        assert reader.stacks_of(found[1]).folded == ""
        assert [one.tick for one in reader.captures(last_tick=19)] == [5, 9]
        events = [event for event in timeline(reader) if event.kind == "stacks"]
        assert [e.time_s for e in events] == pytest.approx([times[4], times[8], times[19]])
        assert "42 samples in 30 s" in events[0].text
        assert "no rights" in events[1].text


def test_the_whole_table_as_csv_and_json(tmp_path: Path) -> None:
    written(tmp_path / "a", (5, capture()), (9, failed(Plan(1), 1.0, KvtopError("gone"))))
    with SessionReader(tmp_path / "a") as reader:
        rows = list(csv.DictReader(io.StringIO("".join(export.csv_text(reader, "capture")))))
        assert [row["outcome"] for row in rows] == ["ok", "gone"]
        assert parse(rows[0]["folded"]).rows == parse(STACKS).rows
        assert rows[1]["folded"] == ""
        (line, _) = list(export.json_text(reader, "capture"))
        assert parse(json.loads(line)["folded"]).rows == parse(STACKS).rows


def test_no_name_is_left(tmp_path: Path) -> None:
    written(tmp_path / "a", (5, capture()))
    hide = Anonymizer([("host", "gpu-node-17")])
    with SessionReader(tmp_path / "a") as reader:
        shown = "".join(export.json_text(reader, "capture", hide))
        export.session(reader, tmp_path / "b", tables.warm_anonymizer(reader))
    with SessionReader(tmp_path / "b") as reader:
        (kept,) = reader.captures()
        again = reader.stacks_of(kept).folded
    for text in (shown, again):
        for secret in ("bob", "secret-lab", "Acme", "gpu-node-17", "serve_acme"):
            assert secret not in text, secret
        assert "VLLM::EngineCore" in text
        assert "schedule (vllm/v1/core/sched/scheduler.py:300)" in text
    assert sum(count for _, count in parse(again).rows) == 42


@pytest.mark.parametrize(
    "stack",
    [
        "",
        ";;;",
        "process",
        'process 1:"',
        'process 1:"bob";',
        'process 1:"a;process 2:"bob";thread (3): bob;f (/home/bob/x.py:1)',
        'process 1:"x";thread (bob',
        "f (/home/bob/a.py)",
        "f (/home/bob/a (1).py:7)",
        "thread (7): bob;g (b.py:1)",
        "\x1b[31m (/home/bob/\x00.py:1)",
    ],
)
def test_broken_stacks_leak_nothing(stack: str) -> None:
    shown = Anonymizer([("user", "bob")]).stack(stack)
    assert "bob" not in shown
    assert "\n" not in shown


def test_too_many_stacks_lose_the_rare_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtop.flame.record.MAX_RECORDED", 2000)
    rows = [f"main (a.py:1);f{n} (b.py:{n}) {n}" for n in range(1, 200)]
    kept = capture("\n".join(rows))
    assert kept.left_out > 100
    assert len(kept.folded) <= 2000
    counts = [count for _, count in parse(kept.folded).rows]
    assert min(counts) == 200 - len(counts)


def test_a_file_of_the_format_before_has_none(tmp_path: Path) -> None:
    churn = small()
    live = [churn.tick() for _ in range(5)]
    writer = SessionWriter(tmp_path / "a", 1.0)
    for snapshot in live:
        writer.write(snapshot)
    writer.close()
    db = sqlite3.connect(tmp_path / "a")
    db.execute("DROP VIEW capture")
    db.execute("DROP TABLE flame_capture")
    db.execute("PRAGMA user_version = 1")
    text = json.dumps({"step": 3, "tables": [[0, 16, [1]]], "refs": [[1]], "shared_with": {}})
    db.execute("INSERT INTO detail VALUES (2, 4740, 'r1', ?)", (text,))
    db.commit()
    db.close()
    with SessionReader(tmp_path / "a") as reader:
        assert list(reader.snapshots()) == [stored(snapshot) for snapshot in live]
        assert reader.captures() == []
        assert timeline(reader) == []
        assert reader.detail(4740, "r1", 3).tables == ((0, 16, (1,)),)
        (head,) = csv.reader(io.StringIO("".join(export.csv_text(reader, "capture"))))
        assert head[-1] == "folded"
        assert export.session(reader, tmp_path / "b") == 5


def test_damage_is_one_plain_line(tmp_path: Path) -> None:
    written(tmp_path / "a", (5, capture()))
    db = sqlite3.connect(tmp_path / "a")
    (packed,) = db.execute("SELECT folded FROM flame_capture").fetchone()
    for bad in (packed[:-9], b"x" + packed, "text"):
        db.execute("UPDATE flame_capture SET folded = ?", (bad,))
        db.commit()
        with SessionReader(tmp_path / "a") as reader:
            (kept,) = reader.captures()
            with pytest.raises(BadDataError, match="damaged at the capture at tick 5"):
                reader.stacks_of(kept)
    db.execute("UPDATE flame_capture SET pids = 'x'")
    db.commit()
    db.close()
    with SessionReader(tmp_path / "a") as reader, pytest.raises(BadDataError, match="captures"):
        reader.captures()


@pytest.mark.parametrize(
    ("column", "value"), [("time_us", 1e300), ("seconds", float("inf")), ("seconds", "inf")]
)
def test_a_number_that_cannot_be_is_no_fault_of_kvtop(
    tmp_path: Path, column: str, value: object
) -> None:
    path = tmp_path / "a"
    written(path, (5, capture()))
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE flame_capture SET {column} = ?", (value,))
    for words in (["report", str(path), "--anonymize"], ["export", str(path), "--perfetto"]):
        assert main(words) in (0, 6)


def test_the_ring_forgets_old_stacks(tmp_path: Path) -> None:
    writer = SessionWriter(tmp_path / "a", 1.0, key_every=5)
    churn = small()
    for tick in range(1, 31):
        snapshot = churn.tick()
        writer.write(snapshot)
        if tick in (3, 27):
            writer.capture(capture())
    writer.trim(snapshot.time_s - 10)
    writer.dump(tmp_path / "b", "test")
    writer.close()
    with SessionReader(tmp_path / "b") as reader:
        assert [one.tick for one in reader.captures()] == [27]


def test_format_and_schema_go_together() -> None:
    assert FORMAT == 2
    assert "flame_capture" in schema.TABLES_SQL


def test_a_report_shows_them_and_no_name_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none = failed(Plan(4740), 300.0, KvtopError("no rights", "be root"))
    written(tmp_path / "a", (5, capture(why="health.stalled")), (9, none))
    assert main(["report", str(tmp_path / "a"), "--html", str(tmp_path / "r.html"), "--md"]) == 0
    for text in (capsys.readouterr().out, (tmp_path / "r.html").read_text()):
        assert "Flame graphs" in text
        assert "for health.stalled" in text
        assert "42 samples in 30 s, busy threads only" in text
        assert "(up to 5,900 looks, 200 a second)" in text
        assert "3 unreadable" in text
        assert "waiting is left out: shares are of busy samples, not of time" in text
        assert "schedule" in text
        assert "no stacks: no rights; be root" in text
    assert "95.2 %" in text
    assert "serve_acme" in text
    assert main(["report", str(tmp_path / "a"), "--anonymize", "--html", "-"]) == 0
    shown = capsys.readouterr().out
    assert "schedule" in shown
    for secret in ("bob", "secret-lab", "Acme", "gpu-node-17", "serve_acme"):
        assert secret not in shown, secret


def test_the_viewer_opens_the_last_of_a_session(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "a", (5, capture()), (9, capture("only_here (a.py:1) 7\n")))
    written(tmp_path / "b")
    assert main(["flame", "--view", str(tmp_path / "a")]) == 0
    shown = capsys.readouterr().out
    assert "only_here" in shown
    assert "7 samples" in shown
    assert main(["flame", "--view", str(tmp_path / "b")]) == 6
    assert "no flame graph was recorded in" in capsys.readouterr().err
