"""Incremental cuts against a count from nothing, over random histories of the engine."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from probe_fakes import GHOST, HELD, Engine, Pause, Status, recount

from kvtop.probe import cut, tables
from kvtop.probe.answer import COLUMNS
from kvtop.probe.engine import EngineRole
from kvtop.probe.facts import EngineFacts


class Bench:
    """An engine with the probe's parts around it, driven without threads."""

    def __init__(self, **options):
        self.engine = Engine(**options)
        self.role = EngineRole(EngineFacts(self.engine), 0, lambda: None)
        self.role.start()
        self.role.capture.reset()

    def cut(self, on_engine=True):
        """Takes a cut, over as many slices as it needs."""
        for _ in range(200):
            raw = self.role.capture.slice(on_engine=on_engine)
            if raw is not None:
                self.role._take(raw)
                assert self.role.watch.errors == 0, self.role.watch.last_error
                return self.role.ledger
        raise AssertionError("the cut does not end")

    def rows(self):
        return {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in self.role._row_list}

    def check(self, identities=True):
        """Everything that a cut says equals a count from nothing."""
        ledger = self.cut()
        for pool, ledger_pool, (states, refs, holders) in zip(
            self.engine.pools, ledger.pools, recount(self.engine), strict=True
        ):
            assert list(ledger_pool.states) == states
            null = pool.null_block.block_id
            got = [0 if i == null else r for i, r in enumerate(ledger_pool.refs)]
            assert got == refs
            assert list(ledger_pool.holders) == holders
            assert ledger_pool.counts == [states.count(s) for s in range(7)]
            assert sum(ledger_pool.counts) == len(pool.blocks)
            assert ledger_pool.free_queue == pool.get_num_free_blocks()
            if identities:
                assert refs == holders
                assert ledger_pool.counts[0] + ledger_pool.counts[1] == ledger_pool.free_queue
        self.check_rows()
        if identities:
            self.check_counters()

    def check_rows(self):
        rows = self.rows()
        scheduler = self.engine.scheduler
        tables = {}
        for m in scheduler.kv_cache_manager.managers:
            for rid, table in m.req_to_blocks.items():
                for block in table:
                    if not block.is_null:
                        tables.setdefault(rid, []).append((id(block.pool), block.block_id))
        holders = {}
        for ids in tables.values():
            for key in ids:
                holders[key] = holders.get(key, 0) + 1
        assert set(rows) == set(scheduler.requests) | set(tables)
        for rid, row in rows.items():
            mine = tables.get(rid, [])
            assert row["blocks"] == len(mine)
            assert row["shared_blocks"] == sum(holders[key] > 1 for key in mine)

    def check_counters(self):
        counters = self.role.watch.counters()
        total = sum(b.ref_cnt for p in self.engine.pools for b in p.blocks if not b.is_null)
        assert counters["allocated"] + counters["touched"] - counters["freed"] == total


OPERATIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, 12)),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("cut")),
    st.tuples(st.just("park"), st.integers(0, 30)),
    st.tuples(st.just("release")),
    st.tuples(st.just("evict"), st.integers(1, 20)),
    st.tuples(st.just("pin"), st.integers(0, 30)),
    st.tuples(st.just("unpin")),
)


def run(bench, operations):
    engine = bench.engine
    scheduler = engine.scheduler
    for name, *values in operations:
        ids = list(scheduler.requests)
        if name == "add":
            engine.add(*values)
        elif name == "step":
            for _ in range(values[0]):
                engine.step()
        elif name == "abort" and ids:
            engine.abort(ids[values[0] % len(ids)])
        elif name == "park" and scheduler.running:
            # A session that waits for its next input keeps its blocks.
            request = scheduler.running.pop(values[0] % len(scheduler.running))
            request.status = Status.WAITING_FOR_STREAMING_REQ
            scheduler.kv_holding_waiting.append(request)
            scheduler.deferred_waiting.add(request)
        elif name == "release" and engine.connector and engine.connector.kept:
            scheduler.release(engine.connector.kept.pop(0))
        elif name == "evict":
            engine.pools[0].evict_blocks({values[0] % len(engine.pools[0].blocks)})
        elif name == "pin" and engine.connector and ids:
            table = scheduler.kv_cache_manager.managers[0].req_to_blocks.get(
                ids[values[0] % len(ids)]
            )
            if table:
                engine.connector.build_connector_meta([b for b in table if not b.is_null])
        elif name == "unpin" and engine.connector:
            engine.connector.update_connector_output()
        elif name == "cut":
            bench.check()


