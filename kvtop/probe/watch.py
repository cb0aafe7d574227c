"""Sees every change of the pools and the queues as it happens, and can be taken out again.

Methods are wrapped on the instances, never on the classes. Counting costs a few additions a
call, plus one C-speed `list.extend` while a client is there.

Not watched is `cache_full_blocks`: whether a referenced block has a hash says nothing about
its state, and when it is given back its fields are read again.

`depth` and `seq` are the sequence lock of readers on other threads: state read while
`depth` is 0 before and after, and `seq` has not moved, was not changed meanwhile.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import update_wrapper
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, cast

from kvtop.probe import wrappers
from kvtop.probe.facts import EngineFacts, PoolFacts, path
from kvtop.probe.wrappers import Wrapper

MAX_ERRORS = 10
"""Errors of its own after which the probe stops itself."""

MAX_DIRTY = 1_000_000
"""Longest list of changed blocks kept; beyond it a full scan is due."""

MUTATORS = (
    "add_request",
    "finish_requests",
    "reset_prefix_cache",
    "set_pause_state",
    "update_draft_token_ids",
    "reset_connector_cache",
)
"""Scheduler methods that may change requests or tables, besides those wrapped singly."""

DEATH_CALLS = ("_send_engine_dead", "shutdown")
"""Methods of the engine core that are called as it dies (`probe.last`)."""

CONNECTOR_CALLS = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "on_new_request",
    "reset_cache",
    "take_events",
)
"""Scheduler-side methods of a KV connector, in which it may pin blocks for a transfer."""


class Watch:
    """Counters, changed blocks and the sequence lock of one engine.

    Args:
        facts: Where everything is.

    Attributes:
        depth: Watched calls under way on the engine's thread.
        seq: Watched calls that have ended.
        want: A client waits for a cut; looked at on entry of `schedule`.
        tracking: Changed blocks are listed in `dirty`.
        stale: Changed blocks were lost; a full scan is due.
        last_begin: Monotonic time of the last entry of `schedule`; 0: none yet.
    """

    def __init__(self, facts: EngineFacts) -> None:
        self.facts = facts
        self.depth = 0
        self.seq = 0
        self.want = False
        self.tracking = False
        self.stale = True
        self.last_begin = 0.0
        self.open_steps = 0
        self.active = False
        self.errors = 0
        self.last_error = ""
        self.allocated = 0
        self.freed = 0
        self.touched = 0
        self.evicted = 0
        self.alloc_failures = 0
        self.preemptions = 0
        self.preempted_blocks = 0
        self.preempted_tokens = 0
        self.steps = 0
        self.in_schedule = False
        self.in_connector = 0
        self.remade: set[str] = set()
        self.pins: dict[tuple[int, int], int] = {}
        self.dirty: list[list[Any]] = [[] for _ in facts.pools]
        self.lost: dict[str, int] = {}
        self.cached: dict[str, int] = {}
        self.on_boundary: Callable[[], None] = _nothing
        self.on_death: Callable[[], None] = _nothing
        self.call_ns = 0.0
        self.watched: set[str] = set()
        self._codes: set[CodeType] = set()
        self._placed: list[tuple[Any, str, Wrapper, bool, Any]] = []

    def failed(self, error: BaseException) -> None:
        """Notes an error of the probe's own; the engine never sees it."""
        self.errors += 1
        self.last_error = f"{type(error).__name__}: {error}"[:200]
        self.stale = True
        if self.errors >= MAX_ERRORS:
            self.want = False
            self.tracking = False
            self.active = False

    def watch(self) -> None:
        """Wraps everything that is there. Names that are not go to `facts.missing`."""
        if self.active:
            return
        self.active = True
        scheduler, manager = self.facts.scheduler, self.facts.manager
        self._place(scheduler, "schedule", wrappers.schedule, needed=True)
        self._place(scheduler, "update_from_output", wrappers.update_from_output, needed=True)
        for name in MUTATORS:
            needed = name in ("add_request", "finish_requests")
            self._place(scheduler, name, wrappers.mutator, needed=needed)
        self._place(manager, "allocate_slots", wrappers.allocate_slots, needed=True)
        if hasattr(scheduler, "_preempt_request"):
            self._place(scheduler, "_preempt_request", wrappers.preempt, needed=True)
        else:
            self._place(manager, "free", wrappers.free_in_schedule, needed=True)
        if self.facts.connector is not None:
            for name in CONNECTOR_CALLS:
                self._place(self.facts.connector, name, wrappers.connector)
        for group in self.facts.groups:
            self._place(group.owner, "_apply_cow", wrappers.copy_on_write)
        for pool in self.facts.pools:
            self._watch_pool(pool)
        for name in DEATH_CALLS:
            self._place(self.facts.engine, name, wrappers.dying)
        self.call_ns = self._measure_call()

    def _watch_pool(self, facts: PoolFacts) -> None:
        pool = facts.pool
        dirty = self.dirty[facts.index]
        place = self._place
        place(
            pool, "get_new_blocks", lambda w, o: wrappers.get_new_blocks(w, o, dirty), needed=True
        )
        place(pool, "free_blocks", lambda w, o: wrappers.give_back(w, o, facts, dirty), needed=True)
        place(pool, "unpin_blocks", lambda w, o: wrappers.give_back(w, o, facts, dirty))
        place(pool, "touch", lambda w, o: wrappers.touch(w, o, facts, dirty), needed=True)
        place(pool, "evict_blocks", lambda w, o: wrappers.evict_blocks(w, o, facts, dirty))
        place(pool, "move_block_hashes", lambda w, o: wrappers.listed(w, o, dirty))
        place(pool, "reset_prefix_cache", wrappers.reset_prefix_cache)
        if path(pool, "enable_caching") is not False:
            place(pool, "_maybe_evict_cached_block", wrappers.evicted, needed=True)

    def unwatch(self) -> None:
        """Restores each instance exactly as it was.

        A wrapper that somebody else has wrapped since cannot be taken out of the middle; it
        stays and passes everything through.
        """
        self.active = False
        self.tracking = False
        self.want = False
        for obj, name, wrapper, was_own, before in reversed(self._placed):
            if obj.__dict__.get(name) is not wrapper:
                continue
            if was_own:
                setattr(obj, name, before)
            else:
                delattr(obj, name)
        self._placed.clear()
        for dirty in self.dirty:
            dirty.clear()

    def inside_older_call(self) -> bool:
        """Whether a thread may be in a call of the scheduler that began before `watch`.

        Such a call moves no sequence lock. None is left once `schedule` has been entered.
        """
        if self.steps:
            return False
        for frame in sys._current_frames().values():
            at: FrameType | None = frame
            while at is not None:
                if at.f_code in self._codes:
                    return True
                at = at.f_back
        return False

    def calls_ns(self) -> float:
        """Estimated time in wrappers so far, nanoseconds: calls x measured overhead."""
        return self.seq * self.call_ns

    def counters(self) -> dict[str, int | None]:
        """Counts since `watch`, in wire names; null where there is no such place.

        `allocated + touched - freed` is the change of the sum of ref counts of all blocks but
        the null ones: `touched` and `freed` leave null blocks out, and `freed` has the
        references given back by `unpin_blocks` (0.31+) in it.
        """

        def known(name: str, value: int) -> int | None:
            return value if name in self.watched else None

        preempt = "_preempt_request" if "_preempt_request" in self.watched else "free"
        return {
            "allocated": known("get_new_blocks", self.allocated),
            "freed": known("free_blocks", self.freed),
            "touched": known("touch", self.touched),
            "evicted": self._evicted(),
            "alloc_failures": known("allocate_slots", self.alloc_failures),
            "preemptions": known(preempt, self.preemptions),
            "preempted_blocks": known(preempt, self.preempted_blocks),
            "preempted_tokens": known(preempt, self.preempted_tokens),
            "steps": known("schedule", self.steps),
        }

    def _evicted(self) -> int | None:
        if "_maybe_evict_cached_block" in self.watched:
            return self.evicted
        # Without a prefix cache nothing is ever evicted.
        return 0 if path(self.facts.pools[0].pool, "enable_caching") is False else None

    def _place(
        self,
        obj: Any,
        name: str,
        make: Callable[[Watch, Wrapper], Wrapper],
        needed: bool = False,
    ) -> None:
        original = getattr(obj, name, None)
        if not callable(original):
            if needed:
                self.facts.missing.append(f"watch {name}")
            return
        try:
            own = vars(obj)
            was_own, before = name in own, own.get(name)
            wrapper = make(self, original)
            update_wrapper(wrapper, original)
            setattr(obj, name, wrapper)
        except Exception:
            # Slots or a compiled class: this one cannot be watched, the audit still reads it.
            self.facts.missing.append(f"watch {name}")
            return
        code = getattr(original, "__code__", None)
        if isinstance(code, CodeType):
            self._codes.add(code)
        self._placed.append((obj, name, wrapper, was_own, before))
        self.watched.add(name)

    def _measure_call(self) -> float:
        """Nanoseconds of processor time that one wrapper adds to a call, measured here once."""

        def bare() -> None:
            return None

        def each(call: Callable[[], None]) -> float:
            begin = time.thread_time_ns()
            for _ in range(100):
                call()
            return (time.thread_time_ns() - begin) / 100

        # Not on this watch: the engine may be in a call that it counts.
        wrapped = wrappers.mutator(cast("Watch", SimpleNamespace(depth=0, seq=0)), bare)
        added = min(each(wrapped) for _ in range(5)) - min(each(bare) for _ in range(5))
        return max(0.0, added)

    def note_admitted(self, output: Any) -> None:
        """Keeps how many tokens of each newly admitted request came from the prefix cache.

        vLLM says it in the scheduler output only: `num_computed_tokens` of new and of
        resumed requests (vllm/v1/core/sched/output.py).
        """
        for new in getattr(output, "scheduled_new_reqs", None) or ():
            self.cached[new.req_id] = new.num_computed_tokens
        again = getattr(output, "scheduled_cached_reqs", None)
        if again is None:
            return
        if isinstance(again, list):  # Before 0.9.2: one object a request.
            for data in again:
                if getattr(data, "resumed_from_preemption", False):
                    self.cached[data.req_id] = data.num_computed_tokens
        else:
            resumed = getattr(again, "resumed_req_ids", None)
            if resumed:
                for rid, computed in zip(again.req_ids, again.num_computed_tokens, strict=False):
                    if rid in resumed:
                        self.cached[rid] = computed
            elif resumed is None and any(getattr(again, "resumed_from_preemption", None) or ()):
                for rid, is_resumed, computed in zip(
                    again.req_ids,
                    again.resumed_from_preemption,
                    again.num_computed_tokens,
                    strict=False,
                ):
                    if is_resumed:
                        self.cached[rid] = computed
        self._prune(self.cached)

    def _prune(self, notes: dict[str, int]) -> None:
        """Forgets requests that have left, once they are the larger part."""
        known = self.facts.scheduler.requests
        if len(notes) > 2 * len(known) + 64:
            for rid in [rid for rid in notes if rid not in known]:
                del notes[rid]

    def holding(self, request: Any) -> tuple[str, int, int]:
        """Id, blocks held without null blocks, and computed tokens of a request."""
        rid: str = request.request_id
        blocks = 0
        for group in self.facts.groups:
            table = group.tables.get(rid)
            if table:
                blocks += self.facts.pools[group.pool_index].real(table)
        return rid, blocks, request.num_computed_tokens

    def note_preempted(self, rid: str, blocks: int, tokens: int) -> None:
        """Counts one preemption."""
        self.preemptions += 1
        self.preempted_blocks += blocks
        self.preempted_tokens += tokens
        self.lost[rid] = blocks
        self._prune(self.lost)

    def changed(self, dirty: list[Any], blocks: Any) -> None:
        """Lists blocks that may have changed."""
        dirty.extend(blocks)
        if len(dirty) > MAX_DIRTY:
            self.stale = True
            dirty.clear()

    def pin(self, pool: int, blocks: Any) -> None:
        """Notes references that a KV connector takes for itself."""
        pins = self.pins
        null = self.facts.pools[pool].pool.null_block
        for block in blocks:
            if block is not null:
                key = (pool, block.block_id)
                pins[key] = pins.get(key, 0) + 1

    def unpin(self, pool: int, blocks: Any) -> None:
        """Notes references that a KV connector gives back."""
        pins = self.pins
        for block in blocks:
            key = (pool, block.block_id)
            left = pins.get(key, 0) - 1
            if left > 0:
                pins[key] = left
            else:
                # Taken before the probe came when it was not known.
                pins.pop(key, None)


def _nothing() -> None:
    return None
