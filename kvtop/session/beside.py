"""What is recorded beside the ticks: markers, block tables, captured stacks.

Rows of `marker_note`, `detail` and `flame_capture`, to the file and back.
"""

from __future__ import annotations

import json
import math
import sqlite3
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvtop.errors import BadDataError
from kvtop.model.capture import StackCapture
from kvtop.model.detail import Detail
from kvtop.session import cells, delta

MAX_FOLDED_BYTES = 64 * 2**20
"""Stacks that unpack to more are refused."""
MAX_DETAIL_BYTES = 16 * 2**20
"""So are block tables."""
CAPTURE_COLUMNS = (
    "tick, time_us, pid, pids, seconds, rate_hz, mode, why, outcome, samples, errors, left_out"
)
"""Columns of `flame_capture` that `capture_from` reads, before the stacks."""


def write_marker(db: sqlite3.Connection, tick: int, time_s: float, note: str) -> None:
    """Store a marker."""
    db.execute(
        "INSERT INTO marker_note(tick, time_us, note) VALUES (?, ?, ?)",
        (tick, cells.us(time_s), cells.text(note)),
    )


def write_detail(db: sqlite3.Connection, tick: int, engine_pid: int | None, detail: Detail) -> None:
    """Store the block table of a request."""
    text = json.dumps(
        {
            "step": detail.step,
            "tables": detail.tables,
            "refs": detail.refs,
            "shared_with": {str(k): list(v) for k, v in detail.shared_with.items()},
        },
        separators=(",", ":"),
    )
    db.execute(
        "INSERT INTO detail VALUES (?, ?, ?, ?)",
        (tick, engine_pid, cells.text(detail.request_id), delta.deflate(text.encode("ascii"))),
    )


def read_detail(request_id: str, packed: object) -> Detail:
    """The block table of a request; one with `error` when it is damaged.

    Args:
        request_id: Whose it is.
        packed: As stored: text in files of format 1, raw deflate of it since.
    """
    try:
        if isinstance(packed, bytes):
            packed = delta.inflate_raw(packed, b"", MAX_DETAIL_BYTES)
        data = json.loads(packed)  # type: ignore[arg-type]
        return Detail(
            request_id,
            step=int(data["step"]),
            tables=tuple((g, size, tuple(blocks)) for g, size, blocks in data["tables"]),
            refs=tuple(tuple(refs) for refs in data["refs"]),
            shared_with={int(k): tuple(v) for k, v in data["shared_with"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Detail(request_id, error="its block table in the file is damaged")


def write_capture(db: sqlite3.Connection, tick: int, capture: StackCapture) -> None:
    """Store captured stacks at a tick."""
    folded = capture.folded.encode("utf-8", "backslashreplace")
    row = (
        tick,
        cells.us(capture.time_s),
        capture.pid,
        " ".join(map(str, capture.pids)),
        capture.seconds,
        capture.rate_hz,
        capture.mode,
        capture.why,
        capture.outcome,
        capture.samples,
        capture.errors,
        capture.left_out,
        zlib.compress(folded, 6) if folded else None,
    )
    marks = ", ".join("?" * len(row))
    db.execute(
        f"INSERT INTO flame_capture({CAPTURE_COLUMNS}, folded) VALUES ({marks})",  # noqa: S608
        tuple(cells.sql(value) for value in row),
    )


def capture_from(row: Sequence[Any]) -> StackCapture:
    """A capture of a row of `CAPTURE_COLUMNS`, without its stacks.

    Raises:
        ValueError, TypeError: It is damaged.
    """
    tick, time_us, pid, pids, seconds, rate, mode, why, outcome, samples, errors, left = row
    if not isinstance(time_us, int):  # SQLite keeps any number in any column.
        raise TypeError("its time is no whole number")
    if not math.isfinite(float(seconds)):
        raise ValueError("its length is no number")
    return StackCapture(
        time_s=time_us / 1e6,
        pid=int(pid),
        pids=tuple(int(part) for part in str(pids).split()),
        seconds=float(seconds),
        rate_hz=int(rate),
        mode=str(mode),
        why=str(why),
        outcome=str(outcome),
        samples=int(samples),
        errors=int(errors),
        left_out=int(left),
        tick=int(tick),
    )


def with_stacks(capture: StackCapture, packed: object) -> StackCapture:
    """A capture with the stacks of column `folded`.

    Raises:
        BadDataError: They are damaged.
    """
    return replace(capture, folded=unpack_stacks(packed))


def unpack_stacks(packed: object) -> str:
    """The text of column `folded`; empty for a capture without stacks.

    Raises:
        BadDataError: It is damaged.
    """
    if packed is None:
        return ""
    if not isinstance(packed, bytes):
        raise BadDataError("its stacks are no bytes")
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(packed, MAX_FOLDED_BYTES)
    except zlib.error as error:
        raise BadDataError(f"its stacks cannot be unpacked: {error}") from None
    if not unpacker.eof:
        raise BadDataError("its stacks are cut short, or far too many")
    return text.decode("utf-8", "backslashreplace")
