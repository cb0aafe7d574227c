"""What users of vLLM reported, each case with the verdict it must get.

Every test is one case, small and synthetic; the name begins with its number.
"""

from __future__ import annotations

from dataclasses import replace

from kvtop.detect.judge import Judge
from kvtop.model.snapshot import (
    Engine,
    EngineMetrics,
    Phase,
    Snapshot,
    SourceState,
    SourceStatus,
)
from tests.detect.build import SERVER, Req, Sim, alarms, first, gpu, names, one, watch


def park(sim: Sim, name: str, blocks: int, reason: str = "remote KV") -> Req:
    """A request that keeps blocks for a connector."""
    status = "WAITING_FOR_REMOTE_KVS" if reason == "remote KV" else "FINISHED_STOPPED"
    return sim.start(
        name, blocks=blocks, phase=Phase.HELD, status=status, reason=reason, held_s=0.0
    )


def test_c1_an_abort_while_waiting_for_remote_kv_is_a_leak_only_past_the_lease() -> None:
    sim, judge = Sim(), Judge()
    req = park(sim, "decode-7", 6)

    def each(i: int) -> None:
        req.held_s = float(i)

    history = watch(sim, judge, 520, each=each)
    early = one(history[300], "leak.delayed-free")
    assert early.severity == "info"
    assert early.evidence["blocks"] == "6"
    assert early.evidence["oldest"] == "5 min"
    assert not any(alarms(f) for f in history[:509])
    assert one(history[-1], "leak.held-past-lease").request_ids == ("decode-7",)


def test_c2_prefill_blocks_until_their_timeout_look_like_a_leak_and_are_none() -> None:
    sim, judge = Sim(), Judge()
    kept = [park(sim, f"p{i}", 8, "connector") for i in range(5)]

    def each(i: int) -> None:
        for req in kept:
            req.held_s = float(i)

    history = watch(sim, judge, 400, each=each)
    assert not any(alarms(f) for f in history)
    note = one(history[-1], "leak.delayed-free")
    assert "none" in note.summary
    assert note.evidence["lease"].startswith("8 min, Mooncake's and NIXL's decode side")
    assert history[-1][0].rule == "diagnosis.memory-fine"


def test_c3_blocks_of_a_reused_id_stay_and_are_named_after_several_idle_samples() -> None:
    sim, judge = Sim(blocks=101), Judge()
    sim.start("same-id", blocks=40)
    sim.preempt("same-id")
    sim.resume("same-id", 40)
    watch(sim, judge, 3)
    lost = sim.end_but_lose("same-id", 40)
    history = watch(sim, judge, 1200)

    assert first(history, "leak.ghost-blocks") == 4
    finding = one(history[-1], "leak.ghost-blocks")
    assert finding.block_ids == tuple(lost)
    assert finding.severity == "critical"
    assert finding.evidence["oldest"] == "20 min"
    assert "KV use 40 %" in history[-1][0].summary


def test_c4_use_that_ratchets_up_shows_its_floor_and_slope() -> None:
    sim, judge = Sim(blocks=2049), Judge()
    for i in range(12):
        sim.start(f"r{i}", blocks=20)
        watch(sim, judge, 60, dt_s=10.0)
        sim.end_but_lose(f"r{i}", 16)
        history = watch(sim, judge, 10, dt_s=10.0)
    finding = one(history[-1], "leak.ghost-blocks")
    assert len(finding.block_ids) == 12 * 16
    assert "blocks a minute" in finding.evidence["grows by"]
    assert finding.evidence["pool is gone in"].endswith(" h")
    assert alarms(history[-1]) == {"leak.ghost-blocks"}
    (engine,) = judge.track.engines.values()
    fall, _ = engine.floor_trends()
    assert fall is not None
    assert fall.slope_s < 0
    assert fall.sigma < -3


def test_c5_blocks_in_the_deferred_queue_are_never_ghosts() -> None:
    sim, judge = Sim(), Judge()
    sim.start("stays")

    def each(i: int) -> None:
        sim.give(sim.fenced)
        sim.fenced = []
        sim.start(f"r{i}", blocks=5)
        sim.end_into_fence(f"r{i}")

    assert not any(names(f, "leak.") for f in watch(sim, judge, 60, each=each))
    stuck = watch(sim, judge, 14)  # nothing drains the queue any more
    assert alarms(stuck[-1]) == {"leak.fence-stuck"}
    assert len(one(stuck[-1], "leak.fence-stuck").block_ids) == 5


