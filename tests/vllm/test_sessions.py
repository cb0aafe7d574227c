"""A session of a real vLLM: what is replayed is what was live, snapshot by snapshot."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvtop.commands.record_beside import Beside
from kvtop.config import Options
from kvtop.detect.judge import Judge
from kvtop.detect.thresholds import apply_overrides
from kvtop.errors import KvtopError
from kvtop.flame.capture import Plan, Recording
from kvtop.flame.folded import parse
from kvtop.flame.record import recorded
from kvtop.model.detail import Detail
from kvtop.model.snapshot import Engine, Finding, Snapshot
from kvtop.session.reader import SessionReader
from kvtop.session.recorder import Recorder
from kvtop.session.replay import Replay
from kvtop.session.timeline import timeline
from kvtop.session.walk import Walk
from kvtop.sources.base import SystemClock
from kvtop.stream.live import Live
from kvtop.stream.target import Target
from tests.faults.conftest import PLUGIN
from tests.faults.watching import Faults, LoadThread, long_requests
from tests.session.common import stored
from tests.vllm.server import Server, check_identities, make_model

pytestmark = pytest.mark.vllm

SECONDS = 50
BLOCKS = 64


@dataclass
class Session:
    """What was seen live while it was recorded."""

    path: Path
    snapshots: list[Snapshot] = field(default_factory=list)
    findings: list[tuple[Finding, ...]] = field(default_factory=list)
    details: list[tuple[int, int | None, Detail]] = field(default_factory=list)
    """Number of the snapshot before, engine pid, and the table as the probe gave it."""
    folded: str = ""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sessions")


@pytest.fixture(scope="module")
def server(python: str, place: Path) -> Iterator[Server]:
    """A small pool, so that there are preemptions; a stall can be switched on."""
    server = Server(
        python,
        make_model(python, place / "model"),
        place / "server",
        ["--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "16"],
        {
            "KVTOP_FAULT": "stall",
            "KVTOP_FAULT_DIR": str(place),
            "PYTHONPATH": str(PLUGIN),
        },
    )
    try:
        yield server.wait()
    finally:
        server.stop()


class _Kept:
    """A recorder that also remembers what it was given."""

    def __init__(self, recorder: Recorder, live: Session) -> None:
        self._recorder, self._live = recorder, live

    def detail(self, engine_pid: int | None, detail: Detail) -> None:
        if self._recorder.detail(engine_pid, detail):
            self._live.details.append((len(self._live.snapshots), engine_pid, detail))

    def capture(self, capture: object) -> None:
        raise AssertionError("no finding asks for stacks here")


async def _record(server: Server, live: Session) -> None:
    options = Options(interval_s=0.5, url=server.url, gpus=False, stacks=True)
    stream = Live(options, Target(socket_dir=server.sockets))
    recorder = Recorder(live.path, interval_s=0.5)
    recorder.start()
    judge = Judge(apply_overrides({}))
    beside = Beside([_Kept(recorder, live)], stream, frozenset(), lambda _: None)
    end = time.monotonic() + SECONDS
    taking: asyncio.Task[None] | None = None

    async def take(engine: Engine) -> None:
        assert engine.pid is not None
        capture = await Recording(Plan(engine.pid, 4.0, 50)).run()
        kept = recorded(capture)
        live.folded = kept.folded
        assert recorder.capture(kept)

    try:
        async for snapshot in stream.snapshots():
            assert recorder.offer(snapshot)
            live.snapshots.append(snapshot)
            findings = judge.judge(snapshot)
            live.findings.append(findings)
            beside.take(snapshot, findings)
            if taking is None and any(e.requests for e in snapshot.engines):
                taking = asyncio.ensure_future(take(snapshot.engines[0]))
            if len(live.snapshots) == 8:
                assert recorder.marker(snapshot.time_s, "eight")
            if time.monotonic() > end:
                break
        assert taking is not None
        await taking
    finally:
        await beside.close()
        await stream.close()
        status = recorder.stop(timeout_s=20)
    assert (status.state, status.dropped, status.ticks) == ("stopped", 0, len(live.snapshots))


@pytest.fixture(scope="module")
def live(server: Server, place: Path) -> Session:
    """Mixed load with preemptions, recorded and remembered."""
    live = Session(place / "live.kvtop")
    with LoadThread(server.url, 3, gaps=False, slots=3), long_requests(server.url, 10):
        asyncio.run(_record(server, live))
    return live


def test_every_snapshot_comes_back_as_it_was(live: Session) -> None:
    busy = [s for s in live.snapshots if any(e.requests for e in s.engines)]
    assert len(busy) > 10
    assert any(s.stacks for s in live.snapshots)
    last = live.snapshots[-1].engines[0].counters
    assert last is not None
    assert (last.preemptions or 0) > 0
    with SessionReader(live.path) as reader:
        again = list(reader.snapshots())
    assert len(again) == len(live.snapshots)
    for number, (one, other) in enumerate(zip(live.snapshots, again, strict=True)):
        assert other == stored(one), f"snapshot {number}"
        for engine in other.engines:
            if engine.pools and engine.probe and engine.probe.point == "boundary":
                check_identities(engine, BLOCKS)


def test_findings_are_judged_again_to_the_same(live: Session) -> None:
    limits = apply_overrides({})
    walk = Walk(live.path, lambda: Judge(limits).judge)
    try:
        for number, wanted in enumerate(live.findings, start=1):
            for _ in walk.to(number):
                pass
            told = {(f.rule, f.engine_pid, f.severity) for f in walk.findings}
            assert told == {(f.rule, f.engine_pid, f.severity) for f in wanted}, number
    finally:
        walk.close()


async def test_block_tables_and_stacks_come_back(live: Session) -> None:
    assert len({detail.request_id for _, _, detail in live.details}) >= 2
    with SessionReader(live.path) as reader:
        replay = Replay(reader, SystemClock(), playing=False)
        for number, pid, detail in live.details:
            # The recorder stores it at the last tick that it had written.
            found = reader.detail(pid, detail.request_id, min(number + 2, reader.last_tick))
            assert not found.error
            assert found.tables == detail.tables or found.age_s is not None
            assert any(
                other.tables == found.tables and other.step == found.step
                for _, _, other in live.details
                if other.request_id == detail.request_id
            )
        engine = live.snapshots[-1].engines[0]
        unknown = await replay.request_detail(engine, "nobody")
        assert "not recorded" in unknown.error
        (capture,) = reader.captures()
        stacks = reader.stacks_of(capture)
        assert parse(stacks.folded).rows == parse(live.folded).rows
        assert engine.pid in stacks.pids
        assert {event.kind for event in timeline(reader)} >= {"marker", "stacks", "preemption"}


def kvtop(*words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it."""
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-m", "kvtop", *words],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, "PYTHONPATH": root},
    )


