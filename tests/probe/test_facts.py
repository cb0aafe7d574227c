"""Finders: the places of older and newer versions, and what is said when there is none."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace

import pytest
from probe_fakes import BlockPool, Engine

import kvtop
from kvtop.probe import cut, version
from kvtop.probe.engine import EngineRole
from kvtop.probe.facts import EngineFacts


def test_the_probe_calls_itself_what_kvtop_is():
    assert kvtop.__version__ == version.VERSION


class OldBlock:
    """A block of 0.8.5: it does not say whether it is the null block."""

    def __init__(self, block_id):
        self.block_id = block_id
        self.ref_cnt = 0
        self._block_hash = None
        self.prev_free_block = self.next_free_block = None


class OldQueue:
    """The free queue until 0.9: no sentinels, so the last block has no next one."""

    def __init__(self, blocks):
        self.num_free_blocks = len(blocks)
        self.free_list_head = blocks[0]
        self.free_list_tail = blocks[-1]
        for left, right in pairwise(blocks):
            left.next_free_block, right.prev_free_block = right, left

    def popleft(self):
        block = self.free_list_head
        self.free_list_head = block.next_free_block
        self.free_list_head.prev_free_block = None
        block.next_free_block = None
        self.num_free_blocks -= 1
        return block


class OldPool:
    """A pool of 0.8.5."""

    def __init__(self, count):
        self.blocks = [OldBlock(i) for i in range(count)]
        self.free_block_queue = OldQueue(self.blocks)
        self.null_block = self.free_block_queue.popleft()

    def get_new_blocks(self, count):
        blocks = [self.free_block_queue.popleft() for _ in range(count)]
        for block in blocks:
            block.ref_cnt = 1
        return blocks

    def free_blocks(self, blocks):
        raise NotImplementedError

    def touch(self, blocks):
        raise NotImplementedError


def old_engine(place):
    """An engine whose tables are where 0.8.5, 0.9.0 or 0.9.2 have them."""
    pool = OldPool(10)
    tables = defaultdict(list)
    tables["a"] = pool.get_new_blocks(3)
    owner = SimpleNamespace(req_to_blocks=tables, block_size=16)
    manager = SimpleNamespace(block_pool=pool, allocate_slots=print, free=print)
    if place == "manager":
        manager.req_to_blocks = tables
        manager.block_size = 16
    elif place == "single":
        manager.single_type_manager = owner
    else:
        manager.coordinator = SimpleNamespace(single_type_managers=(owner,), block_pool=pool)
    request = SimpleNamespace(request_id="a", status=SimpleNamespace(name="RUNNING"))
    scheduler = SimpleNamespace(
        kv_cache_manager=manager,
        requests={"a": request},
        schedule=lambda: None,
        update_from_output=print,
        add_request=print,
        finish_requests=print,
    )
    return SimpleNamespace(scheduler=scheduler)


@pytest.mark.parametrize("place", ["manager", "single", "coordinator"])
def test_tables_are_found_where_each_version_has_them(place):
    engine = old_engine(place)
    facts = EngineFacts(engine)
    assert "block tables" in facts.found
    assert [g.block_size_tokens for g in facts.groups] == [16]
    assert "deferred frees" in facts.missing
    assert "pause state" in facts.missing
    role = EngineRole(facts, 0, lambda: None)
    role.start()
    raw = None
    while raw is None:
        raw = role.capture.slice(on_engine=True)
    role._take(raw)
    assert role.watch.errors == 0
    # 10 blocks: null, 3 used, 6 free, of which the last has no link at all to a next one.
    assert role.ledger.pools[0].counts == [6, 0, 3, 0, 0, 0, 1]
    assert role.ledger.pools[0].free_queue == 6
    row = role._row_list[0]
    assert row[0:3] == ["a", "RUNNING", "decode"] or row[2] == "prefill"
    assert row[7] is None  # prompt_tokens: this request has none.
    assert row[12] == 3
    counters = role.watch.counters()
    assert counters["evicted"] is None
    assert counters["steps"] == 0
    role.stop()


def test_one_free_block_without_any_link_is_still_in_the_queue():
    engine = old_engine("coordinator")
    pool = engine.scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(5)
    last = pool.free_block_queue.free_list_tail
    last.prev_free_block = last.next_free_block = None
    role = EngineRole(EngineFacts(engine), 0, lambda: None)
    raw = None
    while raw is None:
        raw = role.capture.slice(on_engine=True)
    role._take(raw)
    assert role.ledger.pools[0].states[last.block_id] == 0


def test_an_engine_under_construction_is_not_taken():
    empty = SimpleNamespace(block_pool=None)
    for engine in (
        SimpleNamespace(),
        SimpleNamespace(scheduler=None),
        SimpleNamespace(scheduler=SimpleNamespace(requests={})),
        SimpleNamespace(scheduler=SimpleNamespace(requests={}, kv_cache_manager=empty)),
    ):
        with pytest.raises(LookupError):
            EngineFacts(engine)


def config(**values):
    parallel = SimpleNamespace(
        tensor_parallel_size=values.pop("tp", 1), pipeline_parallel_size=values.pop("pp", 1)
    )
    return SimpleNamespace(parallel_config=parallel, **values)


def block_bytes(kv_cache_config, vllm_config):
    engine = Engine()
    engine.scheduler.kv_cache_config = kv_cache_config
    engine.scheduler.vllm_config = vllm_config
    return EngineFacts(engine).block_bytes


def test_bytes_a_block_from_each_shape_of_the_allocation_plan():
    separate = [SimpleNamespace(size=1000 * 64) for _ in range(4)]
    shared = [SimpleNamespace(size=1000 * 512, layer_stride=1, offset=o) for o in (0, 10)]
    host = SimpleNamespace(size=10**9, layer_stride=1, host_resident=True)
    plan = SimpleNamespace(num_blocks=1000, kv_cache_tensors=separate)
    assert block_bytes(plan, config()) == 256
    assert block_bytes(plan, config(tp=4)) == 1024
    assert block_bytes(plan, config(pp=2)) is None
    plan = SimpleNamespace(num_blocks=1000, kv_cache_tensors=[*shared, host])
    assert block_bytes(plan, config(tp=2)) == 1024
    by_layer = {"l0": separate[0], "l1": separate[1]}
    assert block_bytes(SimpleNamespace(num_blocks=1000, tensors=by_layer), config()) == 128
    assert block_bytes(SimpleNamespace(num_blocks=0, kv_cache_tensors=separate), config()) is None


def test_identity_from_vllms_configuration():
    engine = Engine(window=8)
    engine.engine_index = 3
    engine.scheduler.vllm_config = config(
        model_config=SimpleNamespace(served_model_name=["mine", "other"], model="/path"),
    )
    identity = EngineFacts(engine).identity(None)
    assert identity["index"] == 3
    assert identity["model"] == "mine"
    assert identity["max_model_len"] == 4096
    assert identity["max_num_seqs"] == 16
    assert identity["prefix_caching"] is True
    assert [(g["kind"], g["sliding_window_tokens"]) for g in identity["groups"]] == [
        ("FullAttention", None),
        ("SlidingWindow", 8),
    ]


def test_pools_are_named_by_their_medium():
    facts = EngineFacts(Engine(second_pool=10))
    assert [p.label for p in facts.pools] == ["gpu", "cpu"]
    assert facts.groups[1].pool_index == 1


def test_a_group_of_unknown_kind_is_compared_whole():
    engine = Engine()
    manager = engine.scheduler.kv_cache_manager.managers[0]
    manager.__class__ = type("MambaManager", (type(manager),), {})
    facts = EngineFacts(engine)
    assert facts.groups[0].kind == "Mamba"
    assert not facts.groups[0].grows_only
    role = EngineRole(facts, 0, lambda: None)
    role.start()
    rid = engine.add(9, 5)
    engine.step()
    take(role)
    table = manager.req_to_blocks[rid]
    pool = engine.pools[0]
    old, table[1] = table[1], pool.get_new_blocks(1)[0]
    pool.free_blocks([old])
    take(role)
    assert role.ledger.pools[0].mismatches() == 0
    assert role.ledger.drift == 0
    assert role._row_list[0][14] is None  # Slack of a state block is not known.


def take(role):
    raw = None
    while raw is None:
        raw = role.capture.slice(on_engine=True)
    role._take(raw)


def test_copy_on_write_in_a_growing_table_is_seen_at_once(monkeypatch):
    monkeypatch.setattr(cut, "FULL_AUDIT_BLOCKS", 0)
    monkeypatch.setattr("kvtop.probe.tables.TABLE_WINDOW", 0)
    engine = Engine()
    manager = engine.scheduler.kv_cache_manager.managers[0]

    def apply_cow(request_id, index):
        table = manager.req_to_blocks[request_id]
        old, table[index] = table[index], engine.pools[0].get_new_blocks(1)[0]
        engine.pools[0].free_blocks([old])

    manager._apply_cow = apply_cow
    role = EngineRole(EngineFacts(engine), 0, lambda: None)
    role.start()
    rid = engine.add(9, 5)
    engine.step()
    take(role)
    manager._apply_cow(rid, 0)
    take(role)
    assert role.ledger.drift == 0
    assert role.ledger.pools[0].mismatches() == 0


def test_a_pool_without_links_does_not_pretend_to_know_the_queue():
    class Bare:
        def __init__(self, i):
            self.block_id, self.ref_cnt, self.is_null = i, 0, i == 0

    engine = Engine()
    pool = BlockPool(8)
    pool.blocks = [Bare(i) for i in range(8)]
    engine.scheduler.kv_cache_manager.block_pool = pool
    facts = EngineFacts(engine)
    assert "free queue" in facts.missing
    assert "block hashes" in facts.missing
