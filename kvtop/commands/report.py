"""`kvtop report`: what happened in a session, as one HTML file or Markdown."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvtop.commands.files import opened
from kvtop.commands.report_stacks import captures_of
from kvtop.errors import ExitCode, UsageError
from kvtop.session import export, tables
from kvtop.session.report import html_report, markdown_report
from kvtop.session.summary import gather


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvtop report`."""
    parser.add_argument("file", metavar="FILE", help="a session file; - is standard input")
    parser.add_argument("--html", metavar="OUT", help="one self-contained HTML file")
    parser.add_argument(
        "--md", nargs="?", const="-", metavar="OUT", help="Markdown (standard output)"
    )
    parser.add_argument(
        "--anonymize",
        action="store_true",
        help="replace request ids, model names, hosts, users, paths everywhere",
    )


def run(parsed: argparse.Namespace) -> int:
    """Write the report; Markdown to standard output when no form is asked for.

    Raises:
        UsageError: The output is already there.
        NotFoundError, DeniedError, BadDataError: The file cannot be read.
        StorageError: The output cannot be written.
    """
    markdown = parsed.md or (None if parsed.html else "-")
    for name in (parsed.html, markdown):
        if name and name != "-":
            export.refuse_existing(Path(name))
    if parsed.html == "-" and markdown == "-":
        raise UsageError("both forms cannot go to standard output", "give one of them a file")
    from kvtop.config import load
    from kvtop.detect.judge import Judge
    from kvtop.detect.thresholds import apply_overrides

    judge = Judge(apply_overrides(load({}).findings)).judge
    with opened(parsed.file) as reader:
        anonymizer = tables.warm_anonymizer(reader) if parsed.anonymize else None
        summary = gather(reader, judge, anonymizer)
        summary.captures = captures_of(reader, anonymizer)
    if parsed.html:
        _write(html_report(summary), parsed.html)
    if markdown:
        _write(markdown_report(summary), markdown)
    return ExitCode.OK


def _write(text: str, name: str) -> None:
    if name == "-":
        sys.stdout.write(text)
    else:
        export.write_text(iter([text]), Path(name))
