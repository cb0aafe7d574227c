"""Too little room, and requests that cannot go on."""

from __future__ import annotations

from kvtop.detect.judge import Judge
from kvtop.detect.thresholds import DEFAULTS
from kvtop.model.snapshot import EngineMetrics, Finding, Group, Phase
from tests.detect.build import Sim, alarms, first, names, one, watch


def test_a_full_pool_is_told_after_ten_seconds_and_ends_below_ninety() -> None:
    sim, judge = Sim(blocks=101), Judge()
    sim.start("a", blocks=90)
    watch(sim, judge, 3)
    sim.start("b", blocks=6)

    history = watch(sim, judge, 13)
    assert first(history, "pressure.kv-full") == DEFAULTS.kv_full_s
    finding = one(history[-1], "pressure.kv-full")
    assert finding.evidence["used"] == "96.0 % of blocks"
    assert finding.evidence["token slots filled"] == "96.0 %"

    sim.end("b")
    sim.start("c", blocks=1)  # 91 %: above the clear condition
    assert "pressure.kv-full" in names(watch(sim, judge, 20)[-1])
    sim.end("c")
    sim.end("a")
    there = ["pressure.kv-full" in names(f) for f in watch(sim, judge, 8)]
    assert there == [True] * 4 + [False] * 4


def test_a_pool_at_ninety_three_percent_never_starts_it() -> None:
    sim, judge = Sim(blocks=101), Judge()
    sim.start("a", blocks=93)
    assert not any("pressure.kv-full" in names(f) for f in watch(sim, judge, 60))


def test_cached_blocks_are_not_in_use() -> None:
    sim, judge = Sim(blocks=101), Judge()
    sim.start("a", blocks=100)
    sim.end("a", cache=True)
    assert not any("pressure.kv-full" in names(f) for f in watch(sim, judge, 30))


def test_a_use_of_zero_point_nine_is_not_ninety_percent() -> None:
    sim, judge = Sim(), Judge()
    sim.has_probe = False
    sim.metrics = EngineMetrics(kv_used_percent=0.96, running=1, generation_tokens_total=1.0)
    assert not any(alarms(f, "pressure.") for f in watch(sim, judge, 60))


def storm(sim: Sim, judge: Judge, seconds: int, *, requests: int, every: int) -> list[tuple]:
    for i in range(requests):
        if f"r{i}" not in sim.requests:
            sim.start(f"r{i}", blocks=2)

    def each(i: int) -> None:
        if i % every == 0:
            name = f"r{i % requests}"
            sim.preempt(name)
            sim.resume(name, 2)
            sim.decode(name, 1)

    return watch(sim, judge, seconds, each=each)


def test_a_preemption_storm_is_told_with_rate_and_tokens() -> None:
    sim, judge = Sim(), Judge()
    history = storm(sim, judge, 30, requests=8, every=1)

    at = first(history, "pressure.preemption-storm")
    assert at == DEFAULTS.storm_count
    finding = one(history[-1], "pressure.preemption-storm")
    assert "/s" in finding.evidence["preemptions"]
    assert int(finding.evidence["tokens thrown away"]) > 0
    assert finding.request_ids
    assert not any(alarms(f) for f in history)


def test_the_healthy_share_of_preemptions_is_no_storm() -> None:
    # 7 % of requests, on a server with many of them: 14 in 30 s are nothing.
    sim, judge = Sim(blocks=1025, max_num_seqs=256), Judge()

    def each(i: int) -> None:
        for k in range(7):
            sim.start(f"r{i}-{k}", blocks=2)
            if i >= 3:
                sim.end(f"r{i - 3}-{k}")
        if i % 2 == 0:
            sim.preempt(f"r{i}-0")
            sim.resume(f"r{i}-0", 2)

    history = watch(sim, judge, 120, each=each)
    assert sim.counters["preemptions"] == 60
    assert not any("pressure.preemption-storm" in names(f) for f in history)


