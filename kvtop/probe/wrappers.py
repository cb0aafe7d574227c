"""The wrappers that `watch` puts around methods of the engine.

Each passes all arguments and the very same result or exception through. Its own bookkeeping
cannot raise into the engine: errors are counted in `Watch.failed`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvtop.probe.facts import PoolFacts, path

if TYPE_CHECKING:
    from kvtop.probe.watch import Watch

Wrapper = Callable[..., Any]


def mutator(w: Watch, original: Wrapper) -> Wrapper:
    """A call that may change tables, requests or blocks: moves the sequence lock."""

    def call(*args: Any, **kwargs: Any) -> Any:
        w.depth += 1
        try:
            return original(*args, **kwargs)
        finally:
            w.seq += 1
            w.depth -= 1

    return call


def connector(w: Watch, original: Wrapper) -> Wrapper:
    """A call of a KV connector: references it takes and gives meanwhile are pins."""

    def call(*args: Any, **kwargs: Any) -> Any:
        w.in_connector += 1
        try:
            return original(*args, **kwargs)
        finally:
            w.in_connector -= 1

    return call


def schedule(w: Watch, original: Wrapper) -> Wrapper:
    """`Scheduler.schedule`: the safe point is its entry."""
    now = time.monotonic

    def schedule(*args: Any, **kwargs: Any) -> Any:
        w.last_begin = now()
        if w.want and w.active:
            try:
                w.on_boundary()
            except Exception as error:
                w.failed(error)
        w.steps += 1
        w.depth += 1
        w.in_schedule = True
        try:
            output = original(*args, **kwargs)
            w.open_steps += 1
            if w.active:
                try:
                    w.note_admitted(output)
                except Exception as error:
                    w.failed(error)
            return output
        finally:
            w.in_schedule = False
            w.seq += 1
            w.depth -= 1

    return schedule


def dying(w: Watch, original: Wrapper) -> Wrapper:
    """A call that the engine core makes as it ends, whether in order or not."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if w.active:
            try:
                w.on_death()
            except Exception as error:
                w.failed(error)
        return original(*args, **kwargs)

    return call