SHAPES = [
    {},
    {"caching": False},
    {"window": 8},
    {"fences": True},
    {"connector": True},
    {"second_pool": 40, "fences": True, "connector": True},
    {"window": 6, "fences": True, "connector": True, "blocks": 20},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "+".join(s) or "plain")
@given(operations=st.lists(OPERATIONS, min_size=5, max_size=60))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_history_equals_a_count_from_nothing(shape, operations):
    bench = Bench(**shape)
    run(bench, operations)
    bench.check()
    assert bench.role.ledger.drift == 0
    bench.role.stop()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "+".join(s) or "plain")
@given(operations=st.lists(OPERATIONS, min_size=5, max_size=60))
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_large_pool_in_small_slices_equals_a_count_from_nothing(shape, operations):
    """All limits tiny: the scan, bursts and the audit take many slices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut, "SCAN_BLOCKS", 7)
        patch.setattr(cut, "FULL_AUDIT_BLOCKS", 0)
        patch.setattr(cut, "WINDOW_BLOCKS", 5)
        patch.setattr(cut, "DIRTY_BLOCKS", 6)
        patch.setattr(tables, "TABLE_ENTRIES", 3)
        patch.setattr(tables, "TABLE_WINDOW", 2)
        bench = Bench(**shape)
        run(bench, operations)
        bench.check()
        assert bench.role.ledger.drift == 0
        bench.role.stop()


def busy_bench(**options):
    bench = Bench(**options)
    for _ in range(4):
        bench.engine.add(9, 6)
    for _ in range(3):
        bench.engine.step()
    bench.check()
    return bench


def test_a_ref_count_raised_behind_the_probes_back_is_found_by_the_audit():
    bench = busy_bench()
    block = next(b for b in bench.engine.pools[0].blocks if b.ref_cnt == 1)
    block.ref_cnt += 1
    bench.check(identities=False)
    pool = bench.role.ledger.pools[0]
    assert bench.role.ledger.drift == 1
    assert pool.refs[block.block_id] == pool.holders[block.block_id] + 1
    assert pool.mismatches() == 1


def test_the_audit_of_a_large_pool_finds_it_within_one_rotation(monkeypatch):
    monkeypatch.setattr(cut, "FULL_AUDIT_BLOCKS", 0)
    monkeypatch.setattr(cut, "WINDOW_BLOCKS", 4)
    bench = busy_bench(blocks=64)
    block = next(b for b in bench.engine.pools[0].blocks if b.ref_cnt == 1)
    block.ref_cnt += 1
    for _ in range(64 // 4 + 1):
        ledger = bench.cut()
    assert ledger.drift == 1
    assert ledger.pools[0].refs[block.block_id] == 2
    bench.check(identities=False)


def test_a_lost_free_becomes_a_ghost_and_stays_one():
    bench = busy_bench()
    scheduler = bench.engine.scheduler
    rid = scheduler.running[0].request_id
    manager = scheduler.kv_cache_manager.managers[0]
    lost = manager.req_to_blocks[rid].pop()
    bench.engine.abort(rid)
    bench.check(identities=False)
    assert bench.role.ledger.pools[0].states[lost.block_id] == GHOST
    for _ in range(40):
        bench.engine.step()
    bench.check(identities=False)
    assert bench.role.ledger.pools[0].counts[GHOST] == 1


def test_a_block_out_of_the_free_queue_without_a_reference_is_a_ghost():
    bench = busy_bench()
    block = bench.engine.pools[0].free_block_queue.popleft()
    bench.check(identities=False)
    assert bench.role.ledger.pools[0].states[block.block_id] == GHOST


def test_a_referenced_block_in_the_free_queue_is_a_ghost_and_breaks_the_identity():
    bench = busy_bench()
    queue = bench.engine.pools[0].free_block_queue
    block = next(b for b in bench.engine.pools[0].blocks if b.ref_cnt == 1)
    queue.append_n([block])
    bench.check(identities=False)
    pool = bench.role.ledger.pools[0]
    assert pool.states[block.block_id] == GHOST
    assert pool.counts[0] + pool.counts[1] == pool.free_queue - 1


def test_an_orphan_table_is_listed_and_held():
    bench = busy_bench()
    scheduler = bench.engine.scheduler
    request = scheduler.running.pop()
    del scheduler.requests[request.request_id]
    bench.check()
    row = bench.rows()[request.request_id]
    assert (row["status"], row["phase"], row["reason"]) == ("NO REQUEST", "held", "orphan table")
    assert row["held_s"] == 0
    assert row["prompt_tokens"] is None
    assert bench.role.ledger.pools[0].counts[HELD] >= 1


def test_a_request_kept_by_a_connector_is_held_until_released():
    bench = Bench(connector=True)
    rid = bench.engine.add(9, 4)
    bench.engine.step()
    bench.engine.abort(rid)
    bench.check()
    row = bench.rows()[rid]
    assert (row["phase"], row["reason"]) == ("held", "connector")
    assert bench.role.ledger.pools[0].counts[HELD] == row["blocks"] == 3
    bench.engine.scheduler.release(bench.engine.connector.kept.pop())
    bench.check()
    assert bench.rows() == {}


def test_blocks_behind_a_step_fence_are_held_without_a_row():
    bench = Bench(fences=True)
    rid = bench.engine.add(9, 20)
    bench.engine.step()
    bench.engine.abort(rid)
    bench.check()
    assert bench.rows() == {}
    assert bench.role.ledger.pools[0].counts[HELD] == 3
    bench.engine.step()
    bench.check()
    assert bench.role.ledger.pools[0].counts[HELD] == 0


def test_reasons_of_waiting_requests():
    bench = Bench(max_running=1)
    scheduler = bench.engine.scheduler
    running, capacity, deferred, grammar, remote = (bench.engine.add(9, 9) for _ in range(5))
    bench.engine.step()
    scheduler.deferred_waiting.add(scheduler.requests[deferred])
    scheduler.requests[grammar].status = Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    scheduler.requests[remote].status = Status.WAITING_FOR_REMOTE_KVS
    bench.check()
    reasons = {rid: (row["phase"], row["reason"]) for rid, row in bench.rows().items()}
    assert reasons == {
        running: ("decode", None),
        capacity: ("waiting", "capacity"),
        deferred: ("waiting", "deferred"),
        grammar: ("waiting", "grammar"),
        remote: ("waiting", "remote KV"),
    }
    scheduler.set_pause_state(Pause.PAUSED_NEW)
    bench.check()
    assert bench.rows()[capacity]["reason"] == "paused"
    assert bench.rows()[remote]["reason"] == "remote KV"


def test_prefill_decode_and_slack():
    bench = Bench(budget=8, blocks=64)
    rid = bench.engine.add(18, 5)
    bench.engine.step()
    bench.check()
    row = bench.rows()[rid]
    assert (row["phase"], row["computed_tokens"], row["blocks"], row["slack_tokens"]) == (
        "prefill",
        8,
        2,
        0,
    )
    bench.engine.step()
    bench.engine.step()
    bench.check()
    row = bench.rows()[rid]
    assert (row["phase"], row["computed_tokens"], row["blocks"], row["slack_tokens"]) == (
        "decode",
        18,
        5,
        2,
    )
    assert row["output_tokens"] == 1


def test_slack_of_a_sliding_window_counts_positions_not_blocks():
    bench = Bench(window=8, blocks=64)
    rid = bench.engine.add(21, 30)
    for _ in range(4):
        bench.engine.step()
    bench.check()
    row = bench.rows()[rid]
    assert row["computed_tokens"] == 24
    assert row["slack_tokens"] == 0
    assert row["blocks"] < 12  # The window has given blocks back.


def test_preemption_counts_and_debt():
    bench = Bench(blocks=12, block_size=4)
    first, second = bench.engine.add(12, 30), bench.engine.add(13, 30, vocabulary=50)
    for _ in range(30):
        bench.engine.step()
        bench.check()
        if bench.rows().get(second, {}).get("phase") == "preempted":
            break
    row = bench.rows()[second]
    counters = bench.role.watch.counters()
    assert counters["preemptions"] == 1
    assert counters["preempted_blocks"] == row["owed_blocks"] > 0
    assert row["preemptions"] == 1
    assert counters["alloc_failures"] >= 1
    assert counters["preempted_tokens"] >= 13
    assert row["computed_tokens"] == 0
    assert bench.rows()[first]["owed_blocks"] == 0
    for _ in range(60):
        bench.engine.step()
        bench.check()
    assert second not in bench.role.watch.lost or second not in bench.rows()


def test_prefix_hits_are_noted_at_admission():
    bench = Bench(blocks=64)
    first = bench.engine.add(17, 3, vocabulary=1)
    bench.engine.step()
    second = bench.engine.add(17, 3, vocabulary=1)
    bench.engine.step()
    bench.check()
    assert bench.rows()[first]["cached_tokens"] == 0
    assert bench.rows()[second]["cached_tokens"] == 16
    assert bench.rows()[second]["shared_blocks"] == 4
    assert bench.role.watch.touched == 4


def test_notes_of_requests_that_left_are_forgotten():
    bench = Bench(blocks=64)
    for _ in range(300):
        bench.engine.add(3, 1)
        bench.engine.step()
    assert len(bench.role.watch.cached) < 100


def test_a_long_queue_is_read_in_parts_and_nothing_is_invented(monkeypatch):
    monkeypatch.setattr(cut, "ALL_ROWS", 4)
    bench = Bench(max_running=1)
    ids = [bench.engine.add(9, 9) for _ in range(11)]
    bench.engine.step()
    bench.check()
    rows = bench.rows()
    assert [rows[i]["prompt_tokens"] for i in ids] == [9] * 5 + [None] * 6
    assert all(rows[i]["status"] == "WAITING" for i in ids[1:])
    bench.check()
    bench.check()
    assert [bench.rows()[i]["prompt_tokens"] for i in ids] == [9] * 11


def test_a_cut_overtaken_by_the_engine_is_not_given_out():
    bench = busy_bench()
    watch = bench.role.watch
    original = bench.role.capture._requests

    def overtaken(raw):
        original(raw)
        bench.engine.step()

    bench.role.capture._requests = overtaken
    assert bench.role.capture.slice(on_engine=False) is None
    bench.role.capture._requests = original
    bench.check()
    assert bench.role.ledger.drift == 0
    watch.depth += 1
    assert bench.role.capture.slice(on_engine=False) is None
    watch.depth -= 1


def test_a_reset_of_the_prefix_cache_leads_to_a_full_scan():
    bench = Bench()
    bench.engine.add(17, 2)
    for _ in range(6):
        bench.engine.step()
    bench.check()
    assert bench.role.ledger.pools[0].counts[1] > 0
    assert bench.engine.scheduler.reset_prefix_cache()
    assert bench.role.watch.stale
    bench.check()
    assert bench.role.ledger.pools[0].counts[1] == 0
    assert bench.role.ledger.drift == 0
