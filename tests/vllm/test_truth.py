"""The probe against the engine itself: every count, table and identity, on every snapshot."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvtop.model.blocks import BlockState
from kvtop.model.snapshot import Engine, Phase
from tests.vllm.conftest import BLOCKS, Record

pytestmark = pytest.mark.vllm

PARKED = ("WAITING_FOR_REMOTE_KVS", "WAITING_FOR_STREAMING_REQ")


def states_by_oracle(seen: dict[str, Any]) -> list[BlockState]:
    """The state of each block by the definitions, from the oracle's raw facts."""
    free, hashed = set(seen["free"]), set(seen["hashed"])
    live: Counter[int] = Counter()
    held: Counter[int] = Counter()
    for tables in seen["tables"]:
        for rid, blocks in tables.items():
            status = seen["statuses"].get(rid, "NONE")
            parked = status.startswith("FINISHED") or status in PARKED or status == "NONE"
            (held if parked else live).update(b for b in blocks if b != seen["null"])
    for blocks in seen["deferred"]:
        held.update(blocks)
    states = []
    for block, refs in enumerate(seen["refs"]):
        if block == seen["null"]:
            states.append(BlockState.NULL)
        elif refs == 0 and block in free:
            states.append(BlockState.CACHED if block in hashed else BlockState.FREE)
        elif refs == 0 or (not live[block] and not held[block]):
            states.append(BlockState.GHOST)
        elif not live[block]:
            states.append(BlockState.HELD)
        else:
            several = live[block] + held[block] > 1
            states.append(BlockState.SHARED if several else BlockState.USED)
    return states


def known(record: Record) -> list[tuple[Engine, dict[str, Any]]]:
    """Snapshots taken on entry of a step that the oracle saw too."""
    return [
        (engine, record.oracle[engine.probe.step])
        for engine in record.snapshots
        if engine.probe and engine.probe.point == "boundary" and engine.probe.step in record.oracle
    ]


def test_the_load_was_what_it_should_be(record: Record) -> None:
    assert record.result["failed"] == 0
    assert record.result["left"] > 3
    assert record.result["finished"] > 30
    assert len(record.snapshots) > 100
    assert len(known(record)) > 50


def test_identities_on_every_snapshot(record: Record) -> None:
    assert record.after is not None
    for engine in [record.before, *record.snapshots, record.after]:
        (pool,) = engine.pools
        counts = pool.counts
        assert counts.total == BLOCKS
        parts = (counts.null, counts.free, counts.cached, counts.used, counts.shared)
        assert sum(parts) + counts.held + counts.ghost == counts.total
        assert counts.free + counts.cached == pool.free_queue
        assert counts.ghost == 0
        assert pool.states is not None
        assert pool.refs is not None
        assert pool.tables is not None
        null = pool.states.index(BlockState.NULL)
        without = slice(null + 1, None)
        assert pool.refs[without] == pool.tables[without]


def test_every_block_is_where_the_engine_has_it(record: Record) -> None:
    for engine, seen in known(record):
        (pool,) = engine.pools
        assert pool.states is not None
        assert list(pool.states) == states_by_oracle(seen)
        assert pool.refs is not None
        assert list(pool.refs) == [min(refs, 255) for refs in seen["refs"]]
        assert pool.free_queue == seen["num_free"] == len(seen["free"])


def test_use_is_what_vllm_reports(record: Record) -> None:
    for engine, seen in known(record):
        assert engine.blocks is not None
        busy = engine.blocks.used + engine.blocks.shared + engine.blocks.held
        assert busy / engine.blocks.usable == pytest.approx(seen["usage"])


def test_requests_are_the_schedulers(record: Record) -> None:
    for engine, seen in known(record):
        assert engine.requests is not None
        assert {r.id: r.status for r in engine.requests} == seen["statuses"]
        (tables,) = seen["tables"]
        for request in engine.requests:
            blocks = [b for b in tables.get(request.id, ()) if b != seen["null"]]
            assert request.blocks == len(blocks)
        running = [r for r in engine.requests if r.phase in (Phase.PREFILL, Phase.DECODE)]
        assert len(running) == seen["running"]


