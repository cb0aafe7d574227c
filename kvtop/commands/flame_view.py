"""`kvtop flame --view`: the viewer on a file; without a terminal, the graph as text."""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from kvtop.draw.icicle import IcicleView, icicle, levels
from kvtop.draw.text import safe
from kvtop.errors import BadDataError, ExitCode
from kvtop.flame import files
from kvtop.flame.difference import diff
from kvtop.flame.folded import Folded
from kvtop.flame.tree import build
from kvtop.model.capture import OK
from kvtop.model.detail import Detail
from kvtop.model.snapshot import Engine, Snapshot
from kvtop.session.units import utc

_TEXT_WIDTH = 100
_TEXT_ROWS = 60


def run(parsed: argparse.Namespace) -> int:
    """Show a file.

    Raises:
        NotFoundError, StorageError, BadDataError: A file cannot be read.
    """
    new = _load(parsed.view)
    old = _load(parsed.against) if parsed.against else None
    for name, folded in ((parsed.view, new), (parsed.against, old)):
        if folded is not None and folded.skipped:
            text = f"{folded.skipped:,} lines of {name} are no stacks and were left out"
            print(f"kvtop: {safe(text)}", file=sys.stderr)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        width = shutil.get_terminal_size((_TEXT_WIDTH, 24)).columns if sys.stdout.isatty() else 0
        print(as_text(new, old, width or _TEXT_WIDTH, bool(parsed.ascii)))
        return ExitCode.OK
    return _show(new, old, bool(parsed.ascii))


def _load(name: str) -> Folded:
    """Stacks of a file; of a recorded session the last that were captured."""
    try:
        with Path(name).open("rb") as file:
            session = file.read(16) == b"SQLite format 3\0"
    except OSError:
        session = False
    if not session:
        return files.load(Path(name))
    from kvtop.commands.files import opened
    from kvtop.flame.record import folded_of

    with opened(name) as reader:
        kept = [capture for capture in reader.captures() if capture.outcome == OK]
        if not kept:
            raise BadDataError(f"no flame graph was recorded in {name}", "see kvtop replay")
        title = f"{reader.info.host} pid {kept[-1].pid} {utc(kept[-1].time_s)}"
        return folded_of(reader.stacks_of(kept[-1]), title)


def as_text(new: Folded, old: Folded | None, width: int, ascii_only: bool) -> str:
    """The graph as plain text, as deep as it is, up to 60 rows."""
    view = IcicleView(title=new.title, ascii=ascii_only)
    if old is not None:
        found = diff(old, new)
        tree = found.tree
        view = IcicleView(title=new.title, ascii=ascii_only, change=found.change)
    else:
        tree = build(new)
    rows = max(len(levels(tree, view, width, _TEXT_ROWS)), 3)
    # The last line is the keys.
    lines = icicle(tree, view, width, rows + 4)[:-1]
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def _show(new: Folded, old: Folded | None, ascii_only: bool) -> int:
    from dataclasses import replace

    from kvtop.config import load
    from kvtop.ui.start import run as run_ui

    options = replace(load({"ascii": ascii_only or None}), stacks=False)
    return run_ui(options=options, feed=_Nothing(), flame=(new, old))


class _Nothing:
    """A feed without snapshots: there is only a file to look at."""

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        """None, for ever."""
        await asyncio.Event().wait()
        nothing: tuple[Snapshot, ...] = ()
        for snapshot in nothing:
            yield snapshot

    def set_interval(self, seconds: float) -> None:
        """There is none."""

    def set_visible(self, stacks: bool, pids: Sequence[int] = ()) -> None:
        """Nothing is sampled."""

    async def request_detail(self, _engine: Engine, request_id: str) -> Detail:
        """There is no engine."""
        return Detail(request_id, error="no engine")

    async def close(self) -> None:
        """Nothing is open."""
