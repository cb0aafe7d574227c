"""Reads the engine's state at one point between scheduler calls: as little as possible.

What runs here may run on the engine's thread, so it only copies raw values at C speed:
the fields of changed blocks, what tables gained or lost since the last cut, one tuple a
request. `ledger` turns that into states and rows on the probe's own thread.

Work that would hold the engine too long (the first scan, a burst of changes) is spread over
several safe points. Every record is the exact difference between what was known before and
after it, so records of an attempt that was overtaken by the engine are kept and the attempt
repeated; only the values that must belong to one moment are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from operator import attrgetter
from threading import Lock
from typing import Any

from kvtop.probe.facts import REQUEST_FIELDS, EngineFacts, PoolFacts
from kvtop.probe.tables import TableOp, TableReader
from kvtop.probe.watch import Watch

SCAN_BLOCKS = 8_192
"""Blocks of the first scan read at one safe point, about 0.5 ms."""
FULL_AUDIT_BLOCKS = 8_192
"""Pools up to this size are read block by block in every cut."""
WINDOW_BLOCKS = 2_048
"""Blocks of a larger pool that each cut reads directly, in rotation."""
DIRTY_BLOCKS = 5_000
"""Changed blocks read at one safe point."""
ALL_ROWS = 512
"""Up to so many requests are read anew in every cut; of more, those that only wait are kept."""

Columns = tuple[list[int], list[bool], list[bool]]
"""Ref counts, hash there, in the free queue: one value a block."""


class PoolRead:
    """What one cut read of one pool."""

    def __init__(self) -> None:
        self.nulls: list[list[bool]] = []
        self.scan: list[Columns] = []
        self.dirty: list[tuple[list[int], Columns | None]] = []
        self.window: tuple[int, Columns] | None = None
        self.window_blocks = 0
        self.free_queue: int | None = None
        self.tail = -1


class Raw:
    """One cut as read; complete when `Capture.slice` has returned True."""

    def __init__(self, generation: int, pools: int, first: bool) -> None:
        self.generation = generation
        self.first = first
        self.pools = [PoolRead() for _ in range(pools)]
        self.tables: list[TableOp] = []
        self.table_drift = 0
        self.tables_verified_s = 0.0
        self.fences: list[tuple[int, int]] = []
        self.fields: tuple[str, ...] = ()
        self.rows: list[tuple[Any, ...]] = []
        self.deferred: set[str] = set()
        self.lost: dict[str, int] = {}
        self.cached: dict[str, int] = {}
        self.counters: dict[str, int | None] = {}
        self.pause: str | None = None
        self.sleeping = False
        self.executing = False
        self.on_engine = False
        self.time_s = 0.0
        self.mono_s = 0.0
        self.step = 0
        self.took_us = 0.0


class Capture:
    """Takes raw cuts, incrementally.

    Args:
        facts: Where everything is.
        watch: Gives the changed blocks and the sequence lock.

    Attributes:
        lock: Held by whoever is in `slice`; nobody waits for it on the engine's thread.
    """

    def __init__(self, facts: EngineFacts, watch: Watch) -> None:
        self.facts = facts
        self.watch = watch
        self.lock = Lock()
        self.generation = 0
        self._tables = TableReader(facts)
        self._remade: set[str] = set()
        self._pending: Raw | None = None
        self._scanned: list[int] = []
        self._window = [0] * len(facts.pools)
        self._fields: tuple[str, ...] = ()
        self._getter: Callable[[Any], tuple[Any, ...]] | None = None
        self._queued: dict[str, tuple[Any, ...]] = {}
        self._readers = [_reader(pool) for pool in facts.pools]
        self._attempt: list[tuple[int, list[int], Columns | None]] = []

    def reset(self) -> None:
        """Forgets what is known; the next cut begins with a full scan, in slices."""
        watch = self.watch
        # In this order: a change listed or flagged after this line is never lost.
        watch.stale = False
        for dirty in watch.dirty:
            dirty.clear()
        watch.tracking = True
        self.generation += 1
        watch.remade.clear()
        self._tables = TableReader(self.facts)
        self._scanned = [0] * len(self.facts.pools)
        self._pending = Raw(self.generation, len(self.facts.pools), first=True)

    def slice(self, on_engine: bool) -> Raw | None:
        """One bounded piece of work; the finished cut when it was the last piece.

        Args:
            on_engine: True on the engine's thread, where nothing can change meanwhile.

        Returns:
            None when more pieces are needed, or the engine was in a watched call or came
            in between.
        """
        watch = self.watch
        begin = time.thread_time()
        seq = watch.seq
        if watch.depth or (not on_engine and watch.inside_older_call()):
            return None
        if watch.stale or not watch.tracking or not self.generation:
            self.reset()
        raw = self._pending
        if raw is None:
            raw = self._pending = Raw(self.generation, len(self.facts.pools), first=False)
        self._attempt = []
        self._remade = set(watch.remade)
        try:
            finished = self._work(raw)
        except RuntimeError:
            if on_engine:
                raise
            self._tables.settle(valid=False)
            return None  # A dict or set changed its size while it was copied.
        finally:
            raw.took_us += (time.thread_time() - begin) * 1e6
        if not on_engine and (watch.depth or watch.seq != seq):
            # Overtaken: what it read of listed blocks is read again.
            self._tables.settle(valid=False)
            return None
        if self._attempt:
            self._tables.settle(valid=True)
            watch.remade -= self._remade
        for index, (count, ids, columns) in enumerate(self._attempt):
            raw.pools[index].dirty.append((ids, columns))
            # By count on the same list: the engine may be about to extend it.
            del watch.dirty[index][:count]
        if not finished or watch.stale:
            return None
        raw.on_engine = on_engine
        self._pending = None
        for index, pool in enumerate(raw.pools):
            if pool.window is not None:
                self._window[index] = pool.window[0] + len(pool.window[1][0])
        return raw

    def _work(self, raw: Raw) -> bool:
        """Does one piece; True when the cut is complete."""
        if raw.first and not self._scan(raw):
            return False
        complete = self._tables.read(self._remade, raw.tables)
        fences = self.facts.fences()
        for index, pool in enumerate(self.facts.pools):
            complete = self._dirty(index, pool, fences) and complete
        if not complete:
            return False
        for index, pool in enumerate(self.facts.pools):
            self._audit(raw, index, pool)
        raw.table_drift, raw.tables_verified_s = self._tables.audit(time.monotonic(), raw.tables)
        raw.fences = [(self.facts.pool_of(block), block.block_id) for block in fences]
        for key, count in list(self.watch.pins.items()):
            raw.fences += [key] * count
        self._requests(raw)
        self._meta(raw)
        return True

    def _scan(self, raw: Raw) -> bool:
        room = SCAN_BLOCKS
        for index, pool in enumerate(self.facts.pools):
            begin = self._scanned[index]
            if begin >= len(pool.blocks) or room <= 0:
                continue
            part = pool.blocks[begin : begin + room]
            raw.pools[index].nulls.append(pool.nulls(part))
            raw.pools[index].scan.append(self._readers[index](part))
            self._scanned[index] = begin + len(part)
            room -= len(part)
        done = all(
            at >= len(p.blocks) for at, p in zip(self._scanned, self.facts.pools, strict=True)
        )
        return done and room > 0

    def _dirty(self, index: int, pool: PoolFacts, fences: list[Any]) -> bool:
        listed = self.watch.dirty[index]
        count = len(listed)
        part = listed[:DIRTY_BLOCKS]
        consumed = len(part)
        if len(self.facts.pools) == 1:
            part += fences
        else:
            part += [b for b in fences if self.facts.pool_of(b) == index]
        ids = [b.block_id for b in part]
        # Where every block is read anyway the ids serve only to tell seen from unseen changes.
        full = len(pool.blocks) <= FULL_AUDIT_BLOCKS
        self._attempt.append((consumed, ids, None if full else self._readers[index](part)))
        return count <= consumed

    def _audit(self, raw: Raw, index: int, pool: PoolFacts) -> None:
        read = raw.pools[index]
        total = len(pool.blocks)
        if total <= FULL_AUDIT_BLOCKS:
            read.window_blocks = total
            read.window = (0, self._readers[index](pool.blocks))
        else:
            begin = self._window[index]
            if begin >= total:
                begin = 0
            read.window_blocks = WINDOW_BLOCKS
            part = pool.blocks[begin : begin + WINDOW_BLOCKS]
            read.window = (begin, self._readers[index](part))
        read.free_queue = pool.free_queue()
        read.tail = pool.unlinked_tail()

    def _requests(self, raw: Raw) -> None:
        requests = list(self.facts.scheduler.requests.values())
        raw.rows = []
        if requests:
            getter = self._getter or self._make_getter(requests)
            read = self._many if len(requests) > ALL_ROWS else _all_rows
            try:
                raw.rows = read(getter, requests)
            except AttributeError:
                # A kind of request that lacks one of the fields.
                self._queued.clear()
                raw.rows = read(self._make_getter(requests), requests)
        raw.fields = self._fields
        raw.lost, raw.cached = self.watch.lost.copy(), self.watch.cached.copy()
        raw.deferred = {r.request_id for r in self.facts.deferred()}

    def _many(
        self, getter: Callable[[Any], tuple[Any, ...]], requests: list[Any]
    ) -> list[tuple[Any, ...]]:
        """Rows of a long queue: nothing changes in a request that has only been waiting."""
        kept, queued = self._queued, {}
        rows = []
        new = ALL_ROWS
        unread = (None,) * (len(self._fields) - 2)
        for request in requests:
            status = request.status
            rid = request.request_id
            if getattr(status, "name", None) != "WAITING" or request.num_computed_tokens:
                rows.append(getter(request))
                continue
            row = kept.get(rid)
            if row is None or row[1] is not status:
                if new:
                    new -= 1
                    row = getter(request)
                else:
                    rows.append((rid, status, *unread))
                    continue
            queued[rid] = row
            rows.append(row)
        self._queued = queued
        return rows

    def _make_getter(self, requests: list[Any]) -> Callable[[Any], tuple[Any, ...]]:
        """A C-speed reader of the fields that all these requests have."""
        names = [n for n in REQUEST_FIELDS if all(hasattr(r, n) for r in requests)]
        self._fields = ("request_id", "status", *names)
        self._getter = attrgetter(*self._fields)
        return self._getter

    def _meta(self, raw: Raw) -> None:
        watch = self.watch
        raw.counters = watch.counters()
        raw.pause = self.facts.pause_name()
        raw.sleeping = self.facts.sleeping()
        raw.executing = watch.open_steps > 0
        raw.step = watch.steps
        raw.time_s = time.time()
        raw.mono_s = time.monotonic()


def _all_rows(
    getter: Callable[[Any], tuple[Any, ...]], requests: list[Any]
) -> list[tuple[Any, ...]]:
    return list(map(getter, requests))


def _reader(pool: PoolFacts) -> Callable[[list[Any]], Columns]:
    """Reads the fields of many blocks; list comprehensions beat attrgetter two to one."""
    hashes: Callable[[list[Any]], list[bool]]
    if pool.hash_name == "_block_hash":

        def hashes(part: list[Any]) -> list[bool]:
            return [b._block_hash is not None for b in part]

    else:
        get = pool.get_hash

        def hashes(part: list[Any]) -> list[bool]:
            return [get(b) is not None for b in part]

    if not pool.has_links:

        def queued(part: list[Any]) -> list[bool]:
            return [b.ref_cnt <= 0 for b in part]

    elif pool.has_sentinel:

        def queued(part: list[Any]) -> list[bool]:
            return [b.next_free_block is not None for b in part]

    else:

        def queued(part: list[Any]) -> list[bool]:
            return [b.next_free_block is not None or b.prev_free_block is not None for b in part]

    def read(part: list[Any]) -> Columns:
        return [b.ref_cnt for b in part], hashes(part), queued(part)

    return read
