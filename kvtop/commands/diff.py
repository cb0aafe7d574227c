"""`kvtop diff`: two moments of one session, or of two, side by side."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kvtop.commands.files import opened
from kvtop.errors import ExitCode, UsageError
from kvtop.model.snapshot import Snapshot
from kvtop.session.diff import Change, difference
from kvtop.session.text import plain
from kvtop.session.units import Span, parse_moment_within, utc


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvtop diff`."""
    parser.add_argument(
        "first",
        metavar="FILE[@MOMENT]",
        help="a session file; the moment is 12:04:51, 50%%, +90s or -30s",
    )
    parser.add_argument(
        "second",
        metavar="FILE[@MOMENT]",
        nargs="?",
        help="another, or another moment of it (default: the end of the first file)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(parsed: argparse.Namespace) -> int:
    """Print what differs.

    Raises:
        UsageError: A wrong moment.
        NotFoundError, DeniedError, BadDataError: A file cannot be read.
    """
    file, moment = _split(parsed.first)
    if parsed.second is None:
        before, after = _load(file, moment or "0%"), _load(file, "100%")
    else:
        other, other_moment = _split(parsed.second)
        if file == other and moment is None and other_moment is None:
            raise UsageError("these are the same moment", "write for example FILE@10% FILE@90%")
        before, after = _load(file, moment or "100%"), _load(other, other_moment or "100%")
    changes = difference(before, after)
    if parsed.json:
        print(json.dumps(_as_json(before, after, changes), allow_nan=False))
    else:
        print("\n".join(_as_text(before, after, changes)))
    return ExitCode.OK


def _split(word: str) -> tuple[str, str | None]:
    if Path(word).exists() or "@" not in word:
        return word, None
    file, _, moment = word.rpartition("@")
    return file, moment


def _load(file: str, moment: str) -> Snapshot:
    if file == "-":
        raise UsageError("a difference needs files", "standard input cannot be read twice")
    with opened(file) as reader:
        return reader.snapshot_at(parse_moment_within(moment, Span(reader.first_s, reader.last_s)))


def _as_json(before: Snapshot, after: Snapshot, changes: list[Change]) -> dict[str, object]:
    return {
        "before": before.time_s,
        "after": after.time_s,
        "changes": [
            {
                "subject": change.subject,
                "name": change.name,
                "before": change.before,
                "after": change.after,
                "change": change.change,
            }
            for change in changes
        ],
    }


def _as_text(before: Snapshot, after: Snapshot, changes: list[Change]) -> list[str]:
    lines = [f"before  {utc(before.time_s)}", f"after   {utc(after.time_s)}"]
    if not changes:
        return [*lines, "nothing differs"]
    rows = [("", "", "before", "after", "change")]
    rows += [
        (
            plain(change.subject),
            change.name,
            _number(change.before),
            _number(change.after),
            _number(change.change, sign=True),
        )
        for change in changes
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for row in rows:
        names = "  ".join(cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False))
        values = "  ".join(
            cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)
        )
        lines.append(f"{names}  {values}".rstrip())
    return lines


def _number(value: float | None, sign: bool = False) -> str:
    if value is None:
        return "-"
    style = "+," if sign else ","
    return f"{value:{style}.0f}" if value == int(value) else f"{value:{style}.2f}"