def test_a_storm_is_seen_from_metrics_alone() -> None:
    sim, judge = Sim(), Judge()
    sim.has_probe = False

    def each(i: int) -> None:
        sim.metrics = EngineMetrics(
            kv_used_percent=99.0,
            running=12,
            waiting=3,
            preemptions_total=float(12 * i),
            generation_tokens_total=float(i),
            finished_total={"stop": float(i)},
        )

    history = watch(sim, judge, 30, each=each)
    assert first(history, "pressure.preemption-storm") == 1
    assert "pressure.kv-full" in names(history[-1])


def test_a_storm_ends_when_the_window_is_quiet() -> None:
    sim, judge = Sim(), Judge()
    storm(sim, judge, 20, requests=8, every=1)
    findings: tuple[Finding, ...] = ()
    for _ in range(50):
        for name in sim.requests:
            sim.decode(name, 1)
        findings = judge.judge(sim.tick())
    assert "pressure.preemption-storm" not in names(findings)


def test_a_request_that_loses_its_work_again_and_again_is_named() -> None:
    sim, judge = Sim(), Judge()
    sim.start("other", blocks=2)
    sim.start("big", blocks=20)
    watch(sim, judge, 2)

    def each(i: int) -> None:
        sim.decode("other", 1)
        if i % 4 == 0:
            sim.preempt("big")
        elif i % 4 == 2:
            sim.resume("big", 20)

    history = watch(sim, judge, 16, each=each)
    at = first(history, "pressure.thrash")
    assert at is not None
    assert at >= 8
    assert one(history[at], "pressure.thrash").request_ids == ("big",)


def test_a_request_preempted_once_or_twice_is_no_thrash() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a", blocks=4)

    def each(i: int) -> None:
        if i in (10, 30):
            sim.preempt("a")
            sim.resume("a", 4)
        sim.decode("a", 2)

    assert not any("pressure.thrash" in names(f) for f in watch(sim, judge, 60, each=each))


def test_a_request_larger_than_the_pool_is_told_with_both_numbers() -> None:
    sim, judge = Sim(blocks=65), Judge()
    sim.start("small", blocks=2)
    sim.wait("huge", prompt=64 * 16 + 1)
    history = watch(sim, judge, 8)

    assert first(history, "pressure.never-fits") == DEFAULTS.clear_s
    finding = one(history[-1], "pressure.never-fits")
    assert finding.request_ids == ("huge",)
    assert finding.evidence["blocks needed"] == "65"
    assert finding.evidence["blocks in the pool"] == "64 (1 null block less)"
    assert finding.severity == "critical"


def test_a_request_as_large_as_the_pool_fits() -> None:
    sim, judge = Sim(blocks=65), Judge()
    sim.start("small", blocks=2)
    sim.wait("large", prompt=64 * 16)
    assert not any("pressure.never-fits" in names(f) for f in watch(sim, judge, 20))


def test_groups_with_a_window_do_not_count_against_a_request() -> None:
    sim, judge = Sim(blocks=65), Judge()
    sim.wait("long", prompt=64 * 16)
    sim.engine_fields = {
        "groups": (Group(0, "FullAttention", 16), Group(1, "SlidingWindow", 16, 256))
    }
    assert not any("pressure.never-fits" in names(f) for f in watch(sim, judge, 20))


def test_allocation_failures_are_counted_in_their_window() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a", blocks=2)

    def each(i: int) -> None:
        sim.counters["alloc_failures"] += 1

    history = watch(sim, judge, 40, each=each)
    assert first(history, "pressure.alloc-failures") == DEFAULTS.alloc_failures
    assert one(history[-1], "pressure.alloc-failures").severity == "info"

    def often(i: int) -> None:
        sim.counters["alloc_failures"] += 30

    assert one(watch(sim, judge, 60, each=often)[-1], "pressure.alloc-failures").severity == (
        "warning"
    )


def park(sim: Sim, count: int, blocks: int) -> None:
    for i in range(count):
        sim.start(
            f"parked{i}",
            blocks=blocks,
            phase=Phase.HELD,
            status="WAITING_FOR_REMOTE_KVS",
            reason="remote KV",
            held_s=1.0,
        )


