"""Stacks and block tables of a recording without a screen."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvtop.commands import record, record_beside
from kvtop.errors import KvtopError, UsageError
from kvtop.model.detail import Detail
from kvtop.model.snapshot import Engine, Finding, Snapshot
from kvtop.session.reader import SessionReader
from kvtop.session.recorder import Recorder
from kvtop.sources.stacks_spy import find_py_spy
from tests.session.common import small
from tests.session.test_commands import Stream, call

BUSY = "print('up', flush=True)\ndef hot_loop():\n  while True: pass\nhot_loop()"


@pytest.fixture
def busy() -> Iterator[int]:
    if find_py_spy() is None:
        pytest.skip("py-spy is not installed")
    with subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
        child.kill()


class Endless(Stream):
    """A snapshot every few milliseconds, until it is closed."""

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        churn = small()
        while not self.closed:
            yield churn.tick()
            await asyncio.sleep(0.02)


def run(path: Path, pid: int, seconds: float, said: list[str]) -> float:
    """Record an engine that stalls from the fifth snapshot on; how long it took."""
    count = 0

    def judge(snapshot: Snapshot) -> tuple[Finding, ...]:
        nonlocal count
        count += 1
        stall = Finding("health.stalled", "critical", 5.0, pid, "It stands still.")
        return (stall,) if count > 5 else ()

    recorder = Recorder(path)
    recorder.start()
    job = record.Job(recorder, None, judge, seconds, frozenset({"health.stalled"}))
    begin = time.monotonic()
    asyncio.run(record.record(Endless([]), job, said.append))
    took = time.monotonic() - begin
    recorder.stop(timeout_s=20)
    return took


def test_a_finding_starts_one_capture_into_the_session(
    tmp_path: Path, busy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_beside, "SECONDS", 1.0)
    said: list[str] = []
    run(tmp_path / "a", busy, 8.0, said)
    assert any("recorded" in line and "health.stalled" in line for line in said), said
    with SessionReader(tmp_path / "a") as reader:
        (capture,) = reader.captures()
        assert (capture.outcome, capture.pid, capture.why) == ("ok", busy, "health.stalled")
        assert "hot_loop" in reader.stacks_of(capture).folded
        assert len(reader.details(0, reader.last_tick)) >= 1


def test_the_end_keeps_the_stacks_so_far(tmp_path: Path, busy: int) -> None:
    said: list[str] = []
    took = run(tmp_path / "a", busy, 4.0, said)
    assert took < 20
    with SessionReader(tmp_path / "a") as reader:
        (capture,) = reader.captures()
        assert capture.outcome == "ok", said
        assert 0 < capture.seconds < 15
        assert "hot_loop" in reader.stacks_of(capture).folded


def test_what_fails_is_recorded_as_such(tmp_path: Path) -> None:
    said: list[str] = []
    run(tmp_path / "a", 2**22 + 1, 1.0, said)
    with SessionReader(tmp_path / "a") as reader:
        (capture,) = reader.captures()
        assert capture.outcome.startswith("no process 4194305")
    assert any("no stacks for health.stalled" in line for line in said)


def test_an_engine_that_does_not_answer_leaves_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: Stream, engine: Engine, request_id: str) -> Detail:
        return Detail(request_id, error="no")

    monkeypatch.setattr(Endless, "request_detail", refuse)
    run(tmp_path / "a", 2**22 + 1, 0.5, [])
    with SessionReader(tmp_path / "a") as reader:
        assert reader.details(0, reader.last_tick) == []


def test_a_word_that_means_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "open_stream", lambda options: Stream([]))
    with pytest.raises(UsageError, match="--flame-on"):
        call(record, "-o", str(tmp_path / "a"), "--flame-on", "rain")
    assert issubclass(UsageError, KvtopError)
    assert list(tmp_path.iterdir()) == []
