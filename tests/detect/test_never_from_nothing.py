"""Gaps, restarts, clock jumps, failing sources: no finding ever starts from what was not seen."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvtop.detect.judge import Judge
from kvtop.detect.thresholds import DEFAULTS
from kvtop.model.snapshot import Engine, EngineMetrics, Phase, Snapshot
from tests.detect.build import SERVER, Load, Sim, alarms, first, gpu, names, one, watch


def loud(findings: tuple) -> set[str]:
    """All rules above info, diagnoses left out."""
    return {f.rule for f in findings if f.severity != "info" and "diagnosis" not in f.rule}


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_engine_has_no_leak_warning(seed: int) -> None:
    sim = Sim(blocks=256 if seed % 2 else 96)
    load, judge = Load(sim, seed), Judge()
    rng = random.Random(seed)
    judged = preempted = 0
    for _ in range(300):
        sim.probe_ok = rng.random() > 0.05
        sim.metrics = None if rng.random() < 0.2 else EngineMetrics(running=1, waiting=0)
        shot = load.step(dt_s=rng.choice((0.5, 1.0, 1.0, 1.5)) if rng.random() > 0.01 else 40.0)
        findings = judge.judge(shot)
        assert not alarms(findings), findings
        judged += 1
    preempted = sim.counters["preemptions"]
    assert judged == 300
    assert sim.counters["allocated"] > 500
    assert preempted > 0 or sim.counters["touched"] > 0


def test_an_empty_machine_has_no_findings() -> None:
    judge = Judge()
    for i in range(100):
        shot = Snapshot(time_s=1e9 + i, mono_s=float(i), host="h", version="0")
        assert judge.judge(shot) == ()


def test_an_engine_of_which_nothing_is_known_gives_only_cannot_tell() -> None:
    judge = Judge()
    for i in range(100):
        engine = Engine(None, None, SERVER, probe_reason="no probe")
        shot = Snapshot(time_s=1e9 + i, mono_s=float(i), host="h", version="0", engines=(engine,))
        (finding,) = judge.judge(shot)
        assert finding.rule == "diagnosis.unknown"
        assert finding.severity == "info"


def test_a_gap_adds_no_time() -> None:
    sim, judge = Sim(), Judge()
    req = sim.start("a", blocks=4)
    watch(sim, judge, 3)
    sim.refs[req.blocks[0]] += 1
    watch(sim, judge, 3)
    sim.tick(600.0)  # nobody looks
    history = watch(sim, judge, 8)

    # The first look after the gap begins to count anew.
    assert first(history, "leak.ref-mismatch") == DEFAULTS.mismatch_s


def test_ghosts_before_and_after_a_gap_are_two_stories() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a", blocks=4)
    watch(sim, judge, 2)
    sim.end_but_lose("a", 2)
    watch(sim, judge, 4)
    sim.tick(3600.0)
    history = watch(sim, judge, 6)

    assert first(history, "leak.ghost-blocks") == 4


def test_a_finding_that_holds_goes_on_through_a_gap() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a", blocks=4)
    watch(sim, judge, 2)
    lost = sim.end_but_lose("a", 2)
    before = one(watch(sim, judge, 8)[-1], "leak.ghost-blocks")
    sim.tick(100.0)
    after = watch(sim, judge, 8)

    assert all("leak.ghost-blocks" in names(f) for f in after)
    assert one(after[-1], "leak.ghost-blocks").block_ids == tuple(lost) == before.block_ids


def test_a_failed_probe_with_its_last_values_proves_nothing() -> None:
    sim, judge = Sim(), Judge()
    req = sim.start("a", blocks=4)
    watch(sim, judge, 3)
    sim.refs[req.blocks[0]] += 1
    watch(sim, judge, 2)
    sim.probe_ok = False
    dark = watch(sim, judge, 120)

    assert not any(alarms(f) for f in dark)


def test_a_finding_is_kept_for_a_while_without_data_and_then_dropped() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a", blocks=4)
    watch(sim, judge, 2)
    sim.end_but_lose("a", 2)
    watch(sim, judge, 8)
    sim.probe_ok = False
    dark = watch(sim, judge, 60)

    there = ["leak.ghost-blocks" in names(f) for f in dark]
    kept = there.index(False)
    assert kept == DEFAULTS.unknown_s - 1
    assert not any(there[kept:])


def test_a_restart_forgets_everything_and_is_told() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a", blocks=4)
    watch(sim, judge, 2)
    sim.end_but_lose("a", 2)
    assert alarms(watch(sim, judge, 8)[-1])

    fresh = Sim()
    fresh.time_s, fresh.mono_s, fresh.pid = sim.time_s, sim.mono_s, 5000
    fresh.start("b", blocks=4)
    history = watch(fresh, judge, 100)

    assert not any(alarms(f) for f in history)
    note = one(history[0], "health.restarted")
    assert note.severity == "info"
    assert note.evidence == {"old pid": "4740", "new pid": "5000"}
    assert "health.restarted" not in names(history[-1])


@pytest.mark.parametrize("jump_s", [-86400.0, -30.0, 45.0, 86400.0])
def test_a_wall_clock_that_jumps_starts_nothing(jump_s: float) -> None:
    def story(jump_s: float) -> list[set[str]]:
        sim = Sim(blocks=128)
        load, judge = Load(sim, 3), Judge()
        told = []
        for i in range(120):
            if i == 60:
                sim.time_s += jump_s
            told.append(loud(judge.judge(load.step())))
        return told

    for jumped, plain in zip(story(jump_s), story(0.0), strict=True):
        assert jumped <= plain


def test_a_monotonic_clock_that_goes_back_begins_a_new_record() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a", blocks=4)
    watch(sim, judge, 2)
    sim.end_but_lose("a", 2)
    assert alarms(watch(sim, judge, 8)[-1])
    sim.mono_s = 5.0
    history = watch(sim, judge, 6)

    assert not alarms(history[0])
    assert first(history, "leak.ghost-blocks") == 4


def test_missing_values_are_not_zero() -> None:
    sim, judge = Sim(), Judge()
    sim.has_probe = False
    sim.metrics = EngineMetrics()
    sim.gpus = (replace(gpu(50), mem_used_bytes=None, mem_free_bytes=None, processes=None),)

    for findings in watch(sim, judge, 200):
        assert names(findings) == set()
        assert findings[0].rule == "diagnosis.unknown"


def test_the_same_snapshots_give_the_same_findings() -> None:
    def story() -> list[tuple]:
        sim = Sim(blocks=96)
        load, judge = Load(sim, 11), Judge()
        out = []
        for i in range(200):
            if i == 80:
                live = [r for r in sim.requests.values() if r.phase is Phase.DECODE and r.blocks]
                if live:
                    sim.end_but_lose(live[0].id, 1)
            out.append(judge.judge(load.step()))
        return out

    assert story() == story()


def test_memory_is_bounded_over_hours() -> None:
    sim, judge = Sim(blocks=64), Judge()
    sim.metrics = EngineMetrics(
        running=1, prefix_hit_percent=50.0, preemptions_total=0.0, prompt_tokens_total=1.0
    )
    sim.gpus = (gpu(80),)
    sim.engine_fields = {"rss_bytes": 1_000_000_000}
    for i in range(9000):
        if i % 3 == 0:
            sim.start(f"r{i}", blocks=3)
        elif i % 3 == 1:
            sim.end(f"r{i - 1}", cache=True)
        judge.judge(sim.tick())
    (engine,) = judge.track.engines.values()
    assert len(engine.counters) <= 700
    assert len(engine.pages) <= 700
    assert len(engine.floors) <= 60
    assert len(engine.hit_minutes) <= 61
    assert len(engine.owned) <= 302
    assert len(engine.requests.seen) <= 1
    assert all(len(b) <= 25 for pair in engine.rss.values() for b in pair)


def test_engines_and_gpus_that_are_gone_are_forgotten() -> None:
    judge = Judge()
    for i in range(200):
        engine = Engine(0, 10_000 + i, SERVER)
        judge.judge(
            Snapshot(time_s=1e9 + i, mono_s=float(i), host="h", version="0", engines=(engine,))
        )
    assert len(judge.track.engines) <= 62