def test_wedged_admission_names_the_deferred_requests() -> None:
    sim, judge = Sim(blocks=513, max_num_seqs=8), Judge()
    sim.start("runs", blocks=2)
    park(sim, 7, 2)
    for i in range(4):
        sim.wait(f"w{i}")

    def each(i: int) -> None:
        sim.decode("runs", 1)

    history = watch(sim, judge, 33, each=each)
    at = first(history, "pressure.admission-wedged")
    assert at == DEFAULTS.wedged_s
    finding = one(history[-1], "pressure.admission-wedged")
    assert len(finding.request_ids) == 7
    assert "WAITING_FOR_REMOTE_KVS" in finding.evidence["deferred requests"]
    assert not names(history[-1]) & {"pressure.idle-pool-blocked", "pressure.blocked-by-parked"}

    sim.end("parked0")
    sim.resume("w0", 2)
    assert "pressure.admission-wedged" not in names(watch(sim, judge, 6, each=each)[-1])


def test_a_full_batch_of_long_answers_is_not_wedged() -> None:
    sim, judge = Sim(blocks=513, max_num_seqs=8), Judge()
    for i in range(8):
        sim.start(f"r{i}", blocks=2)
    sim.wait("w")

    def each(i: int) -> None:
        for k in range(8):
            sim.decode(f"r{k}", 4)

    assert not any(alarms(f, "pressure.") for f in watch(sim, judge, 90, each=each))


def test_a_long_prompt_that_takes_every_step_is_not_wedged() -> None:
    sim, judge = Sim(blocks=4097, max_num_seqs=8), Judge()
    req = sim.start("long", blocks=100, phase=Phase.PREFILL)
    sim.wait("w")

    def each(i: int) -> None:
        req.computed += 10

    assert not any(alarms(f, "pressure.") for f in watch(sim, judge, 90, each=each))


def test_requests_that_wait_beside_an_idle_pool_are_told() -> None:
    sim, judge = Sim(blocks=513), Judge()
    for i in range(3):
        sim.wait(f"w{i}")

    history = watch(sim, judge, 33)
    assert first(history, "pressure.idle-pool-blocked") == DEFAULTS.wedged_s
    finding = one(history[-1], "pressure.idle-pool-blocked")
    assert finding.request_ids == ("w0", "w1", "w2")
    assert finding.severity == "critical"


def test_paused_requests_are_not_stuck() -> None:
    sim, judge = Sim(blocks=513), Judge()
    sim.wait("w", reason="paused")
    sim.engine_fields = {"state": "paused"}
    assert not any(alarms(f, "pressure.") for f in watch(sim, judge, 90))


def test_parked_requests_that_hold_what_the_head_needs_are_named_largest_first() -> None:
    sim, judge = Sim(blocks=65), Judge()
    park(sim, 3, 18)
    sim.wait("head", prompt=30 * 16)

    history = watch(sim, judge, 33)
    assert first(history, "pressure.blocked-by-parked") == DEFAULTS.wedged_s
    finding = one(history[-1], "pressure.blocked-by-parked")
    assert finding.request_ids == ("parked0", "parked1", "parked2")
    assert finding.evidence["blocks needed"] == "30"


def test_one_request_that_holds_most_while_others_wait_is_named() -> None:
    sim, judge = Sim(blocks=101), Judge()
    sim.start("hog", blocks=70)
    sim.start("small", blocks=20)
    sim.wait("w", prompt=15 * 16)

    def each(i: int) -> None:
        if i % 10 == 0:
            sim.start(f"x{i}", blocks=1)
            sim.end(f"x{i}")

    history = watch(sim, judge, 40, each=each)
    assert first(history, "pressure.hog") == DEFAULTS.hog_s
    assert one(history[-1], "pressure.hog").request_ids == ("hog",)


def test_one_adapter_that_holds_most_while_others_wait_is_named() -> None:
    sim, judge = Sim(blocks=101), Judge()
    for i in range(4):
        sim.start(f"t{i}", blocks=20, lora="tenant-a")
    sim.start("b", blocks=8, lora="tenant-b")
    sim.wait("w", lora="tenant-b")

    finding = one(watch(sim, judge, 40)[-1], "pressure.hog")
    assert "tenant-a" in finding.summary
    assert len(finding.request_ids) == 4
