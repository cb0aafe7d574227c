"""Turns raw cuts into the state of every block and one row a request.

Runs on the probe's own thread, in short slices, so that the engine never waits long for the
interpreter lock. What is known of a pool is kept in byte and integer columns and moved on by
the differences that each cut brings; the result is the same as counting anew.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from kvtop.probe.cut import Columns, PoolRead, Raw
from kvtop.probe.facts import EngineFacts
from kvtop.probe.tables import APPEND, GONE, NULLED

FREE, CACHED, USED, SHARED, HELD, GHOST, NULL = range(7)
"""The bytes of `kvtop.model.blocks.BlockState`."""

STATE_NAMES = ("free", "cached", "used", "shared", "held", "ghost", "null")

PARKED = {
    "WAITING_FOR_REMOTE_KVS": "remote KV",
    "WAITING_FOR_STREAMING_REQ": "streaming",
}
"""Statuses of requests that hold blocks without being able to use them, and why."""

Pause = Callable[[], None]


class Table:
    """One block table of one request in one group."""

    __slots__ = ("group", "held", "ids", "pool", "rid", "shared", "size", "slot")

    def __init__(self, group: int, rid: str, pool: int, slot: int) -> None:
        self.group = group
        self.rid = rid
        self.pool = pool
        self.slot = slot
        self.ids = array("I")
        """Block ids, null blocks included."""
        self.size = 0
        """Entries that are not null blocks."""
        self.shared = 0
        """Of these, blocks that are in other tables too."""
        self.held = False
        """Whether it belongs to no live request."""


class PoolLedger:
    """What is known of each block of one pool.

    Args:
        label: Name of the pool.
        total: Blocks in it.
        owned: All tables are known. If not, a referenced block is in use, and who holds it
            cannot be said.
    """

    def __init__(self, label: str, total: int, owned: bool = True) -> None:
        self.owned = owned
        self.label = label
        self.total = total
        self.refs = bytearray(total)
        self.hashed = bytearray(total)
        self.queued = bytearray(total)
        self.null = bytearray(total)
        self.tables = array("H", bytes(2 * total))
        self.held = array("H", bytes(2 * total))
        self.fences = array("H", bytes(2 * total))
        self.owner = array("I", bytes(4 * total))
        """XOR of the slots of all tables that have the block: with one left, it is that one."""
        self.holders = bytearray(total)
        self.states = bytearray(total)
        self.counts = [total, 0, 0, 0, 0, 0, 0]
        self.free_queue: int | None = None
        self.changed: set[int] = set()
        self.all_changed = False
        self.read_at: dict[int, float] = {}

    def state(self, i: int) -> int:
        """State of block `i`.

        A block that is referenced and in the free queue at once is a ghost too: it is about
        to be handed out twice. That also breaks free + cached = free queue.
        """
        if self.null[i]:
            return NULL
        if not self.refs[i]:
            if not self.queued[i]:
                return GHOST
            return CACHED if self.hashed[i] else FREE
        tables = self.tables[i]
        if self.queued[i]:
            return GHOST
        if not self.owned:
            return USED
        if not (tables or self.fences[i]):
            return GHOST
        live = tables - self.held[i]
        if not live:
            return HELD
        return SHARED if tables > 1 else USED

    def settle(self, pause: Pause) -> None:
        """Recomputes the state and the holders of all changed blocks."""
        states, counts, holders = self.states, self.counts, self.holders
        tables, fences = self.tables, self.fences
        changed = range(self.total) if self.all_changed else self.changed
        self.all_changed = False
        for n, i in enumerate(changed):
            state = self.state(i)
            before = states[i]
            if state != before:
                states[i] = state
                counts[before] -= 1
                counts[state] += 1
            total = tables[i] + fences[i]
            holders[i] = total if total < 255 else 255
            if not n & 255:
                pause()
        self.changed = set()

    def mismatches(self) -> int:
        """Blocks, null ones aside, whose ref count is not the number of their holders."""
        if self.refs == self.holders:
            return 0
        pairs = zip(self.refs, self.holders, self.null, strict=True)
        return sum(r != h and not n for r, h, n in pairs)


class Ledger:
    """All pools, tables and fences of one engine, as of the last cut applied.

    Args:
        facts: Where everything is.

    Attributes:
        drift: Blocks that changed by a path that is not watched, found by reading them.
    """

    def __init__(self, facts: EngineFacts) -> None:
        self.facts = facts
        self.drift = 0
        self.generation = 0
        self._clear()

    def _clear(self) -> None:
        owned = self.facts.has_tables
        self.pools = [PoolLedger(p.label, len(p.blocks), owned) for p in self.facts.pools]
        self.tables: dict[str, dict[int, Table]] = {}
        self._slots: dict[int, Table] = {}
        self._next_slot = 1
        self._tables_verified_s = 0.0
        self._fences: list[tuple[int, int]] = []
        self.fence_blocks = 0

    def apply(self, raw: Raw, pause: Pause) -> None:
        """Moves on to a cut. Cuts of one generation must come in order, none left out.

        Args:
            raw: The cut.
            pause: Called every few dozen microseconds of work; may sleep.
        """
        if raw.first:
            self._clear()
            self.generation = raw.generation
        elif raw.generation != self.generation:
            raise ValueError("a cut was left out")
        for index, read in enumerate(raw.pools):
            if raw.first:
                self._scanned(self.pools[index], read, raw.mono_s)
            self._blocks(self.pools[index], read, raw, pause)
            self.pools[index].free_queue = read.free_queue
        for position, rid, kind, payload in raw.tables:
            self._table(position, rid, kind, payload, pause)
        self._fence(raw.fences)
        self._mark_held(raw, pause)
        for pool in self.pools:
            pool.settle(pause)
        self.drift += raw.table_drift
        self._tables_verified_s = raw.tables_verified_s

    def _scanned(self, pool: PoolLedger, read: PoolRead, now: float) -> None:
        at = 0
        for nulls, columns in zip(read.nulls, read.scan, strict=True):
            end = at + len(nulls)
            pool.null[at:end] = bytes(nulls)
            pool.refs[at:end], pool.hashed[at:end], pool.queued[at:end] = _as_bytes(columns)
            at = end
        pool.all_changed = True
        step = read.window_blocks or pool.total
        pool.read_at = dict.fromkeys(range(0, pool.total, step), now)

    def _blocks(self, pool: PoolLedger, read: PoolRead, raw: Raw, pause: Pause) -> None:
        seen: set[int] = set()
        for ids, columns in read.dirty:
            seen.update(ids)
            if columns is not None:
                refs, hashed, queued = _as_bytes(columns)
                for i, r, h, q in zip(ids, refs, hashed, queued, strict=True):
                    pool.refs[i] = r
                    pool.hashed[i] = h
                    pool.queued[i] = q
                pause()
        pool.changed |= seen
        if read.window is None:
            return
        begin, columns = read.window
        refs, hashed, queued = _as_bytes(columns)
        end = begin + len(refs)
        if not raw.first and (
            pool.refs[begin:end] != refs
            or pool.queued[begin:end] != queued
            or pool.hashed[begin:end] != hashed
        ):
            self._differences(pool, begin, (refs, hashed, queued), seen)
        pool.refs[begin:end], pool.hashed[begin:end], pool.queued[begin:end] = refs, hashed, queued
        if read.tail >= 0 and not pool.queued[read.tail]:
            pool.queued[read.tail] = 1
            pool.changed.add(read.tail)
        pool.read_at[begin] = raw.mono_s

    def _differences(
        self, pool: PoolLedger, begin: int, read: tuple[bytes, bytes, bytes], seen: set[int]
    ) -> None:
        for i, (r, h, q) in enumerate(zip(*read, strict=True), begin):
            # The hash of a referenced block says nothing about its state, and is not watched.
            if r != pool.refs[i] or q != pool.queued[i] or (h != pool.hashed[i] and not r):
                pool.changed.add(i)
                if i not in seen and not pool.null[i]:
                    self.drift += 1

    def _table(self, position: int, rid: str, kind: int, payload: Any, pause: Pause) -> None:
        tables = self.tables.get(rid)
        if tables is None:
            tables = self.tables[rid] = {}
        table = tables.get(position)
        if table is None:
            slot = self._next_slot
            self._next_slot = slot + 1
            table = Table(position, rid, self.facts.groups[position].pool_index, slot)
            tables[position] = self._slots[slot] = table
        if kind == APPEND:
            self._add(table, payload, pause)
            table.ids.extend(payload)
        elif kind == NULLED:
            first, last = payload
            null_id = self.facts.pools[table.pool].pool.null_block.block_id
            self._drop(table, table.ids[first:last], pause)
            for i in range(first, last):
                table.ids[i] = null_id
        elif kind == GONE:
            self._drop(table, table.ids, pause)
            del tables[position]
            del self._slots[table.slot]
            if not tables:
                del self.tables[rid]
        else:
            ids = payload
            # A common start stays as it is.
            same = 0
            for a, b in zip(ids, table.ids, strict=False):
                if a != b:
                    break
                same += 1
            self._drop(table, table.ids[same:], pause)
            self._add(table, ids[same:], pause)
            table.ids = ids

    def _add(self, table: Table, ids: array[int], pause: Pause) -> None:
        pool = self.pools[table.pool]
        counts, owner, null, slot = pool.tables, pool.owner, pool.null, table.slot
        added = 0
        for n, i in enumerate(ids):
            if null[i]:
                continue
            added += 1
            count = counts[i]
            counts[i] = count + 1
            if count:
                table.shared += 1
                if count == 1:
                    other = self._slots.get(owner[i])
                    if other is not None:
                        other.shared += 1
            owner[i] ^= slot
            if not n & 255:
                pause()
        table.size += added
        if table.held:
            self._shift(pool, ids, 1)
        pool.changed.update(ids)

    def _drop(self, table: Table, ids: array[int], pause: Pause) -> None:
        pool = self.pools[table.pool]
        counts, owner, null, slot = pool.tables, pool.owner, pool.null, table.slot
        dropped = 0
        for n, i in enumerate(ids):
            if null[i]:
                continue
            dropped += 1
            count = counts[i] - 1
            counts[i] = count
            owner[i] ^= slot
            if count:
                table.shared -= 1
                if count == 1:
                    other = self._slots.get(owner[i])
                    if other is not None:
                        other.shared -= 1
            if not n & 255:
                pause()
        table.size -= dropped
        if table.held:
            self._shift(pool, ids, -1)
        pool.changed.update(ids)

    def _shift(self, pool: PoolLedger, ids: array[int], by: int) -> None:
        held, null = pool.held, pool.null
        for i in ids:
            if not null[i]:
                held[i] += by

    def _fence(self, fences: list[tuple[int, int]]) -> None:
        self.fence_blocks = len(fences)
        if fences == self._fences:
            return
        for by, entries in ((-1, self._fences), (1, fences)):
            for index, i in entries:
                pool = self.pools[index]
                if not pool.null[i]:
                    pool.fences[i] += by
                    pool.changed.add(i)
        self._fences = fences

    def _mark_held(self, raw: Raw, pause: Pause) -> None:
        """A table is held when its request is finished, parked, or unknown to the scheduler."""
        live = set()
        for row in raw.rows:
            name = status_name(row[1])
            if name not in PARKED and not name.startswith("FINISHED"):
                live.add(row[0])
        for rid, tables in self.tables.items():
            held = rid not in live
            for table in tables.values():
                if table.held != held:
                    table.held = held
                    pool = self.pools[table.pool]
                    self._shift(pool, table.ids, 1 if held else -1)
                    pool.changed.update(table.ids)
            pause()

    def verified_age_s(self, now: float) -> float:
        """Most seconds since any block or table was last read entry by entry."""
        oldest = [min(p.read_at.values()) for p in self.pools if p.read_at]
        return max(0.0, now - min(*oldest, self._tables_verified_s)) if oldest else 0.0


def status_name(status: Any) -> str:
    """Name of a request status, for example `RUNNING`."""
    name = getattr(status, "name", None)
    return name if isinstance(name, str) else str(status)


def _as_bytes(columns: Columns) -> tuple[bytes, bytes, bytes]:
    refs, hashed, queued = columns
    try:
        packed = bytes(refs)
    except ValueError:
        packed = bytes([min(max(r, 0), 255) for r in refs])
    return packed, bytes(hashed), bytes(queued)
