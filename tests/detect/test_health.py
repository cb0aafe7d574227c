"""At work, at rest, or stuck: told apart by evidence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtop.detect.judge import Judge
from kvtop.detect.thresholds import DEFAULTS
from kvtop.model.snapshot import (
    Engine,
    EngineMetrics,
    Frame,
    Snapshot,
    SourceState,
    SourceStatus,
    Stacks,
)
from tests.detect.build import PID, SERVER, Sim, alarms, first, names, one, watch


def stall(
    sim: Sim, judge: Judge, seconds: int, file: str = "core.py", *, cuts: bool = False
) -> list[tuple]:
    """The engine takes no step; the probe answers with its last cut, or with new ones."""
    cut = sim.snapshot().engines[0]
    out = []
    for i in range(seconds):
        shot = sim.tick(steps=0)
        assert cut.probe is not None
        probe = replace(cut.probe, step_age_s=float(i))
        if cuts:
            probe = replace(probe, cut_time_s=shot.time_s)
        frame = Frame("hang", file, 12, "MainThread", 100.0, 100.0)
        out.append(
            judge.judge(
                replace(
                    shot,
                    engines=(replace(cut, probe=probe, state=shot.engines[0].state),),
                    stacks=(Stacks(PID, "engine", 20, 1.0, 20.0, (frame,), shot.time_s),),
                )
            )
        )
    return out


def test_a_stalled_engine_is_told_with_its_frame_and_ends_with_the_next_steps() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a")
    watch(sim, judge, 3)
    history = stall(sim, judge, 14)

    assert first(history, "health.stalled") == DEFAULTS.stall_s
    finding = one(history[-1], "health.stalled")
    assert finding.evidence["top frame"] == "hang (core.py:12)"
    assert finding.evidence["requests"] == "1"
    assert history[-1][0].rule == "diagnosis.engine-stuck"
    assert not any(alarms(f) for f in history)
    assert "health.stalled" not in names(watch(sim, judge, 6)[-1])


def test_a_step_that_never_ends_is_a_stall_although_the_last_cut_was_idle() -> None:
    sim, judge = Sim(), Judge()
    watch(sim, judge, 3)
    history = hang(sim, judge, 20, step_age_s=0.9)
    assert first(history, "health.stalled") == 12
    assert "has not ended" in one(history[-1], "health.stalled").summary


def test_an_idle_engine_whose_last_step_is_older_than_its_cut_is_not_stalled() -> None:
    sim, judge = Sim(), Judge()
    watch(sim, judge, 3)
    history = hang(sim, judge, 60, step_age_s=30.0)
    assert not any("health.stalled" in names(f) for f in history)


def test_a_probe_that_stopped_itself_proves_nothing() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a")
    sim.probe_fields = {"errors": 10, "step_age_s": 500.0}
    history = hang(sim, judge, 60, step_age_s=500.0)
    told = {f.rule for findings in history for f in findings if f.severity != "info"}
    assert not told
    assert history[-1][0].rule == "diagnosis.unknown"


def hang(sim: Sim, judge: Judge, seconds: int, step_age_s: float) -> list[tuple]:
    """The probe answers again and again with one and the same cut."""
    cut = sim.tick(0.1).engines[0]
    assert cut.probe is not None
    out = []
    for i in range(seconds):
        shot = sim.tick(steps=0)
        probe = replace(cut.probe, step_age_s=step_age_s + i)
        out.append(judge.judge(replace(shot, engines=(replace(cut, probe=probe),))))
    return out


def test_an_idle_engine_is_not_stalled() -> None:
    sim, judge = Sim(), Judge()
    assert not any("health.stalled" in names(f) for f in stall(sim, judge, 60, cuts=True))


@pytest.mark.parametrize("state", ["paused", "sleeping", "starting"])
def test_engines_at_rest_are_not_stalled(state: str) -> None:
    sim, judge = Sim(), Judge()
    sim.start("a")
    sim.engine_fields = {"state": state}
    history = stall(sim, judge, 60)
    assert not any("health.stalled" in names(f) for f in history)
    if state != "starting":
        note = one(history[-1], "health.at-rest")
        assert note.severity == "info"
        assert state in note.summary


def test_a_compiling_engine_is_not_stalled() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a")
    history = stall(sim, judge, 40, file="torch/_inductor/compile_fx.py")
    assert not any("health.stalled" in names(f) for f in history)
    assert one(history[-1], "health.compiling").severity == "info"


def test_requests_that_wait_for_their_client_only_are_no_work() -> None:
    sim, judge = Sim(), Judge()
    sim.wait("stream", reason="streaming")
    assert not any("health.stalled" in names(f) for f in stall(sim, judge, 40, cuts=True))


def test_a_stopped_process_is_told_although_the_probe_is_silent() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a")
    watch(sim, judge, 3)
    sim.probe_ok = False
    sim.engine_fields = {"process_state": "T"}
    history = watch(sim, judge, 8)

    assert first(history, "health.stopped") == DEFAULTS.stopped_s
    assert history[-1][0].rule == "diagnosis.engine-stuck"
    sim.probe_ok = True
    sim.engine_fields = {}
    assert "health.stopped" not in names(watch(sim, judge, 6)[-1])


def test_an_engine_whose_api_server_died_is_an_orphan_with_its_pids() -> None:
    sim, judge = Sim(), Judge()
    watch(sim, judge, 3)
    sim.engine_fields = {"api_pids": ()}
    history = watch(sim, judge, 10)

    assert first(history, "health.orphan-engine") == DEFAULTS.orphan_s
    assert one(history[-1], "health.orphan-engine").next_step == "End it: kill 4740 4800"


def test_an_engine_that_never_had_an_api_server_is_no_orphan() -> None:
    sim, judge = Sim(), Judge()
    sim.engine_fields = {"api_pids": ()}
    assert not any("health.orphan-engine" in names(f) for f in watch(sim, judge, 60))


def test_a_dead_engine_under_a_living_api_server_is_critical() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a")
    watch(sim, judge, 3)
    sim.engine_fields = {"alive": False, "state": "gone"}
    history = watch(sim, judge, 5)
    finding = one(history[-1], "health.dead-engine")
    assert finding.severity == "critical"

    sim, judge = Sim(), Judge()
    watch(sim, judge, 3)
    sim.engine_fields = {"alive": False, "state": "gone"}
    sim.metrics_ok = False
    assert one(watch(sim, judge, 5)[-1], "health.dead-engine").severity == "info"
    sim, judge = Sim(), Judge()
    watch(sim, judge, 3)
    path = "/tmp/kvtop-0/last-1-20250101T000000Z.json"
    sim.engine_fields = {"alive": False, "state": "gone", "last_snapshot": path}
    sim.metrics_ok = False
    finding = one(watch(sim, judge, 5)[-1], "health.dead-engine")
    assert finding.severity == "critical"
    assert finding.evidence["last snapshot"] == path
    assert finding.next_step.endswith(f"kvtop once --file {path}")


def test_gauges_that_claim_work_the_engine_does_not_have_are_stale() -> None:
    sim, judge = Sim(), Judge()

    def each(i: int) -> None:
        sim.metrics = EngineMetrics(
            kv_used_percent=90.0, running=12, waiting=0, gauges_frozen_s=float(i)
        )

    history = watch(sim, judge, 40, each=each)
    assert first(history, "health.stale-gauges") == DEFAULTS.frozen_s
    finding = one(history[-1], "health.stale-gauges")
    assert finding.evidence["engine says"] == "no requests"
    assert not any(alarms(f) | alarms(f, "pressure.") for f in history)


def test_gauges_that_rest_while_the_engine_sleeps_are_not_stale() -> None:
    sim, judge = Sim(), Judge()
    sim.has_probe = False
    sim.metrics = EngineMetrics(running=3, gauges_frozen_s=100.0, sleep_state="weights_offloaded")
    history = watch(sim, judge, 40)
    assert not any("health.stale-gauges" in names(f) for f in history)
    assert "health.at-rest" in names(history[-1])


def test_metrics_that_cannot_be_read_are_told_with_the_reason() -> None:
    sim, judge = Sim(), Judge()
    reason = "the page has no vllm: series; it was started with --disable-log-stats"
    out = []
    for _ in range(18):
        shot = sim.tick()
        page = SourceStatus(
            f"metrics {SERVER}", "metrics", SourceState.FAILED, 0.0, reason, "start without it"
        )
        out.append(judge.judge(replace(shot, sources=(page, *shot.sources[3:]))))
    assert first(out, "health.no-metrics") == DEFAULTS.no_metrics_s
    finding = one(out[-1], "health.no-metrics")
    assert reason in finding.summary
    assert finding.severity == "info"


def test_two_ranks_of_a_server_are_no_restart() -> None:
    judge = Judge()
    for i in range(10):
        engines = tuple(Engine(rank, 100 + rank, SERVER) for rank in (0, 1))
        shot = Snapshot(time_s=1e9 + i, mono_s=float(i), host="h", version="0", engines=engines)
        assert "health.restarted" not in names(judge.judge(shot))
