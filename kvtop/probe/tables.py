"""Follows the block tables of all requests, and tells what changed since it last looked.

A table is known as an array of block ids: arrays cost the garbage collector nothing, while a
copy of the lists would be walked by each of its full runs. vLLM appends to a table, nulls it
from the front (sliding window), or gives a request another one; the few in-place changes
besides are watched, or the group is compared whole. Some tables are compared entry by entry
in each cut all the same.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from typing import Any

from kvtop.probe.facts import EngineFacts, GroupFacts

TABLE_ENTRIES = 8_192
"""Entries of tables not seen before read at one safe point, or one table's if it has more."""
TABLE_WINDOW = 2_048
"""Table entries that each cut compares one by one, in rotation; at least one table's."""

APPEND, REPLACE, NULLED, GONE = range(4)
"""What happened to a table: entries added; all new; first entries nulled; table gone."""

TableOp = tuple[int, str, int, Any]
"""Group position, request id, kind, block ids (APPEND, REPLACE) or (from, to) (NULLED)."""


class Known:
    """What is known of one table."""

    __slots__ = ("front", "ids", "length", "table", "verified_at")

    def __init__(self) -> None:
        self.table: list[Any] | None = None
        """vLLM's own list: another one is another table, even of the same request."""
        self.ids = array("I")
        self.length = 0
        self.front = 0
        """Entries before this one are null blocks."""
        self.verified_at = time.monotonic()
        """When its entries were last compared; a new one is read whole."""


class TableReader:
    """The tables of one engine.

    Args:
        facts: Where everything is.
    """

    def __init__(self, facts: EngineFacts) -> None:
        self.facts = facts
        self._known: list[dict[str, Known]] = [{} for _ in facts.groups]
        self._queues: list[deque[tuple[str, Known]]] = [deque() for _ in facts.groups]
        self._touched: set[str] = set()
        self._doubtful: set[str] = set()

    def read(self, remade: set[str], ops: list[TableOp]) -> bool:
        """Appends what changed to `ops`.

        Args:
            remade: Requests whose tables were changed in place.
            ops: Records; each is the exact difference, even if the engine came in between.

        Returns:
            False when there were more new tables than one piece of work may read.
        """
        room = TABLE_ENTRIES
        complete = True
        doubtful = self._doubtful | remade
        for position, group in enumerate(self.facts.groups):
            known_tables = self._known[position]
            overlay = getattr(group.owner, "residency_changes", None)
            null = self._null(group)
            tables = group.tables
            grows_only, windowed = group.grows_only, group.windowed
            seen = 0
            for rid, table in list(tables.items()):
                known = known_tables.get(rid)
                if known is None:
                    if not table:
                        continue
                    if room <= 0:
                        complete = False
                        continue
                    known_tables[rid] = known = Known()
                    self._queues[position].append((rid, known))
                    room -= len(table)
                seen += 1
                if overlay and group.overlaid(rid):
                    self._reread(ops, position, rid, known, group.row(rid, table))
                    continue
                length = known.length
                if known.table is not table or len(table) < length:
                    known.table = table
                    self._reread(ops, position, rid, known, table)
                    continue
                if len(table) > length:
                    tail = array("I", [b.block_id for b in table[length:]])
                    known.ids.extend(tail)
                    known.length = length + len(tail)
                    self._record(ops, (position, rid, APPEND, tail))
                if windowed and known.front < len(table) and table[known.front] is null:
                    self._nulled(ops, position, rid, known, table)
                if not grows_only or rid in doubtful:
                    self._reread(ops, position, rid, known, table)
            if len(known_tables) > seen:
                for rid in [rid for rid in known_tables if rid not in tables]:
                    del known_tables[rid]
                    self._record(ops, (position, rid, GONE, None))
        return complete

    def settle(self, valid: bool) -> None:
        """Ends an attempt.

        Args:
            valid: Nothing changed meanwhile. Otherwise what it read may be a mixture of two
                moments, and is compared entry by entry next time.
        """
        if valid:
            self._doubtful = set()
        else:
            self._doubtful |= self._touched
        self._touched = set()

    def audit(self, now: float, ops: list[TableOp]) -> tuple[int, float]:
        """Compares some tables entry by entry, in rotation; all of them when they are few.

        Returns:
            How many were other than known, and when the table was compared whose turn is
            the longest ago; `now` if all were compared.
        """
        room = TABLE_WINDOW
        drift = 0
        oldest = now
        for position, group in enumerate(self.facts.groups):
            tables, known_tables = group.tables, self._known[position]
            queue = self._queues[position]
            for _ in range(len(queue)):
                rid, known = queue[0]
                table = tables.get(rid)
                if known_tables.get(rid) is not known or table is None:
                    queue.popleft()
                    continue
                if room <= 0:
                    oldest = min(oldest, known.verified_at)
                    break
                room -= len(table)
                if not group.overlaid(rid) and self._reread(ops, position, rid, known, table):
                    drift += 1
                known.verified_at = now
                queue.rotate(-1)
        return drift, oldest

    def _null(self, group: GroupFacts) -> Any:
        return self.facts.pools[group.pool_index].pool.null_block

    def _record(self, ops: list[TableOp], op: TableOp) -> None:
        ops.append(op)
        self._touched.add(op[1])

    def _reread(
        self, ops: list[TableOp], position: int, rid: str, known: Known, table: list[Any]
    ) -> bool:
        """Reads a table whole; returns whether it was other than known."""
        ids = array("I", [b.block_id for b in table])
        if ids == known.ids:
            return False
        known.ids = ids
        known.length = len(ids)
        null = self._null(self.facts.groups[position]).block_id
        front = 0
        while front < len(ids) and ids[front] == null:
            front += 1
        known.front = front
        self._record(ops, (position, rid, REPLACE, ids[:]))
        return True

    def _nulled(
        self, ops: list[TableOp], position: int, rid: str, known: Known, table: list[Any]
    ) -> None:
        """Follows a sliding window, which nulls entries from the front on."""
        null = self._null(self.facts.groups[position])
        front = first = known.front
        end = min(len(known.ids), len(table))
        while front < end and table[front] is null:
            known.ids[front] = null.block_id
            front += 1
        known.front = front
        self._record(ops, (position, rid, NULLED, (first, front)))
