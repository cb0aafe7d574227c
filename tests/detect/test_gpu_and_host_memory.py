"""Memory outside the block pool: GPU and host."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvtop.detect.judge import Judge
from kvtop.detect.thresholds import DEFAULTS
from kvtop.model.snapshot import EngineMetrics, Gpu, GpuProcess
from tests.detect.build import PID, Sim, alarms, first, gpu, names, one, watch

GB = 1_000_000_000
MB = 1_000_000


def with_used(used: int, **fields: object) -> Gpu:
    base = gpu(50)
    process = GpuProcess(4800, "VLLM::Worker", used, PID)
    fields = {"processes": (process,), **fields}
    return replace(base, mem_used_bytes=used, mem_free_bytes=80 * GB - used, **fields)


def test_growth_without_new_requests_is_told_after_ten_seconds() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a")
    sim.gpus = (with_used(40 * GB),)
    watch(sim, judge, 40)

    def each(i: int) -> None:
        sim.gpus = (with_used(40 * GB + (i + 1) * 8 * MB),)

    history = watch(sim, judge, 20, each=each)
    assert first(history, "gpu.growth") is not None
    assert 5 <= (first(history, "gpu.growth") or 0) <= DEFAULTS.gpu_growth_s
    assert "MB/s" in one(history[-1], "gpu.growth").evidence["growth"]

    assert "gpu.growth" not in names(watch(sim, judge, 16)[-1])


def test_growth_while_requests_arrive_is_work() -> None:
    sim, judge = Sim(), Judge()
    sim.gpus = (with_used(40 * GB),)
    watch(sim, judge, 40)

    def each(i: int) -> None:
        sim.gpus = (with_used(40 * GB + (i + 1) * 8 * MB),)
        if i % 5 == 0:
            sim.start(f"r{i}", blocks=1)

    assert not any("gpu.growth" in names(f) for f in watch(sim, judge, 40, each=each))


@pytest.mark.parametrize("probe", [True, False])
def test_growth_right_after_a_start_is_loading(probe: bool) -> None:
    sim, judge = Sim(), Judge()
    sim.has_probe = probe

    def each(i: int) -> None:
        sim.gpus = (with_used(10 * GB + i * 500 * MB),)

    assert not any("gpu.growth" in names(f) for f in watch(sim, judge, 29, each=each))


def test_growth_is_not_judged_when_arrivals_are_not_known() -> None:
    sim, judge = Sim(), Judge()
    sim.has_probe = False
    sim.metrics = EngineMetrics(running=1)  # no token counters

    def each(i: int) -> None:
        sim.gpus = (with_used(40 * GB + i * 8 * MB),)

    assert not any("gpu.growth" in names(f) for f in watch(sim, judge, 90, each=each))


def test_one_allocation_in_a_lump_is_no_growth() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a")
    sim.gpus = (with_used(40 * GB),)
    watch(sim, judge, 40)
    sim.gpus = (with_used(41 * GB),)
    assert not any("gpu.growth" in names(f) for f in watch(sim, judge, 30))


def test_a_nearly_full_device_is_told_after_thirty_seconds() -> None:
    sim, judge = Sim(), Judge()
    sim.gpus = (gpu(85),)
    watch(sim, judge, 5)
    sim.gpus = (gpu(93),)
    history = watch(sim, judge, 33)
    assert first(history, "gpu.full") == DEFAULTS.gpu_full_s
    sim.gpus = (gpu(91),)  # above the clear condition
    assert "gpu.full" in names(watch(sim, judge, 20)[-1])
    sim.gpus = (gpu(89),)
    assert "gpu.full" not in names(watch(sim, judge, 6)[-1])


def test_a_flat_ninety_percent_is_explained_as_the_reservation() -> None:
    sim, judge = Sim(), Judge()
    sim.gpus = (gpu(90),)
    history = watch(sim, judge, 64)
    assert first(history, "gpu.reservation") == DEFAULTS.gpu_reserved_s
    finding = one(history[-1], "gpu.reservation")
    assert finding.severity == "info"
    assert "not a leak" in finding.summary
    assert finding.evidence["KV pool in use"] == "0.0 %"
    assert not any(alarms(f, "gpu.") for f in history)


def test_memory_that_no_process_explains_is_information() -> None:
    sim, judge = Sim(), Judge()
    sim.gpus = (replace(with_used(10 * GB), mem_used_bytes=14 * GB),)
    history = watch(sim, judge, 33)
    assert first(history, "gpu.unaccounted") == DEFAULTS.gpu_unaccounted_s
    assert one(history[-1], "gpu.unaccounted").severity == "info"


@pytest.mark.parametrize("processes", [None, ()])
def test_processes_that_nvml_does_not_tell_are_not_missing(processes: object) -> None:
    sim, judge = Sim(), Judge()
    sim.gpus = (with_used(30 * GB, processes=processes),)
    assert not any("gpu.unaccounted" in names(f) for f in watch(sim, judge, 60))


def test_one_lost_gpu_hides_no_other_and_is_told() -> None:
    sim, judge = Sim(), Judge()
    sim.gpus = (gpu(85), replace(gpu(85), index=1))
    watch(sim, judge, 3)
    sim.gpus = (Gpu(index=0, error="GPU is lost"), replace(gpu(95), index=1))
    history = watch(sim, judge, 35)
    assert first(history, "gpu.lost") == DEFAULTS.gpu_lost_s
    assert "gpu.full" in names(history[-1])


def test_a_gpu_that_never_could_be_read_is_not_lost() -> None:
    sim, judge = Sim(), Judge()
    sim.gpus = (Gpu(index=0, error="no permission (MIG)"),)
    assert not any("gpu.lost" in names(f) for f in watch(sim, judge, 30))


def test_old_nvml_values_prove_nothing() -> None:
    sim, judge = Sim(), Judge()
    sim.gpus = (gpu(85),)
    watch(sim, judge, 3)
    sim.nvml_ok = False
    sim.gpus = (gpu(99),)
    assert not any(alarms(f, "gpu.") for f in watch(sim, judge, 90))


def test_unified_memory_is_not_taken_for_gpu_memory() -> None:
    sim, judge = Sim(), Judge()
    sim.start("a")

    def each(i: int) -> None:
        sim.gpus = (with_used(40 * GB + i * 8 * MB, mem_is_system=True),)

    assert not any(names(f, "gpu.") for f in watch(sim, judge, 90, each=each))


def test_an_engine_that_grows_on_the_gpu_outside_its_pool() -> None:
    sim, judge = Sim(), Judge()

    def each(i: int) -> None:
        sim.gpus = (with_used(40 * GB + i * 2 * MB),)
        sim.start(f"r{i}", blocks=1)
        sim.end(f"r{i}")

    history = watch(sim, judge, 400, each=each)
    at = first(history, "gpu.outside-kv")
    assert at is not None
    assert at <= DEFAULTS.gpu_outside_s + 30
    assert one(history[-1], "gpu.outside-kv").engine_pid == PID


def test_an_engine_that_levels_off_on_the_gpu_is_well() -> None:
    sim, judge = Sim(), Judge()

    def each(i: int) -> None:
        sim.gpus = (with_used(40 * GB + int(GB * (1 - 0.98**i))),)

    assert not any("gpu.outside-kv" in names(f) for f in watch(sim, judge, 700, each=each))


def grow(sim: Sim, judge: Judge, seconds: int, rate: float, noise: float = 0.0) -> list[tuple]:
    rng = random.Random(1)

    def each(i: int) -> None:
        used = int(2 * GB + i * rate + rng.uniform(-noise, noise))
        sim.engine_fields = {"rss_bytes": used}

    return watch(sim, judge, seconds, each=each)


def test_host_memory_that_grows_steadily_is_told_with_process_and_slope() -> None:
    sim, judge = Sim(), Judge()
    history = grow(sim, judge, 200, 2 * MB, noise=3 * MB)
    at = first(history, "host.rss-growth")
    assert at is not None
    assert at <= DEFAULTS.rss_window_s + 15
    finding = one(history[-1], "host.rss-growth")
    assert finding.evidence["process"] == f"engine core, pid {PID}"
    assert "a minute" in finding.evidence["slope"]


def test_host_memory_that_grows_slowly_is_told_within_the_hour() -> None:
    sim, judge = Sim(), Judge()
    history = grow(sim, judge, 3000, 0.08 * MB, noise=1 * MB)
    at = first(history, "host.rss-growth")
    assert at is not None
    assert at > 600


@pytest.mark.parametrize("seed", range(5))
def test_host_memory_that_wanders_is_well(seed: int) -> None:
    sim, judge = Sim(), Judge()
    rng = random.Random(seed)
    used = 2.0 * GB

    def each(i: int) -> None:
        nonlocal used
        used = max(1.9 * GB, min(2.3 * GB, used + rng.uniform(-30, 30) * MB))
        sim.engine_fields = {"rss_bytes": int(used)}

    assert not any("host.rss-growth" in names(f) for f in watch(sim, judge, 1200, each=each))


def test_host_memory_of_a_warm_up_that_levels_off_is_well() -> None:
    sim, judge = Sim(), Judge()

    def each(i: int) -> None:
        sim.engine_fields = {"rss_bytes": int(2 * GB + 500 * MB * (1 - 0.97**i))}

    assert not any("host.rss-growth" in names(f) for f in watch(sim, judge, 900, each=each))