def test_c6_135_percent_in_use_is_a_broken_identity_with_both_sides() -> None:
    sim, judge = Sim(), Judge()
    sim.has_probe = False
    sim.metrics = EngineMetrics(kv_used_percent=135.0, running=0, waiting=0)
    finding = one(watch(sim, judge, 8)[-1], "leak.broken-identity")
    assert finding.severity == "critical"
    assert finding.evidence == {"used": "135.0 %", "possible": "100 %"}


def test_c7_a_request_without_client_is_a_zombie_only_when_the_api_server_was_asked() -> None:
    sim, judge = Sim(), Judge()
    req = sim.start("left", max_tokens=3000)

    def generate(i: int) -> None:
        sim.decode("left", 4)

    assert not any(alarms(f) for f in watch(sim, judge, 60, each=generate))

    def asked(i: int) -> None:
        req.client, req.client_gone_s = "gone", float(i)

    finding = one(watch(sim, judge, 15, each=asked)[-1], "leak.zombie-request")
    assert finding.request_ids == ("left",)
    assert finding.evidence["client gone for"] == "14 s"


def test_c9_admission_wedged_shows_the_status_of_each_deferred_request() -> None:
    sim, judge = Sim(blocks=1001, max_num_seqs=6), Judge()
    for i in range(5):
        park(sim, f"d{i}", 3)
    sim.start("runs")
    for i in range(20):
        sim.wait(f"w{i}")
    history = watch(sim, judge, 40, each=lambda i: sim.decode("runs", 1))
    finding = one(history[-1], "pressure.admission-wedged")
    assert finding.evidence["deferred requests"].count("WAITING_FOR_REMOTE_KVS") == 5
    assert finding.evidence["waiting"] == "20"
    assert history[-1][0].rule == "diagnosis.engine-stuck"
    assert not alarms(history[-1])


def test_c10_nothing_runs_while_the_pool_is_idle() -> None:
    sim, judge = Sim(blocks=1001), Judge()
    for i in range(7):
        sim.wait(f"w{i}")
    history = watch(sim, judge, 40)
    assert names(history[-1], "pressure.") == {"pressure.idle-pool-blocked"}
    assert "not short of memory" in one(history[-1], "pressure.idle-pool-blocked").summary


def test_c10_nothing_runs_because_parked_loads_hold_the_blocks() -> None:
    sim, judge = Sim(blocks=101), Judge()
    for i in range(4):
        park(sim, f"load{i}", 22)
    sim.wait("head", prompt=40 * 16)
    history = watch(sim, judge, 40)
    finding = one(history[-1], "pressure.blocked-by-parked")
    assert set(finding.request_ids) == {"load0", "load1", "load2", "load3"}
    assert "load0 22" in finding.evidence["kept by"]
    assert history[-1][0].rule == "diagnosis.memory-held-badly"


def test_c11_a_prompt_that_fits_the_length_but_not_the_pool() -> None:
    sim, judge = Sim(blocks=65), Judge()
    req = sim.start("long", blocks=40, phase=Phase.PREFILL)
    req.prompt = 1500  # of 4096 allowed; the pool holds 1024

    def each(i: int) -> None:
        if i % 6 == 5:
            sim.preempt("long")
            sim.resume("long", 40)
            req.phase = Phase.PREFILL

    history = watch(sim, judge, 40, each=each)
    finding = one(history[-1], "pressure.never-fits")
    assert finding.evidence["blocks needed"] == "94"
    assert finding.evidence["blocks in the pool"] == "64 (1 null block less)"
    assert one(history[-1], "pressure.thrash").request_ids == ("long",)
    assert history[-1][0].next_step == "set --max-model-len to 1024 at most"


def test_c12_a_storm_is_far_above_the_healthy_baseline() -> None:
    sim, judge = Sim(blocks=65), Judge()
    for i in range(12):
        sim.start(f"r{i}", blocks=5)

    def each(i: int) -> None:
        name = f"r{i % 12}"
        sim.preempt(name)
        sim.resume(name, 5)

    finding = one(watch(sim, judge, 27, each=each)[-1], "pressure.preemption-storm")
    assert finding.evidence["preemptions"].startswith("26 in 30 s")
    assert finding.evidence["a request"].startswith("2.")
    assert finding.evidence["tokens thrown away"] == str(26 * 80)


