"""The live stream recorded and replayed, snapshot by snapshot: the real probe, a simulated engine.

`tests/vllm/test_sessions.py` does the same on a real vLLM.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvtop.commands.record_beside import Beside
from kvtop.config import Options
from kvtop.demo.launch import running
from kvtop.demo.source import DemoGpuSource
from kvtop.detect.judge import Judge
from kvtop.detect.thresholds import apply_overrides
from kvtop.model.snapshot import Finding, Snapshot
from kvtop.session.reader import SessionReader
from kvtop.session.recorder import Recorder
from kvtop.session.walk import Walk
from kvtop.stream.live import Live
from kvtop.stream.target import Target
from tests.session.common import stored

TICKS = 40


def test_what_is_replayed_is_what_was_live(tmp_path: Path) -> None:
    path = tmp_path / "a.kvtop"
    live: list[Snapshot] = []
    told: list[set[tuple[str, int | None, str]]] = []
    judge = Judge(apply_overrides({}))

    def keys(findings: tuple[Finding, ...]) -> set[tuple[str, int | None, str]]:
        return {(f.rule, f.engine_pid, f.severity) for f in findings}

    async def watch() -> None:
        with running("leak", speed=8.0) as engine:
            target = Target(
                socket_dir=engine.directory,
                url=engine.url,
                gpu_source=DemoGpuSource(engine.url),
                demo=True,
            )
            stream = Live(Options(interval_s=0.25, stacks=False), target)
            beside = Beside([recorder], stream, frozenset(), lambda _: None)
            async for snapshot in stream.snapshots():
                assert recorder.offer(snapshot)
                live.append(snapshot)
                findings = judge.judge(snapshot)
                told.append(keys(findings))
                beside.take(snapshot, findings)
                if len(live) == TICKS:
                    break
            await beside.close()
            await stream.close()

    recorder = Recorder(path, interval_s=0.25)
    recorder.start()
    asyncio.run(watch())
    status = recorder.stop(timeout_s=20)
    assert (status.state, status.dropped, status.ticks) == ("stopped", 0, TICKS)
    assert sum(bool(e.requests) for shot in live for e in shot.engines) > TICKS / 2
    with SessionReader(path) as reader:
        for number, (one, other) in enumerate(zip(live, reader.snapshots(), strict=True)):
            assert other == stored(one), f"snapshot {number}"
        assert len(reader.details(0, TICKS)) >= 1
        for pid, detail in reader.details(0, TICKS):
            assert detail.tables
            assert pid == live[-1].engines[0].pid
    walk = Walk(path, lambda: Judge(apply_overrides({})).judge)
    try:
        for number, wanted in enumerate(told, start=1):
            for _ in walk.to(number):
                pass
            assert keys(walk.findings) == wanted, number
    finally:
        walk.close()