def test_the_commands_read_it(live: Session, place: Path) -> None:
    file = str(live.path)
    shown = kvtop("replay", file, "--json", "--at", "50%")
    assert shown.returncode == 0, shown.stderr
    at = json.loads(shown.stdout)
    assert any(one.time_s == at["time"] for one in live.snapshots)
    assert kvtop("replay", file, "--text").returncode == 0
    report = kvtop("report", file, "--md", "--html", str(place / "r.html"), "--anonymize")
    assert report.returncode == 0, report.stderr
    assert "## Flame graphs" in report.stdout
    trace = kvtop("export", file, "--perfetto")
    assert len(json.loads(trace.stdout)["traceEvents"]) > 4 * len(live.snapshots)
    table = kvtop("export", file, "--csv", "--table", "capture")
    assert "run_busy_loop" in table.stdout
    assert kvtop("diff", file).returncode == 0


def wait_until_seen(path: Path, limit_s: float = 60.0) -> None:
    """Until a recording that is being written has three looks at working requests."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        with contextlib.suppress(KvtopError), SessionReader(path) as reader:
            working = [shot for shot in reader.snapshots() if any(e.requests for e in shot.engines)]
            if len(working) >= 3:
                return
        time.sleep(0.5)
    raise AssertionError("the recorder never saw a request")


def test_a_stall_is_recorded_with_its_stacks_and_without_a_screen(
    server: Server, place: Path
) -> None:
    path = place / "stall.kvtop"
    faults = Faults(place)
    root = str(Path(__file__).parents[2])
    with (
        long_requests(server.url, 3),
        subprocess.Popen(
            [
                *(sys.executable, "-m", "kvtop", "record", "-o", str(path), "--url", server.url),
                *("--no-gpus", "--no-stacks", "--flame-on", "stall"),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": root, "KVTOP_DIR": str(server.sockets)},
        ) as child,
    ):
        assert child.stderr is not None
        # The recorder must have seen the engine at work: one that hangs inside a scheduler
        # call from the first look on lets its probe tell nothing.
        wait_until_seen(path)
        faults.on("stall")
        said = []
        alarm = threading.Timer(120, child.send_signal, [signal.SIGINT])
        alarm.start()
        for line in child.stderr:
            said.append(line)
            if "stacks for health.stalled" in line:
                break
        alarm.cancel()
        faults.off("stall")
        child.send_signal(signal.SIGINT)
        said += child.stderr.readlines()
        assert child.wait(30) == 0, said
    with SessionReader(path) as reader:
        (capture,) = reader.captures()
        assert (capture.outcome, capture.why) == ("ok", "health.stalled"), said
        assert capture.mode == "non-blocking, idle"
        # The very line that hangs.
        assert "before (kvtop_faults.py:" in reader.stacks_of(capture).folded
        assert reader.closed()
