"""The views of a session file as rows, in parts, so that a day fits in little memory."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from typing import Any

from kvtop.errors import UsageError
from kvtop.session.anonymize import Anonymizer
from kvtop.session.reader import SessionReader
from kvtop.session.schema import VIEWS, schema_sql

STACKS = "folded"
"""Column of packed stacks, which comes as text."""
_PART = 1000
"""Ticks (or requests) read at once."""


def table_names() -> tuple[str, ...]:
    """Names of the tables there are."""
    return tuple(VIEWS)


def columns(reader: SessionReader, table: str) -> list[tuple[str, str]]:
    """Names and types (`REAL`, `INTEGER`, `TEXT`) of a table's columns.

    Raises:
        UsageError: No such table.
    """
    if table not in VIEWS:
        raise UsageError(f"no table {table!r}", f"one of {', '.join(VIEWS)}")
    rows = reader.sql(f"PRAGMA table_info({table})")
    if not rows:
        # A file of an earlier format has no such table; an empty one has the same columns.
        with contextlib.closing(sqlite3.connect(":memory:")) as db:
            for statement in schema_sql():
                db.execute(statement)
            rows = db.execute(f"PRAGMA table_info({table})").fetchall()
    return [(str(row[1]), _type(str(row[1]), str(row[2]))) for row in rows]


def _type(name: str, declared: str) -> str:
    # An expression has no declared type; the only one that is no number is the time as text.
    if declared in ("REAL", "INTEGER", "TEXT"):
        return declared
    return "TEXT" if name in ("time_utc", STACKS) else "INTEGER"


def rows(
    reader: SessionReader, table: str, anonymizer: Anonymizer | None = None
) -> Iterator[tuple[Any, ...]]:
    """The rows of a table, in order.

    Args:
        reader: The file.
        table: One of `table_names`.
        anonymizer: Applied to every text. None: as recorded.

    Raises:
        UsageError: No such table.
        BadDataError: The file is damaged.
    """
    names = [name for name, _ in columns(reader, table)]
    view = VIEWS[table]
    by_request = table == "request"
    first, last = reader.first_tick, reader.last_tick
    if by_request:
        low, high = reader.sql("SELECT min(request), max(request) FROM request_name")[0]
        if low is None:
            return
        first, last = low, high
    if table == "capture":
        yield from _captures(reader, names, anonymizer)
        return
    changes = _changes(table, names, anonymizer)
    for start in range(first, last + 1, _PART):
        end = min(start + _PART, last + 1)
        part = reader.sql(
            f"SELECT {view.select} FROM {view.source}"  # noqa: S608
            f" WHERE {view.key} >= ? AND {view.key} < ? ORDER BY {view.key}",
            start << view.shift,
            end << view.shift,
        )
        for row in part:
            if not changes:
                yield row
                continue
            values = list(row)
            for index, change in changes:
                if isinstance(values[index], str):
                    values[index] = change(values[index])
            yield tuple(values)


def _captures(
    reader: SessionReader, names: list[str], anonymizer: Anonymizer | None
) -> Iterator[tuple[Any, ...]]:
    for capture in reader.captures():
        full = reader.stacks_of(capture)
        if anonymizer is not None:
            full = anonymizer.capture(full)
        view = VIEWS["capture"]
        ((*values, _),) = reader.sql(
            f"SELECT {view.select} FROM {view.source}"  # noqa: S608
            " WHERE t.tick = ? AND t.pid = ? AND t.time_us = ?",
            capture.tick,
            capture.pid,
            round(capture.time_s * 1e6),
        )[:1]
        values[names.index("outcome")] = full.outcome
        yield (*values, full.folded)


def _changes(
    table: str, names: list[str], anonymizer: Anonymizer | None
) -> list[tuple[int, Callable[[str], str]]]:
    if anonymizer is None:
        return []

    def named(kind: str) -> Callable[[str], str]:
        return lambda text: anonymizer.name(kind, text)

    known: dict[str, Callable[[str], str]] = {
        "id": named("request"),
        "model": named("model"),
        "lora": named("lora"),
        "uuid": named("GPU"),
        "server": anonymizer.server,
        "command": anonymizer.command,
        "file": anonymizer.path,
        "thread": anonymizer.text,
        "reason": anonymizer.text,
        "remedy": anonymizer.text,
        "note": anonymizer.text,
        "error": anonymizer.text,
    }
    if table == "source":
        known["name"] = anonymizer.source
    return [(index, known[name]) for index, name in enumerate(names) if name in known]


def warm_anonymizer(reader: SessionReader) -> Anonymizer:
    """An anonymizer that knows the names in a file, so that free text is clean from the start."""
    out = Anonymizer.of_this_machine()
    if reader.info.host:
        out.host(reader.info.host)
    for server, model in reader.sql("SELECT DISTINCT server, model FROM engine_change"):
        if isinstance(server, str):
            out.server(server)
        if isinstance(model, str):
            out.name("model", model)
    for (name,) in reader.sql("SELECT DISTINCT name FROM source_change"):
        if isinstance(name, str):
            out.source(name)
    return out