def test_c14_a_wedged_engine_behind_a_green_health_check() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a")
    watch(sim, judge, 3)
    sim.probe_ok = False  # a stopped process answers nothing
    sim.engine_fields = {"process_state": "T"}
    history = watch(sim, judge, 10)
    finding = one(history[-1], "health.stopped")
    assert finding.severity == "critical"
    assert "200" in finding.summary
    assert not alarms(history[-1])


def test_c15_paused_and_sleeping_engines_are_not_wedged() -> None:
    for state in ("paused", "sleeping"):
        sim, judge = Sim(), Judge()
        sim.wait("w", reason="paused")
        sim.engine_fields = {"state": state}
        sim.probe_fields = {"step_age_s": 600.0}
        history = watch(sim, judge, 90)
        assert not any(f.severity != "info" for findings in history for f in findings)
        assert state in one(history[-1], "health.at-rest").summary


def test_c17_gauges_frozen_after_a_mass_abort_are_stale_and_no_leak() -> None:
    sim, judge = Sim(), Judge()
    sim.has_probe = False

    def each(i: int) -> None:
        sim.metrics = EngineMetrics(
            kv_used_percent=90.0,
            running=14,
            waiting=0,
            num_blocks=512,
            generation_tokens_total=1000.0,
            gauges_frozen_s=float(i) if i > 3 else None,
        )

    history = watch(sim, judge, 600, each=each)
    assert not any(names(f, "leak.") | names(f, "pressure.") for f in history)
    assert "STALE" in one(history[-1], "health.stale-gauges").summary
    assert history[-1][0].rule == "diagnosis.unknown"


def test_c17_a_floor_seen_through_gauges_alone_is_only_a_hint() -> None:
    sim, judge = Sim(), Judge()
    sim.has_probe = False
    history = []
    for i in range(12):
        for running in (3, 0):
            sim.metrics = EngineMetrics(
                kv_used_percent=50.0 if running else 3.0 * i,
                running=running,
                waiting=0,
                num_blocks=512,
                generation_tokens_total=100.0 * i + running,
            )
            history += watch(sim, judge, 5, dt_s=5.0)
    finding = one(history[-1], "leak.floor-falling")
    assert finding.severity == "info"
    assert "attach" in finding.next_step


def test_c18_clients_that_disconnect_make_no_finding_by_themselves() -> None:
    sim, judge = Sim(), Judge()

    def each(i: int) -> None:
        sim.start(f"r{i}", client="live")
        if i >= 3:
            sim.requests[f"r{i - 3}"].client = "gone"
            sim.requests[f"r{i - 3}"].client_gone_s = 0.1
        if i >= 4:
            sim.end(f"r{i - 4}")

    assert not any(alarms(f) for f in watch(sim, judge, 60, each=each))


def test_c22_engines_without_series_yet_are_not_read_as_zero() -> None:
    judge = Judge()
    for i in range(120):
        engines = tuple(Engine(rank, None, SERVER, metrics=EngineMetrics()) for rank in (0, 1))
        page = SourceStatus(f"metrics {SERVER}", "metrics", SourceState.OK, 0.0, "", "", 1e9 + i)
        shot = Snapshot(1e9 + i, float(i), "h", "0", sources=(page,), engines=engines)
        findings = judge.judge(shot)
        assert {f.rule for f in findings} == {"diagnosis.unknown"}


def test_c23_a_page_without_series_is_told_with_its_own_reason() -> None:
    reasons = (
        "200 and no vllm: series (--disable-log-stats?)",
        "200 and an empty page",
        "the page answers 500",
    )
    for reason in reasons:
        sim, judge = Sim(), Judge()
        for _ in range(18):
            shot = sim.tick()
            page = SourceStatus(f"metrics {SERVER}", "metrics", SourceState.FAILED, 0.0, reason)
            findings = judge.judge(replace(shot, sources=(*shot.sources[3:], page)))
        assert one(findings, "health.no-metrics").evidence["reason"] == reason
        assert findings[0].rule == "diagnosis.memory-fine"


def test_c24_a_prefix_shorter_than_a_block_rightly_has_no_hits() -> None:
    sim, judge = Sim(block_size=128), Judge()
    sim.metrics = EngineMetrics(running=1, prefix_hit_percent=0.0)

    def each(i: int) -> None:
        sim.start(f"r{i}", blocks=1).prompt = 100
        if i:
            sim.end(f"r{i - 1}")

    finding = one(watch(sim, judge, 30, each=each)[-1], "efficiency.short-prompts")
    assert finding.severity == "info"
    assert "right" in finding.summary