def update_from_output(w: Watch, original: Wrapper) -> Wrapper:
    """`Scheduler.update_from_output`: ends a step in flight."""
    inner = mutator(w, original)

    def update_from_output(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        finally:
            w.open_steps = max(0, w.open_steps - 1)

    return update_from_output


def preempt(w: Watch, original: Wrapper) -> Wrapper:
    """`Scheduler._preempt_request` (0.11+)."""
    inner = mutator(w, original)

    def _preempt_request(*args: Any, **kwargs: Any) -> Any:
        blocks, tokens, rid = 0, 0, None
        if w.active:
            try:
                request = args[0] if args else kwargs.get("request")
                rid, blocks, tokens = w.holding(request)
            except Exception as error:
                w.failed(error)
        result = inner(*args, **kwargs)
        if rid is not None:
            w.note_preempted(rid, blocks, tokens)
        return result

    return _preempt_request


def free_in_schedule(w: Watch, original: Wrapper) -> Wrapper:
    """`KVCacheManager.free` where preemption is written out inside `schedule` (before 0.11)."""
    inner = mutator(w, original)

    def free(*args: Any, **kwargs: Any) -> Any:
        if w.in_schedule and w.active:
            try:
                request = args[0] if args else kwargs.get("request")
                if path(request, "status", "name") == "RUNNING":
                    w.note_preempted(*w.holding(request))
            except Exception as error:
                w.failed(error)
        return inner(*args, **kwargs)

    return free


def allocate_slots(w: Watch, original: Wrapper) -> Wrapper:
    """`KVCacheManager.allocate_slots`: None is a failure."""

    def allocate_slots(*args: Any, **kwargs: Any) -> Any:
        w.depth += 1
        try:
            result = original(*args, **kwargs)
            if result is None:
                w.alloc_failures += 1
            return result
        finally:
            w.seq += 1
            w.depth -= 1

    return allocate_slots


def copy_on_write(w: Watch, original: Wrapper) -> Wrapper:
    """`_apply_cow(request_id, ...)` of a manager (0.31+): replaces an entry of a table."""
    inner = mutator(w, original)

    def _apply_cow(*args: Any, **kwargs: Any) -> Any:
        if w.tracking:
            w.remade.add(args[0] if args else kwargs.get("request_id", ""))
        return inner(*args, **kwargs)

    return _apply_cow


def get_new_blocks(w: Watch, original: Wrapper, dirty: list[Any]) -> Wrapper:
    """`BlockPool.get_new_blocks`."""

    def get_new_blocks(*args: Any, **kwargs: Any) -> Any:
        w.depth += 1
        try:
            blocks = original(*args, **kwargs)
            try:
                w.allocated += len(blocks)
                if w.tracking:
                    w.changed(dirty, blocks)
            except Exception as error:
                w.failed(error)
            return blocks
        except BaseException:
            w.stale = True  # It may have changed some of them before it gave up.
            raise
        finally:
            w.seq += 1
            w.depth -= 1

    return get_new_blocks


def give_back(w: Watch, original: Wrapper, facts: PoolFacts, dirty: list[Any]) -> Wrapper:
    """`BlockPool.free_blocks(blocks)` and `unpin_blocks(blocks, on_reuse)` (0.31+)."""
    several = len(w.facts.pools) > 1 and facts.has_pool_name
    this = facts.pool

    def free_blocks(*args: Any, **kwargs: Any) -> Any:
        w.depth += 1
        try:
            mine: Any = ()
            given = 0
            try:
                # It is often `reversed(list)`, which can be read only once.
                if args:
                    blocks = args[0]
                    if not isinstance(blocks, (list, tuple)):
                        blocks = list(blocks)
                        args = (blocks, *args[1:])
                else:
                    name = "ordered_blocks" if "ordered_blocks" in kwargs else "blocks"
                    blocks = kwargs[name] = list(kwargs[name])
                mine = blocks
                if several:
                    # Blocks of another pool are handed on to it, and counted there.
                    mine = [b for b in blocks if b.pool is None or b.pool is this]
                given = facts.real(mine)
            except Exception as error:
                w.failed(error)
            result = original(*args, **kwargs)
            w.freed += given
            try:
                if w.in_connector:
                    w.unpin(facts.index, mine)
                if w.tracking:
                    w.changed(dirty, mine)
            except Exception as error:
                w.failed(error)
            return result
        except BaseException:
            w.stale = True
            raise
        finally:
            w.seq += 1
            w.depth -= 1

    return free_blocks


def touch(w: Watch, original: Wrapper, facts: PoolFacts, dirty: list[Any]) -> Wrapper:
    """`BlockPool.touch`."""

    def touch(*args: Any, **kwargs: Any) -> Any:
        w.depth += 1
        try:
            flat: Any = ()
            added = 0
            try:
                blocks = args[0] if args else kwargs["blocks"]
                if not isinstance(blocks, (list, tuple)):
                    blocks = list(blocks)
                    if args:
                        args = (blocks, *args[1:])
                    else:
                        kwargs["blocks"] = blocks
                # 0.10 to 0.14 hand over one sequence a group.
                nested = blocks and isinstance(blocks[0], (list, tuple))
                flat = [b for group in blocks for b in group] if nested else blocks
                added = facts.real(flat)
            except Exception as error:
                w.failed(error)
            result = original(*args, **kwargs)
            w.touched += added
            try:
                if w.in_connector:
                    w.pin(facts.index, flat)
                if w.tracking:
                    w.changed(dirty, flat)
            except Exception as error:
                w.failed(error)
            return result
        except BaseException:
            w.stale = True
            raise
        finally:
            w.seq += 1
            w.depth -= 1

    return touch


def evicted(w: Watch, original: Wrapper) -> Wrapper:
    """`BlockPool._maybe_evict_cached_block`, called for each block handed out."""

    def _maybe_evict_cached_block(block: Any) -> Any:
        result = original(block)
        if result:
            w.evicted += 1
        return result

    return _maybe_evict_cached_block


def evict_blocks(w: Watch, original: Wrapper, facts: PoolFacts, dirty: list[Any]) -> Wrapper:
    """`BlockPool.evict_blocks(ids)`: drops content on demand, not for an allocation."""
    inner = mutator(w, original)

    def evict_blocks(*args: Any, **kwargs: Any) -> Any:
        before = w.evicted
        result = inner(*args, **kwargs)
        w.evicted = before
        if w.tracking:
            try:
                ids = args[0] if args else kwargs["block_ids"]
                w.changed(dirty, [facts.blocks[i] for i in ids])
            except Exception as error:
                w.failed(error)
        return result

    return evict_blocks


def listed(w: Watch, original: Wrapper, dirty: list[Any]) -> Wrapper:
    """A call whose arguments are the blocks that it changes."""
    inner = mutator(w, original)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        if w.tracking:
            try:
                w.changed(dirty, [*args, *kwargs.values()])
            except Exception as error:
                w.failed(error)
        return result

    return call


def reset_prefix_cache(w: Watch, original: Wrapper) -> Wrapper:
    """`BlockPool.reset_prefix_cache`: every block may have lost its hash."""
    inner = mutator(w, original)

    def reset_prefix_cache(*args: Any, **kwargs: Any) -> Any:
        try:
            return inner(*args, **kwargs)
        finally:
            w.stale = True

    return reset_prefix_cache
