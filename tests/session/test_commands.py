"""The commands on session files, and the headless recorder on a stream of our own."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sqlite3
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvtop.commands import diff, export, record, replay, report
from kvtop.errors import BadDataError, ExitCode, NotFoundError, StorageError, UsageError
from kvtop.model.detail import Detail
from kvtop.model.snapshot import Engine, Snapshot
from kvtop.session.reader import SessionReader
from tests.session.common import recorded, small, stored


def call(module: ModuleType, *words: str) -> int:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    code: int = module.run(parser.parse_args(words))
    return code


class Stream:
    """Snapshots as fast as they are taken, then silence."""

    def __init__(self, live: list[Snapshot]) -> None:
        self.live = live
        self.closed = False
        self.asked: list[str] = []

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        for snapshot in self.live:
            yield snapshot
            await asyncio.sleep(0.002)
        await asyncio.Event().wait()

    async def request_detail(self, engine: Engine, request_id: str) -> Detail:
        self.asked.append(request_id)
        return Detail(request_id, step=7, tables=((0, 16, (5, 6)),), refs=((1, 2),))

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    churn = small()
    made = Stream([churn.tick() for _ in range(30)])
    monkeypatch.setattr(record, "open_stream", lambda options: made)
    return made


def test_record_for_a_while(
    tmp_path: Path, stream: Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.kvtop"
    assert call(record, "-o", str(path), "--for", "1s") == ExitCode.OK
    said = capsys.readouterr()
    assert said.out == ""
    assert "30 snapshots" in said.err
    assert stream.closed
    with SessionReader(path) as reader:
        assert list(reader.snapshots()) == [stored(snapshot) for snapshot in stream.live]
        assert reader.closed()


def test_record_anonymized(tmp_path: Path, stream: Stream) -> None:
    path = tmp_path / "a.kvtop"
    assert call(record, "-o", str(path), "--for", "1s", "--anonymize", "--quiet") == ExitCode.OK
    with SessionReader(path) as reader:
        assert reader.info.anonymized
        assert reader.load(1).engines[0].model == "model-1"


def test_record_a_black_box(
    tmp_path: Path, stream: Stream, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, snapshot in enumerate(stream.live):
        if number == 20:
            stream.live[number] = Snapshot(snapshot.time_s, snapshot.mono_s, "h", "v")
    words = ("--blackbox", "10m", "--blackbox-dir", str(tmp_path), "--for", "1s")
    assert call(record, *words, "--trigger", "none") == ExitCode.OK
    assert "is gone" in capsys.readouterr().err
    (path,) = tmp_path.iterdir()
    with SessionReader(path) as reader:
        assert reader.last_tick == 21


@pytest.mark.parametrize(
    "words",
    [
        ("--for", "soon"),
        ("--max-size", "big"),
        ("--rotate",),
        ("--blackbox", "x"),
    ],
)
def test_record_wrong_options(tmp_path: Path, stream: Stream, words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError):
        call(record, "-o", str(tmp_path / "a.kvtop"), *words)
    assert list(tmp_path.iterdir()) == []


def test_record_does_not_overwrite(tmp_path: Path, stream: Stream) -> None:
    path = tmp_path / "a.kvtop"
    path.write_text("mine")
    with pytest.raises(UsageError, match="already there"):
        call(record, "-o", str(path))
    assert path.read_text() == "mine"
    with pytest.raises(NotFoundError):
        call(record, "-o", str(tmp_path / "no" / "a.kvtop"))


def test_record_says_when_the_disk_fails(
    tmp_path: Path, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtop.session.writer import SessionWriter

    write = SessionWriter.write

    def fail(self: SessionWriter, snapshot: Snapshot) -> None:
        if self.ticks == 5:
            raise StorageError("the disk is gone")
        write(self, snapshot)

    monkeypatch.setattr(SessionWriter, "write", fail)
    with pytest.raises(StorageError, match="what was recorded is safe") as caught:
        call(record, "-o", str(tmp_path / "a.kvtop"), "--for", "10s")
    assert "5 snapshots" in caught.value.line()


def test_replay_prints_one_moment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.kvtop"
    live = recorded(path, 30)
    assert call(replay, str(path), "--json", "--at", "0%") == ExitCode.OK
    out = json.loads(capsys.readouterr().out)
    assert out["time"] == live[0].time_s
    assert out["engines"][0]["blocks"]["total"] == 300
    with pytest.raises(UsageError, match="outside the recording"):
        call(replay, str(path), "--text", "--at", "+3h")
    assert call(replay, str(path), "--text") == ExitCode.OK
    assert "engine 0" in capsys.readouterr().out
    with pytest.raises(UsageError, match="needs a terminal"):
        call(replay, str(path))
    with pytest.raises(UsageError, match="--speed"):
        call(replay, str(path), "--speed", "100")


def test_a_pipe_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path / "a.kvtop", 10)

    class Pipe:
        buffer = io.BytesIO((tmp_path / "a.kvtop").read_bytes())

    monkeypatch.setattr(sys, "stdin", Pipe())
    assert call(export, "-", "--csv", "--table", "gpu") == ExitCode.OK
    assert capsys.readouterr().out.count("\n") == 11
    Pipe.buffer = io.BytesIO(b"")
    with pytest.raises(BadDataError, match="nothing came"):
        call(export, "-", "--csv")
    Pipe.buffer = io.BytesIO(b"hello")
    with pytest.raises(BadDataError, match="not a kvtop session"):
        call(export, "-", "--csv")


def test_export_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "a.kvtop")
    recorded(Path(path), 10)
    assert call(export, path, "--json", "--table", "engine") == ExitCode.OK
    assert len(capsys.readouterr().out.splitlines()) == 10
    out = tmp_path / "trace.json"
    assert call(export, path, "--perfetto", "-o", str(out)) == ExitCode.OK
    assert json.loads(out.read_text())["traceEvents"]
    hidden = tmp_path / "b.kvtop"
    assert call(export, path, "--session", "--anonymize", "-o", str(hidden)) == ExitCode.OK
    assert b"chatcmpl-" not in hidden.read_bytes()
    with pytest.raises(UsageError, match="no table"):
        call(export, path, "--csv", "--table", "x", "-o", str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()
    with pytest.raises(UsageError, match="this form is not text"):
        call(export, path, "--session")


def test_report_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "a.kvtop")
    recorded(Path(path), 10)
    out = tmp_path / "out.html"
    assert call(report, path, "--html", str(out)) == ExitCode.OK
    assert capsys.readouterr().out == ""
    assert out.read_text().startswith("<!doctype html>")
    assert call(report, path, "--md") == ExitCode.OK
    assert capsys.readouterr().out.startswith("# kvtop report")
    with pytest.raises(UsageError, match="already there"):
        call(report, path, "--html", str(out))


def test_diff_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "a.kvtop")
    live = recorded(Path(path), 40)
    assert call(diff, path, "--json") == ExitCode.OK
    out = json.loads(capsys.readouterr().out)
    assert (out["before"], out["after"]) == (live[0].time_s, live[-1].time_s)
    assert call(diff, f"{path}@0%", f"{path}@+5s") == ExitCode.OK
    assert "steps" in capsys.readouterr().out
    with pytest.raises(UsageError, match="same moment"):
        call(diff, path, path)
    with pytest.raises(UsageError, match="not a moment"):
        call(diff, f"{path}@teatime")
    with pytest.raises(UsageError, match="outside the recording"):
        call(diff, f"{path}@+3h")


@pytest.mark.parametrize(
    ("module", "words"),
    [(replay, ("--json",)), (export, ("--csv",)), (report, ()), (diff, ())],
)
def test_bad_files_give_one_plain_line(tmp_path: Path, module: Any, words: tuple[str, ...]) -> None:
    path = tmp_path / "a.kvtop"
    path.write_text("no session")
    with pytest.raises(BadDataError, match="not a kvtop session"):
        call(module, str(path), *words)
    with pytest.raises(NotFoundError):
        call(module, str(tmp_path / "missing"), *words)
    recorded(tmp_path / "b.kvtop", 5)
    db = sqlite3.connect(tmp_path / "b.kvtop")
    db.execute("PRAGMA user_version = 9")
    db.close()
    with pytest.raises(BadDataError, match="newer kvtop"):
        call(module, str(tmp_path / "b.kvtop"), *words)
