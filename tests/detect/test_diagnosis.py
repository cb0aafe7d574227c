"""One line, with the numbers that decide and one knob at most."""

from __future__ import annotations

import re

import pytest

from kvtop.detect.diagnosis import NAMES
from kvtop.detect.judge import Judge
from kvtop.model.snapshot import EngineMetrics, Finding, Phase
from tests.detect.build import Load, Sim, gpu, watch

KNOB = re.compile(r"--[a-z-]+")
UP = ("raise", "increase", "more")
DOWN = ("lower", "decrease", "less")


def verdict(history: list[tuple[Finding, ...]]) -> Finding:
    finding = history[-1][0]
    assert finding.rule in NAMES
    assert sum(f.rule.startswith("diagnosis.") for f in history[-1]) == 1
    return finding


def full_pool(sim: Sim) -> None:
    for i in range(8):
        sim.start(f"r{i}", blocks=12)


def storm_step(sim: Sim, i: int) -> None:
    sim.preempt(f"r{i % 8}")
    sim.resume(f"r{i % 8}", 12)


def test_a_healthy_engine_has_nothing_wrong_and_no_knob() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a", blocks=3)
    finding = verdict(watch(sim, judge, 10))
    assert finding.rule == "diagnosis.memory-fine"
    assert finding.severity == "info"
    assert finding.next_step == ""
    assert "KV use 5 %" in finding.summary


def test_a_full_pool_with_room_on_the_gpu_raises_the_reservation() -> None:
    sim, judge = Sim(blocks=100), Judge()
    full_pool(sim)
    sim.gpus = (gpu(60),)
    finding = verdict(watch(sim, judge, 15))
    assert finding.rule == "diagnosis.too-little-memory"
    assert "raise --gpu-memory-utilization" in finding.next_step
    assert "KV use 97 %" in finding.summary


def test_a_storm_on_a_full_gpu_lowers_the_batch() -> None:
    sim, judge = Sim(blocks=100), Judge()
    full_pool(sim)
    sim.gpus = (gpu(95),)
    history = watch(sim, judge, 40, each=lambda i: storm_step(sim, i))
    finding = verdict(history)
    assert finding.rule == "diagnosis.too-little-memory"
    assert finding.next_step == "lower --max-num-seqs from 16 to 7"


def test_a_request_larger_than_the_pool_names_the_length_that_fits() -> None:
    sim, judge = Sim(blocks=65), Judge()
    sim.wait("huge", prompt=2000)
    finding = verdict(watch(sim, judge, 10))
    assert finding.next_step == "set --max-model-len to 1024 at most"


def test_a_leak_with_room_is_memory_held_badly() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a", blocks=6)
    sim.end_but_lose("a", 3)
    finding = verdict(watch(sim, judge, 10))
    assert finding.rule == "diagnosis.memory-held-badly"
    assert "ghost 3" in finding.summary
    assert len(finding.block_ids) == 3


def test_a_small_leak_does_not_explain_a_full_pool() -> None:
    sim, judge = Sim(blocks=1001), Judge()
    sim.start("a", blocks=2)
    sim.end_but_lose("a", 2)
    watch(sim, judge, 8)
    sim.start("b", blocks=980)
    finding = verdict(watch(sim, judge, 20))
    assert finding.rule == "diagnosis.too-little-memory"
    assert "held badly 0.2 % of the pool" in finding.summary


def test_a_large_leak_explains_a_full_pool() -> None:
    sim, judge = Sim(blocks=101), Judge()
    sim.start("a", blocks=40)
    sim.end_but_lose("a", 40)
    watch(sim, judge, 8)
    sim.start("b", blocks=58)
    finding = verdict(watch(sim, judge, 20))
    assert finding.rule == "diagnosis.memory-held-badly"
    assert not KNOB.search(finding.next_step)


def test_a_stopped_engine_is_not_a_question_of_memory() -> None:
    sim, judge = Sim(blocks=100), Judge()
    full_pool(sim)
    watch(sim, judge, 15)
    sim.engine_fields = {"process_state": "T"}
    assert verdict(watch(sim, judge, 6)).rule == "diagnosis.engine-stuck"


def test_stale_gauges_decide_nothing() -> None:
    sim, judge = Sim(), Judge()
    sim.has_probe = False
    sim.metrics = EngineMetrics(kv_used_percent=97.0, running=5, gauges_frozen_s=50.0)
    assert verdict(watch(sim, judge, 60)).rule == "diagnosis.unknown"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("used", [60.0, 95.0])
def test_no_knob_is_ever_turned_both_ways_at_once(seed: int, used: float) -> None:
    sim = Sim(blocks=80)
    sim.gpus = (gpu(used),)
    load, judge = Load(sim, seed), Judge()
    for i in range(150):
        if i > 60:
            load.idle_left = 0
        findings = judge.judge(load.step())
        turned: dict[str, set[str]] = {}
        for finding in findings:
            if finding.rule.startswith("diagnosis."):
                text = finding.next_step.lower()
                for knob in KNOB.findall(text):
                    way = "up" if any(word in text for word in UP) else "down"
                    turned.setdefault(knob, set()).add(way)
        assert all(len(ways) == 1 for ways in turned.values())
        assert len(turned) <= 1


def test_gauges_alone_do_not_vouch_for_the_blocks() -> None:
    sim, judge = Sim(), Judge()
    sim.has_probe = False
    sim.metrics = EngineMetrics(kv_used_percent=11.0, running=1, waiting=0)
    finding = verdict(watch(sim, judge, 10))
    assert finding.rule == "diagnosis.unknown"
    assert "lost or held blocks are not in them" in finding.summary


def test_a_pool_that_is_full_with_a_queue_is_not_called_well() -> None:
    sim, judge = Sim(blocks=100), Judge()
    full_pool(sim)
    sim.start("more", blocks=3)
    sim.start("queued", blocks=0, phase=Phase.WAITING, status="WAITING")
    for look in watch(sim, judge, 12):
        assert look[0].rule != "diagnosis.memory-fine"