def test_c25_blocks_in_use_and_token_slots_are_both_shown() -> None:
    sim, judge = Sim(blocks=61), Judge()
    for i in range(20):
        sim.start(f"r{i}", blocks=2).computed = 17
    finding = one(watch(sim, judge, 64)[-1], "efficiency.tail-slack")
    assert finding.evidence["blocks in use"] == "66.7 %"
    assert finding.evidence["token slots filled"] == "35.4 %"


def test_c26_the_constant_reservation_is_explained_and_no_leak() -> None:
    sim, judge = Sim(), Judge()
    sim.gpus = (gpu(90),)
    history = watch(sim, judge, 600)
    assert not any(f.severity != "info" for findings in history for f in findings)
    assert "not a leak" in one(history[-1], "gpu.reservation").summary


def test_c38_one_bad_gpu_hides_no_other() -> None:
    sim, judge = Sim(), Judge()
    bad = replace(gpu(0), mem_used_bytes=None, mem_total_bytes=None, error="GPU is lost")
    sim.gpus = (bad, replace(gpu(95), index=1))
    assert "gpu.full" in names(watch(sim, judge, 40)[-1])


def test_p2_a_restart_makes_no_rates_out_of_counters_that_went_back() -> None:
    sim, judge = Sim(), Judge()
    sim.has_probe = False
    sim.pid = None
    for total in (5000.0, 0.0):
        for i in range(50):
            sim.metrics = EngineMetrics(
                running=4,
                preemptions_total=total,
                finished_total={"stop": total},
                generation_tokens_total=total + i,
                prompt_tokens_total=total + i,
            )
            findings = judge.judge(sim.tick())
            assert "pressure.preemption-storm" not in names(findings)
            assert "-" not in findings[0].evidence.get("preemptions in 30 s", "0")
            assert ("health.restarted" in names(findings)) == (total == 0.0)


def test_p4_an_engine_stopped_for_15_s_is_not_shown_healthy_and_an_orphan_is_named() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a")
    watch(sim, judge, 3)
    sim.probe_ok = False
    sim.engine_fields = {"process_state": "T"}
    assert watch(sim, judge, 15)[-1][0].severity == "critical"
    sim.probe_ok = True
    sim.engine_fields = {"api_pids": ()}
    assert "health.orphan-engine" in names(watch(sim, judge, 10)[-1])


def test_p5_361_preemptions_in_30_s_at_full_use_are_an_event() -> None:
    sim, judge = Sim(blocks=65), Judge()
    for i in range(16):
        sim.start(f"r{i}", blocks=4)

    def each(i: int) -> None:
        for k in range(12):
            name = f"r{(i + k) % 16}"
            sim.preempt(name)
            sim.resume(name, 4)

    history = watch(sim, judge, 30, each=each)
    assert {"pressure.kv-full", "pressure.preemption-storm"} <= names(history[-1])
    assert history[-1][0].rule == "diagnosis.too-little-memory"


def test_p7_thresholds_are_in_percent_like_the_values() -> None:
    sim, judge = Sim(), Judge()
    sim.has_probe = False
    sim.metrics = EngineMetrics(kv_used_percent=0.9, running=1, waiting=0)
    sim.gpus = (gpu(0.95),)
    history = watch(sim, judge, 60)
    assert not any(f.severity != "info" for findings in history for f in findings)


def test_p10_advice_never_turns_one_knob_both_ways() -> None:
    sim, judge = Sim(blocks=65), Judge()
    sim.gpus = (gpu(96),)
    for i in range(16):
        sim.start(f"r{i}", blocks=4)

    def each(i: int) -> None:
        sim.preempt(f"r{i % 16}")
        sim.resume(f"r{i % 16}", 4)

    findings = watch(sim, judge, 60, each=each)[-1]
    assert {"gpu.full", "pressure.kv-full", "pressure.preemption-storm"} <= names(findings)
    advice = " ".join(f.next_step for f in findings)
    assert not ("raise --gpu-memory" in advice and "lower --gpu-memory" in advice)
    assert not ("raise --max-num-seqs" in advice and "lower --max-num-seqs" in advice.lower())


def test_p11_a_missing_series_is_not_a_zero() -> None:
    sim, judge = Sim(), Judge()
    sim.has_probe = False
    sim.metrics = EngineMetrics(running=3, waiting=0, generation_tokens_total=5.0)
    finding = watch(sim, judge, 30)[-1][0]
    assert finding.rule == "diagnosis.unknown"
    assert "KV use" not in finding.evidence
