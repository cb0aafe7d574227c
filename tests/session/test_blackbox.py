from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

from kvtop.model.snapshot import Finding, Snapshot
from kvtop.session import recorder as recorder_module
from kvtop.session.blackbox import BlackBox, TriggerRules, Triggers
from kvtop.session.reader import SessionReader
from kvtop.session.writer import SessionWriter
from tests.session.common import small, stored


def _fill(box: BlackBox, snapshot: Snapshot) -> str | None:
    ticks = box.status.ticks
    reason = box.offer(snapshot)
    for _ in range(10_000):
        if box.status.ticks > ticks:
            return reason
        threading.Event().wait(0.001)
    raise AssertionError(box.status)


def test_it_holds_the_last_minutes_in_a_file_that_does_not_grow(tmp_path: Path) -> None:
    recorder_module.TRIM_EVERY, before = 5, recorder_module.TRIM_EVERY
    try:
        writer = SessionWriter(tmp_path / "ring.kvtop", key_every=10)
        churn = small()
        live = []
        sizes = []
        for number in range(400):
            live.append(churn.tick())
            writer.write(live[-1])
            if number % 5 == 0:
                writer.trim(live[-1].time_s - 60)
            sizes.append(writer.size_bytes)
        assert max(sizes[200:]) <= 1.2 * max(sizes[:200])
        writer.dump(tmp_path / "out.kvtop", "test")
        writer.close()
        with SessionReader(tmp_path / "out.kvtop") as reader:
            kept = list(reader.snapshots())
            assert kept == [stored(s) for s in live[reader.first_tick - 1 :]]
            assert 60 <= live[-1].time_s - kept[0].time_s <= 80
            ids = {row[0] for row in reader.sql("SELECT id FROM request_name")}
            assert {r.id for s in kept for r in s.engines[0].requests or ()} <= ids
            assert len(ids) < len({r.id for s in live for r in s.engines[0].requests or ()})
    finally:
        recorder_module.TRIM_EVERY = before


def test_a_trigger_writes_it_out_and_the_ring_goes_away(tmp_path: Path) -> None:
    box = BlackBox(tmp_path / "new", 60, rules=TriggerRules(gpu_mem_percent=95))
    box.start()
    churn = small()
    live = [churn.tick() for _ in range(20)]
    for snapshot in live[:-1]:
        assert _fill(box, snapshot) is None
    gpu = live[-1].gpus[0]
    full = dataclasses.replace(gpu, mem_used_bytes=gpu.mem_total_bytes)
    last = dataclasses.replace(live[-1], gpus=(full,))
    assert _fill(box, last) == "GPU 0 memory over 95 %"
    path = box.write("key B")
    box.stop()
    messages = box.messages()
    assert [message.split(": ", 1)[1] for message in messages] == [
        "GPU 0 memory over 95 %",
        "key B",
    ]
    files = sorted(file.name for file in (tmp_path / "new").iterdir())
    assert len(files) == 2
    assert files[0].endswith("gpu-0-memory-over-95.kvtop")
    with SessionReader(tmp_path / "new" / files[0]) as reader:
        assert list(reader.snapshots()) == [stored(s) for s in [*live[:-1], last]]
        assert reader.info.closed_reason == "black box: GPU 0 memory over 95 %"
    with SessionReader(path) as reader:
        assert reader.last_tick == 20


def test_a_finding_triggers_once_while_it_holds() -> None:
    triggers = Triggers(TriggerRules(severity="warning", cooldown_s=30))
    churn = small()
    info = Finding("a", "info", 0, 1, "x")
    bad = Finding("leak.ghost-blocks", "critical", 0, 1, "x")
    assert triggers.check(churn.tick(), [info]) is None
    assert triggers.check(churn.tick(), [info, bad]) == "finding leak.ghost-blocks"
    assert triggers.check(churn.tick(), [bad]) is None
    assert triggers.check(churn.tick(), []) is None
    # It comes back within the cool-down: still the same story.
    assert triggers.check(churn.tick(), [bad]) is None
    for _ in range(30):
        churn.tick()
    assert triggers.check(churn.tick(), []) is None
    assert triggers.check(churn.tick(), [bad]) == "finding leak.ghost-blocks"


def test_the_death_of_an_engine() -> None:
    triggers = Triggers(TriggerRules())
    churn = small()
    assert triggers.check(churn.tick()) is None
    alive = churn.tick()
    dead = dataclasses.replace(
        alive, engines=tuple(dataclasses.replace(e, alive=False) for e in alive.engines)
    )
    assert triggers.check(dead) == "engine pid 4740 is gone"
    assert triggers.check(dead) is None
    other = Triggers(TriggerRules())
    other.check(churn.tick())
    gone = dataclasses.replace(churn.tick(), engines=())
    assert other.check(gone) == "engine pid 4740 is gone"


def test_a_burst_of_failed_allocations() -> None:
    triggers = Triggers(TriggerRules(alloc_failures=50))
    churn = small()
    churn.count["alloc_failures"] = 1000
    assert triggers.check(churn.tick()) is None
    for _ in range(30):
        churn.count["alloc_failures"] += 4
        assert triggers.check(churn.tick()) is None
    churn.count["alloc_failures"] += 60
    reason = triggers.check(churn.tick())
    assert reason is not None
    assert "failed allocations" in reason


def test_unknown_numbers_trigger_nothing() -> None:
    triggers = Triggers(TriggerRules(gpu_mem_percent=0.0))
    snapshot = small().tick()
    gpu = dataclasses.replace(snapshot.gpus[0], mem_used_bytes=None)
    bare = dataclasses.replace(snapshot, gpus=(gpu,))
    assert triggers.check(bare) is None
