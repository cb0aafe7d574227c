from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtop.demo.pool import BlockPool, KVCacheBlock

Check = Callable[[BlockPool], None]


def name_of(number: int) -> bytes:
    return number.to_bytes(4, "big")


def give_names(pool: BlockPool, blocks: list[KVCacheBlock], first: int) -> None:
    request = SimpleNamespace(block_hashes=[name_of(first + i) for i in range(len(blocks))])
    pool.cache_full_blocks(cast(Any, request), blocks, 0, len(blocks))


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


STEP = st.tuples(
    st.sampled_from(["take", "free", "free_some", "name", "hit", "reset"]),
    st.integers(0, 1000),
    st.integers(1, 7),
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=st.lists(STEP, max_size=60), caching=st.booleans())
def test_identities_hold_after_every_operation(
    pool_check: Check, steps: list[tuple[str, int, int]], caching: bool
) -> None:
    pool = BlockPool(20, caching)
    tables: list[list[KVCacheBlock]] = []
    named = 0
    for kind, which, count in steps:
        table = tables[which % len(tables)] if tables else None
        if kind == "take":
            if count <= pool.get_num_free_blocks():
                tables.append(pool.get_new_blocks(count))
            else:
                with pytest.raises(ValueError, match="free blocks"):
                    pool.get_new_blocks(count)
        elif kind == "free" and table is not None:
            tables.remove(table)
            pool.free_blocks(reversed(table))
        elif kind == "free_some" and table is not None:
            kept, gone = table[:count], table[count:]
            table[:] = kept
            pool.free_blocks(reversed(gone))
        elif kind == "name" and table is not None and caching:
            give_names(pool, table, named)
            named += len(table)
        elif kind == "hit":
            block = pool.get_cached_block(name_of(which % max(1, named)))
            if block is not None:
                pool.touch([block])
                tables.append([block])
        elif kind == "reset":
            done = pool.reset_prefix_cache()
            assert done == (not any(tables))
        pool_check(pool)
        holders = [block.block_id for table in tables for block in table]
        for block in pool.blocks[1:]:
            assert block.ref_cnt == holders.count(block.block_id)
    for table in tables:
        pool.free_blocks(reversed(table))
    pool_check(pool)
    assert pool.get_num_free_blocks() == 19
    assert pool.get_usage() == 0.0


def test_least_recently_used_content_is_evicted_first() -> None:
    pool = BlockPool(7)
    first, second, third = (pool.get_new_blocks(2) for _ in range(3))
    for number, table in enumerate((first, second, third)):
        give_names(pool, table, 10 * number)
    # Freed tail first, so of each table the tail goes before the head.
    for table in (second, first, third):
        pool.free_blocks(reversed(table))
    order = ids([*reversed(second), *reversed(first), *reversed(third)])
    assert ids(pool.free_block_queue.get_all_free_blocks()) == order
    assert ids(pool.get_new_blocks(3)) == order[:3]
    assert pool.get_cached_block(name_of(10)) is None
    assert pool.get_cached_block(name_of(0)) is first[0]


def test_a_hit_saves_a_block_from_eviction() -> None:
    pool = BlockPool(4)
    table = pool.get_new_blocks(3)
    give_names(pool, table, 0)
    pool.free_blocks(reversed(table))
    pool.touch([table[2]])  # it was next
    assert ids(pool.get_new_blocks(1)) == [table[1].block_id]
    assert pool.get_cached_block(name_of(2)) is table[2]


def test_blocks_without_content_are_used_before_cached_ones() -> None:
    pool = BlockPool(6)
    cached, plain = pool.get_new_blocks(2), pool.get_new_blocks(2)
    give_names(pool, cached, 0)
    pool.free_blocks(cached)
    pool.free_blocks(plain)
    taken = ids(pool.get_new_blocks(3))
    assert set(ids(plain)) < set(taken)
    assert not set(ids(cached)) & set(taken)


def test_two_blocks_may_have_the_same_content(pool_check: Check) -> None:
    pool = BlockPool(5)
    one, two = pool.get_new_blocks(1), pool.get_new_blocks(1)
    give_names(pool, one, 3)
    give_names(pool, two, 3)
    pool.free_blocks(one)
    pool.free_blocks(two)
    pool.get_new_blocks(2)  # the two that never had content
    pool.get_new_blocks(1)
    assert pool.get_cached_block(name_of(3)) is two[0]
    pool_check(pool)


def test_reset_is_refused_while_a_block_is_referenced(pool_check: Check) -> None:
    pool = BlockPool(5)
    table = pool.get_new_blocks(2)
    give_names(pool, table, 0)
    assert pool.reset_prefix_cache() is False
    assert pool.get_cached_block(name_of(0)) is table[0]
    pool.free_blocks(table)
    assert pool.reset_prefix_cache() is True
    assert len(pool.cached_block_hash_to_block) == 0
    pool_check(pool)


def test_removing_a_block_that_is_not_queued_is_an_error() -> None:
    pool = BlockPool(3)
    block = pool.get_new_blocks(1)[0]
    with pytest.raises(RuntimeError, match="not in the free queue"):
        pool.free_block_queue.remove(block)
