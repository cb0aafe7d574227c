"""What the demo's tests share: small engines, and the identities that always hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import pytest

from kvtop.demo.clock import FreeClock
from kvtop.demo.config import kv_cache_config, vllm_config
from kvtop.demo.engine import EngineCore
from kvtop.demo.pool import BlockPool
from kvtop.demo.request import Request
from kvtop.demo.scenario import SCENARIOS
from kvtop.demo.scheduler import Scheduler


def check_pool(pool: BlockPool) -> None:
    """Every invariant of `BlockPool`, from its objects alone."""
    queue = pool.free_block_queue.get_all_free_blocks()
    assert len(queue) == pool.free_block_queue.num_free_blocks
    assert {b.block_id for b in queue} == {
        b.block_id for b in pool.blocks if b.ref_cnt == 0 and not b.is_null
    }
    assert len({b.block_id for b in queue}) == len(queue)
    for block in pool.blocks:
        linked = block.next_free_block is not None and block.prev_free_block is not None
        assert linked == (block.ref_cnt == 0 and not block.is_null)
        assert block.ref_cnt >= 0
        if block.block_hash is not None:
            held = pool.cached_block_hash_to_block._cache[block.block_hash]
            assert held[block.block_id] is block
    named = sum(len(d) for d in pool.cached_block_hash_to_block._cache.values())
    assert named == sum(b.block_hash is not None for b in pool.blocks)
    assert pool.null_block.block_id == 0
    assert pool.null_block.block_hash is None


def check_scheduler(scheduler: Scheduler, lost: Collection[int] = ()) -> None:
    """Pool invariants; each ref count is the number of holders; no request is in two places."""
    manager = scheduler.kv_cache_manager
    check_pool(manager.block_pool)
    tables = manager.coordinator.single_type_managers[0].req_to_blocks
    holders: Counter[int] = Counter()
    for table in tables.values():
        assert len({b.block_id for b in table}) == len(table)
        holders.update(b.block_id for b in table)
    for _, blocks in scheduler.deferred_frees:
        holders.update(b.block_id for b in blocks)
    holders.update(lost)
    for block in manager.block_pool.blocks:
        if not block.is_null:
            assert block.ref_cnt == holders[block.block_id], block
    assert {name for name, table in tables.items() if table} <= set(scheduler.requests)
    places = [
        r.request_id
        for group in (scheduler.running, scheduler.waiting, scheduler.kv_holding_waiting)
        for r in group
    ]
    assert sorted(places) == sorted(scheduler.requests)
    assert len(scheduler.running) <= scheduler.max_num_running_reqs
    for request in scheduler.running:
        table = tables.get(request.request_id, [])
        assert len(table) * scheduler.block_size >= request.num_computed_tokens


@pytest.fixture
def pool_check() -> Callable[[BlockPool], None]:
    return check_pool


@pytest.fixture
def scheduler_check() -> Callable[..., None]:
    return check_scheduler


@pytest.fixture
def make_scheduler() -> Callable[..., Scheduler]:
    def make(blocks: int = 64, seqs: int = 8, budget: int = 128) -> Scheduler:
        return Scheduler(vllm_config(blocks, seqs, budget), kv_cache_config(blocks, 1))

    return make


@pytest.fixture
def make_request() -> Callable[..., Request]:
    def make(
        name: str,
        prompt: list[int] | range,
        max_tokens: int = 50,
        stop_after: int = 50,
        resumable: bool = False,
    ) -> Request:
        return Request(
            name,
            prompt,
            max_tokens=max_tokens,
            stop_after=stop_after,
            arrival_time=0.0,
            block_size=16,
            resumable=resumable,
        )

    return make


@pytest.fixture
def make_engine() -> Callable[..., EngineCore]:
    def make(scenario: str = "healthy", seed: int = 0, blocks: int | None = None) -> EngineCore:
        return EngineCore(SCENARIOS[scenario], seed, blocks, FreeClock())

    return make
