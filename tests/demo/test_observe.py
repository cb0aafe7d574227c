"""The probe's own code against the truth of the simulated engine's objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from kvtop.demo.engine import EngineCore
from kvtop.demo.request import RequestStatus
from kvtop.demo.scenario import SCENARIOS
from kvtop.model.blocks import BlockState
from kvtop.model.snapshot import Snapshot
from tests.demo.observer import Observer

MakeEngine = Callable[..., EngineCore]


def true_states(engine: EngineCore) -> list[BlockState]:
    """Where each block is, told from tables and the queue alone."""
    scheduler = engine.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    tables = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
    holders: Counter[int] = Counter()
    live: set[int] = set()
    for name, table in tables.items():
        holders.update(block.block_id for block in table)
        parked = RequestStatus.WAITING_FOR_STREAMING_REQ
        if scheduler.requests[name].status != parked:
            live.update(block.block_id for block in table)
    free = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
    states = []
    for block in pool.blocks:
        number = block.block_id
        if block.is_null:
            states.append(BlockState.NULL)
        elif number in free:
            named = block.block_hash is not None
            states.append(BlockState.CACHED if named else BlockState.FREE)
        elif not holders[number]:
            states.append(BlockState.GHOST)
        elif number not in live:
            states.append(BlockState.HELD)
        else:
            states.append(BlockState.SHARED if holders[number] > 1 else BlockState.USED)
    return states


def only_engine(snapshot: Snapshot):  # type: ignore[no-untyped-def]
    (engine,) = snapshot.engines
    return engine


@pytest.mark.parametrize("blocks", [300, None])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_snapshot_is_the_truth(
    make_engine: MakeEngine, scenario: str, blocks: int | None
) -> None:
    engine = make_engine(scenario, 2, blocks)
    observer = Observer(engine)
    for _ in range(15):
        engine.run_steps(1.3)
        seen = only_engine(observer.snapshot())
        (pool,) = seen.pools
        assert pool.states is not None
        assert [BlockState(s) for s in pool.states] == true_states(engine)
        assert pool.free_queue == pool.counts.free + pool.counts.cached
        assert {r.id for r in seen.requests} == set(engine.scheduler.requests)
        for row in seen.requests:
            request = engine.scheduler.requests[row.id]
            table = engine.scheduler.kv_cache_manager.get_block_ids(row.id)[0]
            assert row.status == str(request.status)
            assert row.blocks == len(table)
            assert row.output_tokens == request.num_output_tokens
            assert row.preemptions == request.num_preemptions
            known = row.id in engine.output_processor.request_states
            assert row.client == ("live" if known else "gone")
            if request.status == RequestStatus.RUNNING:
                assert row.cached_tokens == request.num_cached_tokens
        assert seen.metrics.kv_used_percent == pytest.approx(
            100 * engine.scheduler.kv_cache_manager.usage
        )
        assert (seen.probe.drift, seen.probe.errors) == (0, 0)
    counts = seen.counters
    references = sum(b.ref_cnt for b in engine.scheduler.kv_cache_manager.block_pool.blocks)
    assert counts.allocated + counts.touched - counts.freed == references
    assert counts.preemptions == engine.metrics.counters["num_preemptions"]


def test_the_engine_is_left_as_it_was(make_engine: MakeEngine) -> None:
    watched, plain = make_engine("leak", 3), make_engine("leak", 3)
    observer = Observer(watched)
    for _ in range(10):
        watched.run_steps(1.0)
        observer.snapshot()
    observer.close()
    assert "schedule" not in vars(watched.scheduler)
    while plain.clock.now_s < watched.clock.now_s:
        plain.run_steps(0.001)
    assert plain.metrics.counters == watched.metrics.counters
    assert plain.scheduler.kv_cache_manager.usage == watched.scheduler.kv_cache_manager.usage


def test_times_in_a_snapshot_are_simulated(make_engine: MakeEngine) -> None:
    engine = make_engine("wedge", 0)
    observer = Observer(engine)
    engine.run_steps(30.0)
    first = observer.snapshot()
    engine.run_steps(20.0)
    second = observer.snapshot()
    assert second.mono_s - first.mono_s == pytest.approx(20.0, abs=0.2)
    assert second.time_s - first.time_s == pytest.approx(second.mono_s - first.mono_s)
    held = {r.id: r.held_s for r in only_engine(second).requests if r.phase == "held"}
    for request in only_engine(first).requests:
        if request.phase == "held" and request.id in held:
            grown = held[request.id] - request.held_s
            assert grown == pytest.approx(second.mono_s - first.mono_s, abs=0.01)
    assert held
