"""`kvtop export`: a session file in forms that other tools read."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from kvtop.commands.files import opened
from kvtop.errors import ExitCode, UsageError
from kvtop.session import export, perfetto, tables
from kvtop.session.anonymize import Anonymizer
from kvtop.session.reader import SessionReader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvtop export`."""
    parser.add_argument("file", metavar="FILE", help="a session file; - is standard input")
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument("--csv", action="store_true", help="one table, units in the column names")
    form.add_argument(
        "--json", action="store_true", help="a line a row of a table, or a line a snapshot"
    )
    form.add_argument("--parquet", action="store_true", help="one table; needs pyarrow and -o")
    form.add_argument(
        "--perfetto", action="store_true", help="a trace for ui.perfetto.dev, as JSON"
    )
    form.add_argument(
        "--session", action="store_true", help="a new session file, with --anonymize; needs -o"
    )
    parser.add_argument(
        "--table",
        metavar="NAME",
        help=f"{', '.join(tables.table_names())} (default for CSV and Parquet: engine)",
    )
    parser.add_argument(
        "--anonymize",
        action="store_true",
        help="replace request ids, model names, hosts, users, paths everywhere",
    )
    parser.add_argument("-o", "--output", metavar="OUT", help="a new file (standard output)")


def run(parsed: argparse.Namespace) -> int:
    """Write the session in another form.

    Raises:
        UsageError: A wrong option, or the output is already there.
        NotFoundError, DeniedError, BadDataError: The file cannot be read.
        StorageError: The output cannot be written.
    """
    if (parsed.parquet or parsed.session) and not parsed.output:
        raise UsageError("this form is not text", "say where to with -o OUT")
    if parsed.table and (parsed.perfetto or parsed.session):
        raise UsageError("--table does not go with this form", "it always holds everything")
    with opened(parsed.file) as reader:
        anonymizer = tables.warm_anonymizer(reader) if parsed.anonymize else None
        table = parsed.table or "engine"
        if parsed.table:
            tables.columns(reader, table)
        if parsed.parquet:
            export.parquet(reader, table, Path(parsed.output), anonymizer)
        elif parsed.session:
            export.session(reader, Path(parsed.output), anonymizer)
        else:
            _text(_pieces(parsed, reader, table, anonymizer), parsed.output)
    return ExitCode.OK


def _pieces(
    parsed: argparse.Namespace, reader: SessionReader, table: str, anonymizer: Anonymizer | None
) -> Iterator[str]:
    if parsed.csv:
        return export.csv_text(reader, table, anonymizer)
    if parsed.json:
        return export.json_text(reader, parsed.table, anonymizer)
    return perfetto.trace_text(reader, anonymizer)


def _text(pieces: Iterator[str], output: str | None) -> None:
    if output:
        export.write_text(pieces, Path(output))
        return
    for piece in pieces:
        sys.stdout.write(piece)
