"""The trace as Perfetto itself reads it: the numbers are the session's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from kvtop.session import perfetto
from kvtop.session.reader import SessionReader
from kvtop.session.text import plain
from kvtop.session.writer import SessionWriter
from tests.session import trace_reader
from tests.session.browser import Browser, started
from tests.session.common import small
from tests.session.test_captures import capture
from tests.session.trace_reader import TraceReader, reading

EVIL = 'a"};alert(1)</script>\x00\x1b[31m\u202e\ud800,{'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if reason := trace_reader.missing():
        pytest.skip(f"no Perfetto to read the trace with: {reason}")
    with started(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionReader]:
    """A busy engine with preemptions, a hostile request id, a marker and a capture."""
    path = tmp_path_factory.mktemp("session") / "a.kvtop"
    churn = small(blocks=200, requests=12, gpus=2)
    writer = SessionWriter(path, 1.0)
    victim = ""
    for tick in range(1, 301):
        shot = churn.tick()
        (engine,) = shot.engines
        requests = engine.requests or ()
        victim = victim or requests[0].id
        renamed = [
            dataclasses.replace(row, id=EVIL) if row.id == victim else row for row in requests
        ]
        engine = dataclasses.replace(engine, requests=tuple(renamed))
        writer.write(dataclasses.replace(shot, engines=(engine,)))
        if tick == 70:
            writer.marker(shot.time_s, f"here {EVIL}")
            writer.capture(capture())
    writer.close()
    with SessionReader(path) as reader:
        yield reader


@pytest.fixture(scope="module")
def trace(browser: Browser, session: SessionReader) -> Iterator[TraceReader]:
    with reading(browser, "".join(perfetto.trace_text(session)).encode()) as trace:
        yield trace


def test_perfetto_has_nothing_to_complain_about(trace: TraceReader) -> None:
    bad = trace.rows("SELECT name, value FROM stats WHERE value > 0 AND severity != 'info'")
    assert bad == []


def test_every_counter_has_the_sessions_values(trace: TraceReader, session: SessionReader) -> None:
    read = trace.rows(
        "SELECT t.name AS track, p.pid AS pid, c.ts AS ts, c.value AS value FROM counter c"
        " JOIN process_counter_track t ON t.id = c.track_id JOIN process p USING (upid)"
    )
    found = {(pid, track, ts): value for track, pid, ts, value in read}
    assert len(found) == len(read)
    wanted: dict[tuple[int, str, int], float] = {}
    for shot in session.snapshots(columns=False):
        ts = round(shot.time_s * 1e6) * 1000
        (engine,) = shot.engines
        counts = engine.pools[0].counts
        for name in ("free", "cached", "used", "shared", "held", "ghost"):
            wanted[1, f"KV blocks {name}", ts] = getattr(counts, name)
        metrics = engine.metrics
        assert metrics is not None
        for track, value in (
            ("requests running", metrics.running),
            ("requests waiting", metrics.waiting),
            ("KV use % kv_used_percent", metrics.kv_used_percent),
            ("prefix hits % prefix_hit_percent", metrics.prefix_hit_percent),
            ("tokens/s prompt_tokens_s", metrics.prompt_tokens_s),
            ("tokens/s generation_tokens_s", metrics.generation_tokens_s),
        ):
            assert value is not None
            wanted[1, track, ts] = value
        for slot, gpu in enumerate(shot.gpus):
            for name in ("mem_used_bytes", "util_percent", "power_w", "temperature_c"):
                wanted[100_000 + slot, f"{name} {name}", ts] = getattr(gpu, name)
    assert found.keys() == wanted.keys()
    assert all(found[key] == pytest.approx(wanted[key], rel=1e-12) for key in wanted)


def test_every_request_is_a_slice_with_its_phases(
    trace: TraceReader, session: SessionReader
) -> None:
    read = trace.rows(
        "SELECT s.id AS id, s.parent_id AS parent, s.name AS name, s.ts AS ts, s.dur AS dur,"
        " s.depth AS depth, p.pid AS pid, extract_arg(s.arg_set_id, 'args.peak_blocks') AS peak,"
        " extract_arg(s.arg_set_id, 'args.preemptions') AS preempted FROM slice s"
        " JOIN process_track t ON t.id = s.track_id JOIN process p USING (upid)"
        " WHERE s.category = 'request'"
    )
    seen: dict[str, list[int]] = {}
    peak: dict[str, int] = {}
    preempted: dict[str, int] = {}
    for shot in session.snapshots(columns=False):
        for row in shot.engines[0].requests or ():
            seen.setdefault(row.id, []).append(round(shot.time_s * 1e6))
            peak[row.id] = max(peak.get(row.id, 0), row.blocks or 0)
            preempted[row.id] = row.preemptions or 0
    whole = [row for row in read if row[5] == 0]
    assert {row[6] for row in read} == {1}
    hostile = [row[2] for row in whole if row[2].startswith('a"')]
    assert hostile == ['a"};alert(1)</script>\\x00\\x1b[31m\\u202e\\ud800,{']
    times = {name: (spans[0], spans[-1]) for name, spans in seen.items() if name.startswith("chat")}
    read_times = {row[2]: (row[3] // 1000, (row[3] + row[4]) // 1000) for row in whole}
    read_times.pop(hostile[0])
    assert read_times == times
    assert {row[2]: (row[7], row[8]) for row in whole if row[2] in times} == {
        name: (peak[name], preempted[name]) for name in times
    }
    top = {row[0]: row for row in whole}
    phases = [row for row in read if row[5] == 1]
    assert {row[2] for row in phases} == {"waiting", "prefill", "decode"}
    assert len(phases) > len(whole)
    for _, parent, _, ts, dur, *_ in phases:
        above = top[parent]
        assert above[3] <= ts
        assert ts + dur <= above[3] + above[4]


def test_preemptions_markers_and_captures_are_instants(
    trace: TraceReader, session: SessionReader
) -> None:
    read = trace.rows("SELECT name, ts, dur FROM slice WHERE dur = 0 AND category IS NULL")
    shown = sorted((name, ts // 1000) for name, ts, _ in read)
    wanted = []
    before: dict[str, str] = {}
    for shot in session.snapshots(columns=False):
        now = {row.id: row.phase.value for row in shot.engines[0].requests or ()}
        for name, phase in now.items():
            if phase == "preempted" and before.get(name) != "preempted":
                wanted.append((f"preempted {plain(name)}", round(shot.time_s * 1e6)))
        before = now
    assert len(wanted) > 3
    at = round(session.time_of(70) * 1e6)
    wanted.append(("stacks of pid 4740", at))
    wanted.append(('marker here a"};alert(1)</script>\\x00\\x1b[31m\\u202e\\ud800,{', at))
    assert shown == sorted(wanted)


def test_processes_have_their_names(trace: TraceReader) -> None:
    names = dict(trace.rows("SELECT pid, name FROM process WHERE pid > 0"))
    assert names[1].startswith("engine 0 pid 4740")
    assert names[100_000] == "GPU 0 NVIDIA H100 80GB HBM3"
    assert names[100_001].startswith("GPU 1")
