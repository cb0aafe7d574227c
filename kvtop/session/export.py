"""A session as CSV, JSON lines, Parquet, a trace, or a new session file."""

from __future__ import annotations

import csv
import importlib
import io
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from kvtop.errors import StorageError, UsageError
from kvtop.model.codec import to_json
from kvtop.session import tables
from kvtop.session.anonymize import Anonymizer
from kvtop.session.format import storage_error
from kvtop.session.reader import SessionReader
from kvtop.session.text import cell
from kvtop.session.writer import SessionWriter

_GROUP = 10_000
"""Rows of a Parquet row group."""


def csv_text(
    reader: SessionReader, table: str, anonymizer: Anonymizer | None = None
) -> Iterator[str]:
    """One table as CSV lines, units in the column names, empty for unknown."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    header = [name for name, _ in tables.columns(reader, table)]
    writer.writerow(header)
    for row in tables.rows(reader, table, anonymizer):
        writer.writerow(
            [
                _cell(value, name) if isinstance(value, str) else value
                for name, value in zip(header, row, strict=True)
            ]
        )
        if buffer.tell() > 65_536:
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()


def _cell(text: str, column: str) -> str:
    """A text; folded stacks are the only ones that stay several lines."""
    if column == tables.STACKS:
        return "\n".join(cell(line) for line in text.split("\n"))
    return cell(text)


def json_text(
    reader: SessionReader, table: str | None, anonymizer: Anonymizer | None = None
) -> Iterator[str]:
    """JSON lines: one object a row of a table, or one snapshot a line without a table."""
    if table is None:
        for snapshot in reader.snapshots():
            shown = anonymizer.snapshot(snapshot) if anonymizer else snapshot
            yield json.dumps(to_json(shown), separators=(",", ":"), allow_nan=False) + "\n"
        return
    names = [name for name, _ in tables.columns(reader, table)]
    for row in tables.rows(reader, table, anonymizer):
        yield json.dumps(dict(zip(names, row, strict=True)), allow_nan=False) + "\n"


def parquet(
    reader: SessionReader, table: str, out: Path, anonymizer: Anonymizer | None = None
) -> int:
    """One table as a Parquet file.

    Returns:
        Rows written.

    Raises:
        UsageError: pyarrow is not installed, or the file is already there.
        StorageError: It cannot be written.
    """
    try:
        arrow: Any = importlib.import_module("pyarrow")
        arrow_parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError(
            "Parquet needs pyarrow, which is not installed",
            "pip install 'vllm-kvtop[parquet]'",
        ) from None
    kinds = {"REAL": arrow.float64(), "INTEGER": arrow.int64(), "TEXT": arrow.string()}
    described = tables.columns(reader, table)
    schema = arrow.schema([(name, kinds[kind]) for name, kind in described])
    source = tables.rows(reader, table, anonymizer)
    total = 0
    refuse_existing(out)
    try:
        with arrow_parquet.ParquetWriter(str(out), schema) as writer:
            while part := list(islice(source, _GROUP)):
                values = [
                    arrow.array(list(column), type=schema.field(index).type, from_pandas=True)
                    for index, column in enumerate(zip(*part, strict=True))
                ]
                writer.write_table(arrow.table(values, schema=schema))
                total += len(part)
    except OSError as error:
        raise storage_error(out, error) from None
    return total


def session(reader: SessionReader, out: Path, anonymizer: Anonymizer | None = None) -> int:
    """A new session file with the same snapshots, markers, block tables and stacks.

    Args:
        reader: The file.
        out: The new file.
        anonymizer: Applied to every snapshot: nothing of the original names is in the new
            file. None: as recorded.

    Returns:
        Ticks written.

    Raises:
        UsageError: The file is already there.
        StorageError: It cannot be written; what was written is taken away.
    """
    anonymized = anonymizer is not None or reader.info.anonymized
    writer = SessionWriter(out, reader.info.interval_s, anonymized=anonymized)
    markers, captures = reader.markers(), reader.captures()
    try:
        for tick in range(reader.first_tick, reader.last_tick + 1):
            snapshot = reader.load(tick)
            writer.write(anonymizer.snapshot(snapshot) if anonymizer else snapshot)
            while markers and markers[0].tick <= tick:
                marker = markers.pop(0)
                note = anonymizer.text(marker.note) if anonymizer else marker.note
                writer.marker(marker.time_s, note)
            for pid, detail in reader.details(tick - 1, tick):
                if not detail.error:
                    writer.detail(pid, anonymizer.detail(detail) if anonymizer else detail)
            while captures and captures[0].tick <= tick:
                capture = reader.stacks_of(captures.pop(0))
                writer.capture(anonymizer.capture(capture) if anonymizer else capture)
        writer.close(reader.info.closed_reason or "exported")
    except BaseException:
        writer.abandon("export failed")
        out.unlink(missing_ok=True)
        raise
    return writer.ticks


def refuse_existing(path: Path) -> None:
    """Nothing is ever overwritten.

    Raises:
        UsageError: There is a file of that name.
        StorageError: It cannot be looked at.
    """
    try:
        if path.exists() and not path.is_char_device() and not path.is_fifo():
            raise UsageError(f"{path} is already there", "choose another name")
    except OSError as error:
        raise StorageError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def write_text(pieces: Iterator[str], out: Path) -> None:
    """Text into a new file.

    Raises:
        UsageError: The file is already there.
        StorageError: It cannot be written; a part of it may be there.
    """
    refuse_existing(out)
    try:
        with out.open("w", encoding="utf-8", newline="") as file:
            for piece in pieces:
                file.write(piece)
    except OSError as error:
        raise storage_error(out, error) from None
