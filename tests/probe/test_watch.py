"""The wrappers: invisible to the engine, exact in counting, gone without a trace."""

from __future__ import annotations

import random
import threading

import pytest
from probe_fakes import BlockPool, Engine, FullAttentionManager, Status, recount

from kvtop.probe.engine import EngineRole
from kvtop.probe.facts import EngineFacts
from kvtop.probe.watch import MAX_ERRORS, Watch


def watched(**options):
    engine = Engine(**options)
    watch = Watch(EngineFacts(engine))
    watch.watch()
    return engine, watch


def instances(engine):
    scheduler = engine.scheduler
    found = [scheduler, scheduler.kv_cache_manager, *engine.pools]
    found += scheduler.kv_cache_manager.managers
    return found + ([engine.connector] if engine.connector else [])


def test_unwatch_leaves_every_instance_as_it_was():
    engine = Engine(connector=True, second_pool=30, fences=True)
    before = [dict(vars(i)) for i in instances(engine)]
    watch = Watch(EngineFacts(engine))
    watch.watch()
    assert any(dict(vars(i)) != b for i, b in zip(instances(engine), before, strict=True))
    watch.unwatch()
    assert [dict(vars(i)) for i in instances(engine)] == before


def test_an_instance_attribute_that_was_there_before_comes_back():
    engine = Engine()
    pool = engine.pools[0]
    calls = []
    bound = pool.touch

    def own(blocks):
        calls.append(len(blocks))
        return bound(blocks)

    pool.touch = own
    watch = Watch(EngineFacts(engine))
    watch.watch()
    pool.touch([])
    watch.unwatch()
    assert pool.touch is own
    assert calls == [0]


def test_a_wrapper_of_somebody_else_on_top_stays_and_works_after_unwatch():
    engine, watch = watched()
    pool = engine.pools[0]
    inner = pool.get_new_blocks

    def theirs(n):
        return inner(n)

    pool.get_new_blocks = theirs
    watch.unwatch()
    assert pool.get_new_blocks is theirs
    assert len(pool.get_new_blocks(2)) == 2
    assert watch.dirty == [[]]


def test_results_and_exceptions_are_the_engines_own():
    engine = Engine()
    pool = engine.pools[0]
    marker = object()
    pool.reset_prefix_cache = lambda: marker
    error = RuntimeError("theirs")

    def fails(*args, **kwargs):
        raise error

    engine.scheduler.update_from_output = fails
    watch = Watch(EngineFacts(engine))
    watch.watch()
    assert pool.reset_prefix_cache() is marker
    with pytest.raises(RuntimeError) as caught:
        engine.scheduler.update_from_output(None, None)
    assert caught.value is error
    with pytest.raises(ValueError, match="no free blocks"):
        pool.get_new_blocks(10_000)
    assert watch.depth == 0
    assert watch.errors == 0


def test_a_one_shot_iterator_of_freed_blocks_reaches_the_pool_whole():
    engine, watch = watched()
    pool = engine.pools[0]
    blocks = pool.get_new_blocks(3)
    pool.free_blocks(reversed(blocks))
    assert [b.ref_cnt for b in blocks] == [0, 0, 0]
    blocks = pool.get_new_blocks(3)
    pool.free_blocks(ordered_blocks=(b for b in blocks))
    assert [b.ref_cnt for b in blocks] == [0, 0, 0]
    assert (watch.allocated, watch.freed) == (6, 6)


def test_null_blocks_are_not_counted():
    engine, watch = watched()
    pool = engine.pools[0]
    blocks = pool.get_new_blocks(1)
    pool.touch([pool.null_block, *blocks, pool.null_block])
    pool.free_blocks([pool.null_block, blocks[0]])
    assert (watch.touched, watch.freed) == (1, 1)


def test_touch_takes_one_sequence_a_group_as_older_versions_give_it():
    engine = Engine()
    pool = engine.pools[0]
    flat = pool.touch
    pool.touch = lambda blocks: [flat(group) for group in blocks]
    watch = Watch(EngineFacts(engine))
    watch.watch()
    blocks = pool.get_new_blocks(3)
    pool.touch((blocks[:2], [], blocks[2:]))
    assert [b.ref_cnt for b in blocks] == [2, 2, 2]
    assert watch.touched == 3


def test_blocks_of_two_pools_freed_together_are_counted_once():
    engine, watch = watched(second_pool=20)
    first, second = engine.pools
    mixed = first.get_new_blocks(2) + second.get_new_blocks(3)
    watch.tracking = True
    first.free_blocks(mixed)
    assert watch.freed == 5
    assert [len(d) for d in watch.dirty] == [2, 3]


def test_evictions_on_demand_are_not_counted_as_lost_to_an_allocation():
    engine, watch = watched(blocks=8)
    pool = engine.pools[0]
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(["a", "b", "c"], blocks)
    pool.free_blocks(blocks)
    pool.evict_blocks({blocks[0].block_id})
    assert watch.evicted == 0
    pool.get_new_blocks(7)
    assert watch.evicted == 2


