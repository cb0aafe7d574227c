"""Builds the answers: plain rows of requests and the JSON of each path.

Names and units are those of `kvtop.model.snapshot`. Unknown is null. No prompt text and no
token ids are ever read, so none can be in an answer.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from kvtop.probe.cut import Raw
from kvtop.probe.facts import REQUEST_FIELDS, EngineFacts, as_int, as_text, path
from kvtop.probe.ledger import (
    GHOST,
    NULL,
    PARKED,
    STATE_NAMES,
    Ledger,
    PoolLedger,
    Table,
    status_name,
)

COLUMNS = (
    "id",
    "status",
    "phase",
    "reason",
    "arrival_time_s",
    "age_s",
    "held_s",
    "prompt_tokens",
    "output_tokens",
    "max_tokens",
    "computed_tokens",
    "cached_tokens",
    "blocks",
    "shared_blocks",
    "slack_tokens",
    "kv_bytes",
    "preemptions",
    "owed_blocks",
    "priority",
    "lora",
)
"""Columns of the request rows, in order."""

Pause = Callable[[], None]
_NO_TABLES: dict[int, Table] = {}


class Rows:
    """Makes the request rows of each cut.

    Args:
        facts: Where everything is.
        ledger: Tables and shared counts.
    """

    def __init__(self, facts: EngineFacts, ledger: Ledger) -> None:
        self.facts = facts
        self.ledger = ledger
        self._held_since: dict[str, float] = {}

    def make(self, raw: Raw, pause: Pause) -> list[list[Any]]:
        """One row a request, then one a table that no request owns."""
        rows = []
        held: set[str] = set()
        known = set()
        # Where each field is in a row, and what stands for those that this vLLM lacks.
        places = {name: i for i, name in enumerate(raw.fields)}
        absent = len(raw.fields)
        pick = itemgetter(
            *(places.get(name, absent) for name in ("request_id", "status", *REQUEST_FIELDS))
        )
        for n, values in enumerate(raw.rows):
            row = self._row(pick((*values, None)), raw)
            known.add(row[0])
            if row[6] is not None:
                held.add(row[0])
            rows.append(row)
            if not n & 15:
                pause()
        for rid, tables in self.ledger.tables.items():
            if rid not in known and any(t.size for t in tables.values()):
                held.add(rid)
                rows.append(self._orphan(rid, tables, raw))
        if len(self._held_since) > len(held):
            self._held_since = {r: t for r, t in self._held_since.items() if r in held}
        return rows

    def _held_s(self, rid: str, raw: Raw) -> float:
        return round(raw.mono_s - self._held_since.setdefault(rid, raw.mono_s), 3)

    def _orphan(self, rid: str, tables: dict[int, Table], raw: Raw) -> list[Any]:
        row: list[Any] = [None] * len(COLUMNS)
        blocks = sum(t.size for t in tables.values())
        row[0:4] = [rid, "NO REQUEST", "held", "orphan table"]
        row[6] = self._held_s(rid, raw)
        row[12:14] = [blocks, sum(t.shared for t in tables.values())]
        row[15] = self._bytes(blocks)
        return row

    def _bytes(self, blocks: int) -> int | None:
        per_block = self.facts.block_bytes
        return None if per_block is None else blocks * per_block

    def _row(self, values: tuple[Any, ...], raw: Raw) -> list[Any]:
        (
            rid,
            status_value,
            arrival,
            prompt,
            output,
            max_tokens,
            computed,
            total,
            ahead,
            preemptions,
            priority,
            lora,
            cached,
            stats,
        ) = values
        status = status_name(status_value)
        tables = self.ledger.tables.get(rid, _NO_TABLES)
        blocks: int | None = None
        shared: int | None = None
        if self.facts.has_tables:
            blocks = shared = 0
            for table in tables.values():
                blocks += table.size
                shared += table.shared
        phase: str
        reason: str | None = None
        if status == "RUNNING":
            phase = "prefill" if _prefilling(prompt, output, computed, total, ahead) else "decode"
        else:
            phase, reason = self._phase(rid, status, blocks, raw)
        owed: int | None = 0
        if preemptions or rid in raw.lost:
            owed = _owed(raw.lost.get(rid), status, phase, blocks, preemptions)
        age = None if arrival is None else round(max(0.0, raw.time_s - arrival), 3)
        return [
            rid,
            status,
            phase,
            reason,
            arrival,
            age,
            self._held_s(rid, raw) if phase == "held" else None,
            prompt,
            output,
            max_tokens,
            computed,
            _cached_tokens(raw.cached.get(rid), status, cached, stats),
            blocks,
            shared,
            self._slack(tables, computed),
            None if blocks is None else self._bytes(blocks),
            preemptions,
            owed,
            priority,
            None if lora is None else _lora(lora),
        ]

    def _phase(self, rid: str, status: str, blocks: int | None, raw: Raw) -> tuple[str, str | None]:
        if status.startswith("FINISHED"):
            return "held", "finished" if self.facts.connector is None else "connector"
        if status in PARKED:
            return ("held" if blocks else "waiting"), PARKED[status]
        if status == "PREEMPTED":
            return "preempted", None
        if raw.pause not in (None, "UNPAUSED"):
            return "waiting", "paused"
        # `WAITING_FOR_FSM` until 0.18, `WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR` since.
        if "FSM" in status or "GRAMMAR" in status:
            return "waiting", "grammar"
        return "waiting", "deferred" if rid in raw.deferred else "capacity"

    def _slack(self, tables: dict[int, Table], computed: int | None) -> int | None:
        if computed is None or not self.facts.has_tables:
            return None
        slack = 0
        for position, table in tables.items():
            group = self.facts.groups[position]
            if not table.size:
                continue
            if not group.positional or group.block_size_tokens is None:
                return None
            # Null entries at the front stand for positions that the window has left.
            slots = len(table.ids) * group.block_size_tokens
            slack += max(0, slots - computed)
        return slack


def _cached_tokens(noted: int | None, status: str, cached: Any, stats: Any) -> int | None:
    if noted is not None:
        return noted
    if status != "RUNNING" and not status.startswith("FINISHED"):
        return None  # Not admitted yet, or not since the probe is here.
    value = as_int(cached)
    if value is None and stats is not None:
        value = as_int(path(stats, "num_cached_tokens"))
    return None if value is None or value < 0 else value


def _owed(
    lost: int | None, status: str, phase: str, blocks: int | None, preemptions: Any
) -> int | None:
    if lost is None:
        # Preempted before the probe came: what it lost was not seen.
        recomputes = status == "PREEMPTED" or (phase == "prefill" and preemptions)
        return None if recomputes else 0
    if blocks is None:
        return None
    return max(0, lost - blocks) if status == "PREEMPTED" or phase == "prefill" else 0


def _prefilling(prompt: Any, output: Any, computed: Any, total: Any, ahead: Any) -> bool:
    """Whether a running request still computes its prompt, or recomputes after preemption."""
    if computed is None or prompt is None:
        return not output
    if computed < prompt:
        return True
    # Async scheduling runs ahead: placeholders are tokens computed but not yet known.
    if total is not None and total + (ahead or 0) - computed > 1:
        return True
    return not output and bool(computed <= prompt)


def _lora(request: Any) -> str | None:
    return as_text(path(request, "lora_name")) or as_text(path(request, "name"))


def pool_json(pool: PoolLedger, columns: bool) -> dict[str, Any]:
    """One entry of `pools`."""
    counts = {"total": pool.total}
    for state in (NULL, *range(GHOST + 1)):
        counts[STATE_NAMES[state]] = pool.counts[state]
    out: dict[str, Any] = {"label": pool.label, "free_queue": pool.free_queue, "counts": counts}
    if columns:
        for name, column in (
            ("states", pool.states),
            ("refs", pool.refs),
            ("tables", pool.holders),
        ):
            if name == "tables" and not pool.owned:
                out[name] = None
                continue
            # zlib lets the engine run meanwhile.
            out[name] = b64encode(zlib.compress(bytes(column), 1)).decode("ascii")
    return out


def rows_json(rows: list[list[Any]], pause: Pause) -> bytes:
    """The value of `requests`."""
    parts = []
    for begin in range(0, len(rows), 16):
        parts.append(json.dumps(rows[begin : begin + 16], separators=(",", ":"))[1:-1])
        pause()
    head = '{"columns":' + json.dumps(COLUMNS) + ',"rows":['
    return (head + ",".join(parts) + "]}").encode("ascii")


def fewer_rows(rows: list[list[Any]], most: int) -> list[list[Any]]:
    """At most so many rows; those that hold most blocks stay."""
    if len(rows) <= most:
        return rows
    at = COLUMNS.index("blocks")
    return sorted(rows, key=lambda row: -(row[at] or 0))[:most]


def request_json(ledger: Ledger, facts: EngineFacts, rid: str, step: int, pause: Pause) -> Any:
    """The answer to `/v1/requests/<id>`: the request's tables as of the last cut."""
    own = ledger.tables.get(rid)
    tables, refs = [], []
    shared: dict[str, list[str]] = {}
    if own:
        for position in sorted(own):
            table = own[position]
            pool = ledger.pools[table.pool]
            group = facts.groups[position]
            tables.append(
                {
                    "group": group.index,
                    "block_size_tokens": group.block_size_tokens,
                    "blocks": table.ids.tolist(),
                }
            )
            refs.append([pool.refs[i] for i in table.ids])
            several = {i for i in table.ids if pool.tables[i] > 1 and not pool.null[i]}
            if several:
                _find_sharers(ledger, table, several, shared, pause)
    return {
        "id": rid,
        "found": own is not None,
        "step": step,
        "tables": tables,
        "refs": refs,
        "shared_with": shared,
    }


def _find_sharers(
    ledger: Ledger, own: Table, blocks: set[int], shared: dict[str, list[str]], pause: Pause
) -> None:
    for rid, tables in ledger.tables.items():
        pause()
        for other in tables.values():
            if rid == own.rid or other.pool != own.pool or not other.shared:
                continue
            for i in blocks.intersection(other.ids):
                sharers = shared.setdefault(str(i), [])
                if rid not in sharers:
                    sharers.append(rid)


def dump(value: Any) -> bytes:
    """JSON as it is sent."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")
