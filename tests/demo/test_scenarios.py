from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from kvtop.demo.config import MAX_BLOCKS, gpus_needed
from kvtop.demo.engine import EngineCore
from kvtop.demo.request import RequestStatus
from kvtop.demo.scenario import SCENARIOS, find_scenario
from kvtop.errors import UsageError

MakeEngine = Callable[..., EngineCore]
Check = Callable[..., None]


def fingerprint(engine: EngineCore) -> str:
    """Everything the simulation decided so far."""
    scheduler = engine.scheduler
    tables = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
    state = (
        engine.clock.now_s,
        [(r.request_id, r.status, r.num_tokens, r.num_computed_tokens) for r in scheduler.running],
        [r.request_id for r in scheduler.waiting],
        {name: [b.block_id for b in table] for name, table in tables.items()},
        [(b.ref_cnt, b.block_hash) for b in scheduler.kv_cache_manager.block_pool.blocks],
        engine.metrics.counters,
        engine.metrics.histograms["time_to_first_token_seconds"].counts,
    )
    return hashlib.sha256(repr(state).encode()).hexdigest()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_seed_decides_everything(make_engine: MakeEngine, scenario: str) -> None:
    one, two, other = make_engine(scenario, 3), make_engine(scenario, 3), make_engine(scenario, 4)
    for engine in (one, two, other):
        engine.run_steps(12.0)
    assert fingerprint(one) == fingerprint(two)
    assert fingerprint(one) != fingerprint(other)


@pytest.mark.parametrize("blocks", [64, 300, None])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_identities_hold_in_every_scenario(
    make_engine: MakeEngine, scheduler_check: Check, scenario: str, blocks: int | None
) -> None:
    engine = make_engine(scenario, 1, blocks)
    for _ in range(12):
        engine.run_steps(1.5)
        lost = engine.faults.lost_block_ids if engine.faults else ()
        scheduler_check(engine.scheduler, lost)
    assert engine.metrics.counters["generation_tokens"] > 0


@pytest.mark.parametrize("seed", range(5))
def test_healthy_never_preempts_never_loses_and_becomes_idle(
    make_engine: MakeEngine, seed: int
) -> None:
    engine = make_engine("healthy", seed)
    idle_usage = []
    publish = engine.output_processor.publish_gauges

    def on_idle(scheduler: object) -> None:
        idle_usage.append(engine.scheduler.kv_cache_manager.usage)
        publish(engine.scheduler)

    engine.output_processor.publish_gauges = on_idle  # type: ignore[method-assign,assignment]
    engine.run_steps(150.0)
    counters = engine.metrics.counters
    assert counters["num_preemptions"] == 0
    assert counters["prefix_cache_hits"] > 0.2 * counters["prefix_cache_queries"]
    assert idle_usage
    assert max(idle_usage) == 0.0
    # Everyone the engine works for still has a client.
    assert set(engine.scheduler.requests) == set(engine.output_processor.request_states)
    assert engine.metrics.success["stop"] > 50
    assert engine.metrics.success["length"] > 0


def test_the_small_healthy_pool_does_not_preempt_either(make_engine: MakeEngine) -> None:
    engine = make_engine("healthy", 2, 256)
    engine.run_steps(100.0)
    assert engine.metrics.counters["num_preemptions"] == 0
    assert sum(engine.metrics.success.values()) > 20


def test_leak_loses_blocks_that_are_in_no_table(make_engine: MakeEngine) -> None:
    engine = make_engine("leak", 0)
    assert engine.faults is not None
    counts = []
    for _ in range(4):
        engine.run_steps(30.0)
        counts.append(len(engine.faults.lost_block_ids))
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1]
    manager = engine.scheduler.kv_cache_manager
    tables = manager.coordinator.single_type_managers[0].req_to_blocks
    held = {block.block_id for table in tables.values() for block in table}
    blocks = manager.block_pool.blocks
    ghosts = {b.block_id for b in blocks if b.ref_cnt and b.block_id not in held and not b.is_null}
    assert ghosts == engine.faults.lost_block_ids
    assert {blocks[i].ref_cnt for i in ghosts} == {1}
    assert engine.metrics.counters["num_preemptions"] == 0


def test_a_leak_stops_before_the_pool_is_gone(make_engine: MakeEngine) -> None:
    engine = make_engine("leak", 0, 128)
    engine.run_steps(400.0)
    assert engine.faults is not None
    assert 10 < len(engine.faults.lost_block_ids) <= 0.4 * 127
    assert engine.scheduler.running or not engine.scheduler.waiting


def test_preempt_storm_preempts_and_goes_on(make_engine: MakeEngine) -> None:
    engine = make_engine("preempt-storm", 0)
    engine.run_steps(20.0)
    early = engine.metrics.counters["num_preemptions"]
    engine.run_steps(30.0)
    late = engine.metrics.counters["num_preemptions"]
    assert early > 0
    assert late - early > 30
    assert sum(engine.metrics.success.values()) > 0
    assert max(r.num_preemptions for r in engine.scheduler.requests.values()) > 1


def test_disconnect_leaves_requests_without_a_client(make_engine: MakeEngine) -> None:
    engine = make_engine("disconnect", 0)
    engine.run_steps(40.0)
    zombies = set(engine.scheduler.requests) - set(engine.output_processor.request_states)
    assert len(zombies) >= 5
    one = engine.scheduler.requests[sorted(zombies)[0]]
    before = one.num_output_tokens
    engine.run_steps(1.0)
    assert one.num_output_tokens > before or one.is_finished()
    assert set(engine.output_processor.request_states) <= set(engine.scheduler.requests)


def test_wedge_admits_nobody_while_blocks_are_free(make_engine: MakeEngine) -> None:
    engine = make_engine("wedge", 0)
    engine.run_steps(40.0)
    scheduler = engine.scheduler
    parked = list(scheduler.kv_holding_waiting)
    assert {r.status for r in parked} == {RequestStatus.WAITING_FOR_STREAMING_REQ}
    assert len(parked) + len(scheduler.running) == scheduler.max_num_running_reqs
    assert len(scheduler.waiting) > 10
    assert scheduler.kv_cache_manager.usage < 0.2
    admitted = engine.metrics.histograms["iteration_tokens_total"].counts
    before = list(admitted)
    engine.run_steps(30.0)
    assert admitted == before
    assert len(scheduler.requests) <= 60


def test_an_unknown_scenario_is_refused_with_the_choices() -> None:
    with pytest.raises(UsageError) as caught:
        find_scenario("[/x]")
    assert "preempt-storm" in caught.value.line()
    assert "\n" not in caught.value.line()


@pytest.mark.parametrize("blocks", [-1, 0, 63, MAX_BLOCKS + 1])
def test_impossible_pools_are_refused(make_engine: MakeEngine, blocks: int) -> None:
    with pytest.raises(UsageError, match="--blocks"):
        make_engine("healthy", 0, blocks)


def test_big_pools_need_more_gpus() -> None:
    assert [gpus_needed(n) for n in (64, 20_480, 40_000, 100_000, MAX_BLOCKS)] == [1, 1, 2, 4, 8]