def test_preemption_written_out_in_schedule_is_counted_too(monkeypatch):
    """As until 0.10: `schedule` frees the victim itself, and there is no `_preempt_request`."""
    engine = Engine(blocks=12)
    scheduler = engine.scheduler

    def inline(self, request, timestamp):
        self.kv_cache_manager.free(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    with monkeypatch.context() as patch:
        patch.delattr(type(scheduler), "_preempt_request")
        watch = Watch(EngineFacts(engine))
        watch.watch()
    monkeypatch.setattr(type(scheduler), "_preempt_request", inline)
    engine.add(12, 30)
    engine.add(13, 30, vocabulary=50)
    for _ in range(30):
        engine.step()
    assert watch.preemptions == sum(r.num_preemptions for r in scheduler.requests.values()) > 0
    assert watch.counters()["preempted_blocks"] > 0


def test_without_a_client_nothing_is_listed():
    engine, watch = watched()
    engine.add(9, 5)
    for _ in range(8):
        engine.step()
    assert watch.dirty == [[]]
    assert watch.allocated > 0


def test_the_list_of_changed_blocks_is_bounded(monkeypatch):
    monkeypatch.setattr("kvtop.probe.watch.MAX_DIRTY", 10)
    engine, watch = watched()
    watch.tracking, watch.stale = True, False
    pool = engine.pools[0]
    for _ in range(6):
        pool.free_blocks(pool.get_new_blocks(2))
    assert watch.stale
    assert len(watch.dirty[0]) <= 10


@pytest.mark.parametrize("seed", range(60))
def test_with_any_attribute_gone_the_engine_runs_the_same(seed):
    """An unknown future version: what is there works, the rest is named, nothing raises."""
    rng = random.Random(seed)

    def run(with_probe):
        engine = Engine(blocks=14, fences=True, connector=True)
        scheduler = engine.scheduler
        role = None
        if with_probe:
            targets = [
                (scheduler, ["deferred_frees", "waiting", "_pause_state", "deferred_waiting"]),
                (scheduler, ["connector", "block_size", "max_model_len", "max_num_running_reqs"]),
                (engine.pools[0], ["medium", "enable_caching", "num_gpu_blocks"]),
                (scheduler.kv_cache_manager.managers[0], ["kv_cache_group_id", "block_size"]),
            ]
            hidden = []
            for obj, names in targets:
                for name in rng.sample(names, rng.randrange(len(names))):
                    hidden += [(obj, name, vars(obj).pop(name))]
            methods = [
                (type(scheduler), "finish_requests"),
                (type(scheduler), "update_from_output"),
                (BlockPool, "touch"),
                (BlockPool, "_maybe_evict_cached_block"),
                (BlockPool, "evict_blocks"),
                (FullAttentionManager, "pop"),
            ]
            gone = [(cls, n, vars(cls)[n]) for cls, n in rng.sample(methods, rng.randrange(4))]
            for cls, name, _ in gone:
                delattr(cls, name)
            try:
                role = EngineRole(EngineFacts(engine), 0, lambda: None)
                role.start()
            finally:
                for cls, name, value in gone:
                    setattr(cls, name, value)
                for obj, name, value in hidden:
                    setattr(obj, name, value)
        for n in range(80):
            if n % 7 == 0:
                engine.add(11, 7)
            if n % 13 == 0 and scheduler.requests:
                engine.abort(next(iter(scheduler.requests)))
            if role is not None:
                role.watch.want = True
            engine.step()
            if role is not None and role._ready is not None:
                role._take(role._ready)
        if role is not None:
            assert role.watch.depth == 0
            role.stop()
        return recount(engine), sorted(scheduler.requests)

    assert run(True) == run(False)


def test_after_ten_errors_of_its_own_the_probe_takes_itself_out():
    engine = Engine()
    before = [dict(vars(i)) for i in instances(engine)]
    role = EngineRole(EngineFacts(engine), 0, lambda: None)
    role.start()
    role.capture._meta = lambda raw: 1 / 0
    engine.add(9, 30)
    role._client_last = 1e12
    for _ in range(MAX_ERRORS + 5):
        role.watch.want = not role.error
        role._credit._left = 1.0
        engine.step()
    assert role.watch.errors == MAX_ERRORS
    role.work()
    assert [set(vars(i)) for i in instances(engine)] == [set(b) for b in before]
    about = role.about()
    assert about["state"] == "stopped"
    assert "ZeroDivisionError" in about["reason"]
    assert engine.scheduler.running[0].status is Status.RUNNING


def test_cuts_stop_when_their_share_of_the_engines_time_is_spent():
    engine = Engine(blocks=64)
    role = EngineRole(EngineFacts(engine), 0, lambda: None)
    role.start()
    engine.add(9, 500)
    taken = 0
    role._credit._left = 0.0
    role._credit._at = 1e15  # Time earns nothing here.
    for _ in range(20):
        role.watch.want = True
        engine.step()
        taken += role._ready is not None
        role._ready = None
    assert taken == 0
    role._credit._left = 10.0
    role.watch.want = True
    engine.step()
    assert role._ready is not None
    assert role._credit._left < 10.0
    role.stop()


def test_no_cut_is_taken_inside_a_call_that_began_before_the_probe_came():
    engine = Engine()
    engine.add(9, 9)
    role = EngineRole(EngineFacts(engine), 0, lambda: None)
    manager = engine.scheduler.kv_cache_manager
    allocate = type(manager).allocate_slots
    taken = []

    def arrives(*args, **kwargs):
        # As `attach` does it: from another thread, in the middle of a step.
        thread = threading.Thread(target=role.start)
        thread.start()
        thread.join()
        cut = threading.Thread(target=lambda: taken.append(role.capture.slice(on_engine=False)))
        cut.start()
        cut.join()
        return allocate(manager, *args, **kwargs)

    manager.allocate_slots = arrives
    engine.step()
    assert taken == [None]
    assert role.watch.depth == 0
    assert role.capture.slice(on_engine=False) is not None
    role.stop()
