from __future__ import annotations

from dataclasses import replace

from kvtop.draw.pick import engine_of, gpu_of, old_line, source_of, why
from kvtop.draw.view import View
from kvtop.model.snapshot import SourceState, SourceStatus
from tests.draw import samples


def test_indices_wrap_around() -> None:
    two = replace(samples.HEALTHY, engines=(samples.ENGINE, replace(samples.ENGINE, pid=2)))
    assert engine_of(two, View(engine=3)) is two.engines[1]
    assert engine_of(two, View(engine=-1)) is two.engines[1]
    assert engine_of(samples.EMPTY, View()) is None
    assert gpu_of(samples.EMPTY, View(gpu=4)) is None


def test_a_source_belongs_to_an_engine_by_pid_or_server() -> None:
    metrics = SourceStatus("metrics 127.0.0.1:8000", "metrics", SourceState.OK, 0.0)
    other = SourceStatus("metrics 127.0.0.1:18000", "metrics", SourceState.FAILED, 0.0)
    snap = replace(samples.HEALTHY, sources=(other, metrics, *samples.SOURCES))
    assert source_of(snap, "metrics", samples.ENGINE) is metrics
    engine = source_of(snap, "engine", samples.ENGINE)
    assert engine is not None
    assert engine.target_pid == 4740
    assert (
        source_of(snap, "engine", replace(samples.ENGINE, pid=9, api_pids=(), worker_pids=()))
        is None
    )


def test_the_worst_of_several_is_told() -> None:
    bad = SourceStatus("engine w", "engine", SourceState.FAILED, 0.0, target_pid=4801)
    snap = replace(samples.HEALTHY, sources=(*samples.SOURCES, bad))
    assert source_of(snap, "engine", samples.ENGINE) is bad


def test_what_a_source_says_is_made_visible() -> None:
    source = SourceStatus("x", "nvml", SourceState.FAILED, 5.0, reason="a\x1b", remedy="b\n")
    assert why(source) == "a\\x1b; b\\x0a"
    assert old_line(source, samples.HEALTHY, samples.VIEW) == "FAILED no value yet: a\\x1b; b\\x0a"
    assert old_line(None, samples.HEALTHY, samples.VIEW) == ""