def test_blocks_of_requests_add_up_to_the_pool(record: Record) -> None:
    for engine in record.snapshots:
        (pool,) = engine.pools
        assert pool.tables is not None
        assert pool.states is not None
        assert engine.requests is not None
        held = sum(
            n
            for n, state in zip(pool.tables, pool.states, strict=True)
            if state in (BlockState.USED, BlockState.SHARED, BlockState.HELD)
        )
        fences = 0
        if engine.blocks is not None and engine.blocks.held:
            fences = engine.blocks.held
        total = sum(r.blocks or 0 for r in engine.requests)
        assert held - fences <= total <= held


def test_shared_blocks_and_prefix_hits_were_seen(record: Record) -> None:
    assert max(e.blocks.shared for e in record.snapshots if e.blocks) >= 4
    for engine in record.snapshots:
        (pool,) = engine.pools
        shared_by_requests = any(r.shared_blocks for r in engine.requests or ())
        assert shared_by_requests == (pool.counts.shared > 0)


def test_preemptions_were_seen_and_counted(record: Record) -> None:
    assert record.after is not None
    assert record.after.counters is not None
    assert record.after.counters.preemptions
    assert record.after.counters.alloc_failures
    assert record.after.counters.preempted_blocks
    owing = [r for e in record.snapshots for r in e.requests or () if r.phase is Phase.PREEMPTED]
    assert owing
    assert all(r.owed_blocks for r in owing if r.blocks == 0)
    assert all(r.preemptions for r in owing)


def test_counters_only_grow_and_balance(record: Record) -> None:
    before = None
    for engine in [record.before, *record.snapshots]:
        counters, (pool,) = engine.counters, engine.pools
        assert counters is not None
        if before is not None:
            for name in ("allocated", "freed", "touched", "evicted", "steps", "preemptions"):
                assert getattr(counters, name) >= getattr(before, name)
        before = counters
        assert None not in (counters.allocated, counters.touched, counters.freed)
        assert pool.refs is not None
        assert pool.states is not None
        null = pool.states.index(BlockState.NULL)
        refs = sum(pool.refs) - pool.refs[null]
        balance = (counters.allocated or 0) + (counters.touched or 0) - (counters.freed or 0)
        assert balance == refs


def test_everything_comes_back_after_the_load(record: Record) -> None:
    assert record.after is not None
    counts = record.after.blocks
    assert counts is not None
    assert record.after.requests == ()
    assert (counts.used, counts.shared, counts.held, counts.ghost) == (0, 0, 0, 0)
    assert counts.free + counts.cached == BLOCKS - 1
    assert counts.cached > 0


def test_a_requests_table_is_the_engines(record: Record) -> None:
    compared = changed = 0
    for detail in record.details:
        seen = record.oracle.get(detail.step or -1)
        if seen is None:
            continue
        table = seen["tables"][0].get(detail.request_id, [])
        if not detail.tables:
            assert not table
            continue
        ((group, size, blocks),) = detail.tables
        assert (group, size) == (0, 128)
        # A table is read when it is asked for, up to one step after the oracle looked.
        if list(blocks) != table:
            changed += 1
            continue
        compared += 1
        assert len(detail.refs[0]) == len(blocks)
    assert compared > 5
    assert changed < compared


def test_token_arithmetic_of_each_request(record: Record) -> None:
    for engine in record.snapshots:
        for r in engine.requests or ():
            assert r.blocks is not None
            assert r.prompt_tokens is not None
            assert r.prompt_tokens > 0
            assert r.max_tokens is not None
            assert (r.output_tokens or 0) <= r.max_tokens
            if r.slack_tokens is not None:
                assert 0 <= r.slack_tokens <= max(r.blocks, 1) * 128
            if r.cached_tokens:
                assert r.cached_tokens % 128 == 0
            if engine.block_bytes is not None:
                assert r.kv_bytes == r.blocks * engine.block_bytes


def test_a_block_has_the_bytes_of_the_model(record: Record) -> None:
    # 2 layers x K and V x 2 heads x 32 x 2 bytes (bfloat16) x 128 tokens
    assert record.before.block_bytes == 2 * 2 * 2 * 32 * 2 * 128


def test_the_probe_says_what_it_costs(record: Record) -> None:
    for engine in record.snapshots:
        assert engine.probe is not None
        assert engine.probe.errors == 0
        assert engine.probe.drift == 0
        assert engine.probe.cost_percent is not None
        assert engine.probe.scan_us is not None
        assert engine.probe.cost_percent <= 0.5
    assert any((e.probe.scan_us or 0) > 0 for e in record.snapshots if e.probe)
