"""Memory that is there and does little."""

from __future__ import annotations

from dataclasses import replace

from kvtop.detect.judge import Judge
from kvtop.detect.thresholds import DEFAULTS
from kvtop.model.snapshot import EngineMetrics
from tests.detect.build import Sim, first, names, one, watch


def hits(sim: Sim, percent: float | None) -> None:
    sim.metrics = EngineMetrics(running=1, prefix_hit_percent=percent)


def test_a_hit_rate_that_falls_below_its_own_baseline_is_told() -> None:
    sim, judge = Sim(), Judge()
    hits(sim, 70.0)
    assert not any("efficiency.hit-rate-fallen" in names(f) for f in watch(sim, judge, 900))
    hits(sim, 20.0)
    history = watch(sim, judge, 200)

    at = first(history, "efficiency.hit-rate-fallen")
    assert at is not None
    assert DEFAULTS.hit_s <= at <= DEFAULTS.hit_s + 60
    assert "70.0 %" in one(history[-1], "efficiency.hit-rate-fallen").evidence["baseline"]
    hits(sim, 68.0)
    assert "efficiency.hit-rate-fallen" not in names(watch(sim, judge, 90)[-1])


def test_a_hit_rate_that_was_always_low_is_not_told() -> None:
    sim, judge = Sim(), Judge()
    hits(sim, 5.0)
    assert not any("efficiency.hit-rate-fallen" in names(f) for f in watch(sim, judge, 1500))


def test_a_hit_rate_without_queries_is_not_zero() -> None:
    sim, judge = Sim(), Judge()
    hits(sim, 70.0)
    watch(sim, judge, 900)
    hits(sim, None)
    assert not any("efficiency.hit-rate-fallen" in names(f) for f in watch(sim, judge, 300))


def test_prompts_shorter_than_a_block_explain_a_hit_rate_of_zero() -> None:
    sim, judge = Sim(), Judge()
    hits(sim, 0.0)

    def each(i: int) -> None:
        req = sim.start(f"r{i}", blocks=1)
        req.prompt = 7
        if i >= 2:
            sim.end(f"r{i - 2}")

    history = watch(sim, judge, 40, each=each)
    finding = one(history[-1], "efficiency.short-prompts")
    assert finding.severity == "info"
    assert "16 tokens" in finding.summary
    hits(sim, 30.0)
    assert "efficiency.short-prompts" not in names(watch(sim, judge, 8)[-1])


def test_both_uses_are_shown_when_blocks_are_mostly_empty() -> None:
    sim, judge = Sim(blocks=61), Judge()
    for i in range(40):
        req = sim.start(f"r{i}", blocks=1)
        req.computed = 8
    history = watch(sim, judge, 64)
    assert first(history, "efficiency.tail-slack") == DEFAULTS.slack_s
    finding = one(history[-1], "efficiency.tail-slack")
    assert finding.evidence["blocks in use"] == "66.7 %"
    assert finding.evidence["token slots filled"] == "33.3 %"


def test_a_cache_that_is_never_hit_is_information() -> None:
    sim, judge = Sim(blocks=257), Judge()

    def each(i: int) -> None:
        sim.start(f"r{i}", blocks=8)
        sim.end(f"r{i}", cache=True)

    history = watch(sim, judge, 320, each=each)
    at = first(history, "efficiency.never-hit")
    assert at is not None
    assert 200 <= at <= 300
    assert one(history[-1], "efficiency.never-hit").severity == "info"


def test_cached_blocks_that_live_for_seconds_while_others_are_hit() -> None:
    sim, judge = Sim(blocks=65), Judge()

    def each(i: int) -> None:
        sim.start(f"r{i}", blocks=16)
        sim.end(f"r{i}", cache=True)
        cached = [b for b in sim.free if sim.hashed[b]][-2:]
        sim.touch(cached)
        sim.give(cached, cache=True)

    history = watch(sim, judge, 120, each=each)
    assert first(history, "efficiency.short-cache-life") is not None
    assert "s before it is evicted" in one(history[-1], "efficiency.short-cache-life").summary


def test_two_engines_of_one_server_far_apart_are_told_on_the_fuller_one() -> None:
    full, empty, judge = Sim(blocks=101), Sim(blocks=101), Judge()
    empty.pid = 4741
    empty.engine_fields = {"engine": 1}
    full.start("a", blocks=80)
    out = []
    for _ in range(64):
        a, b = full.tick(), empty.tick()
        shot = replace(a, engines=a.engines + b.engines, sources=a.sources + b.sources[3:])
        out.append(judge.judge(shot))
    assert first(out, "efficiency.engine-skew") == DEFAULTS.skew_s
    finding = one(out[-1], "efficiency.engine-skew")
    assert finding.engine_pid == 4740
    assert finding.evidence == {"engine 0": "80.0 % used", "engine 1": "0.0 % used"}
