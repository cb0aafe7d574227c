"""Captures as files: four formats, written whole or not at all; and read back."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from kvtop import __version__
from kvtop.errors import BadDataError, DeniedError, StorageError, UsageError
from kvtop.flame import html, speedscope, svg
from kvtop.flame.capture import Capture, counted, shares_note
from kvtop.flame.folded import Folded, format_folded, parse, read_text
from kvtop.flame.tree import build

FORMATS = {"svg": ".svg", "speedscope": ".speedscope.json", "folded": ".folded", "html": ".html"}
"""Format to file suffix."""


def format_of(path: Path) -> str | None:
    """The format that a file name asks for. None: it does not say."""
    name = path.name.lower()
    if name.endswith((".json", ".speedscope")):
        return "speedscope"
    if name.endswith(".htm"):
        return "html"
    if name.endswith((".txt", ".raw", ".collapsed")):
        return "folded"
    return next((form for form, suffix in FORMATS.items() if name.endswith(suffix)), None)


def default_name(pid: int, time_s: float, form: str, host: str | None = None) -> str:
    """`kvtop-HOST-PID-TIME.svg`, for a moment in Unix seconds; UTC."""
    name = re.sub(r"[^A-Za-z0-9.-]", "_", host or socket.gethostname())[:64] or "host"
    when = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time_s))
    return f"kvtop-{name}-{pid}-{when}{FORMATS[form]}"


def note_of(capture: Capture) -> str:
    """One line about a capture: how many samples of whom, how many were asked for, how taken.

    py-spy counts a sample for each thread that is kept; a look at threads that all wait
    brings none.
    """
    plan = capture.plan
    mode = "blocking" if plan.stops else "non-blocking"
    looks = round(plan.seconds * plan.rate_hz)
    text = f"{capture.samples:,} samples in {capture.seconds:.0f} s,"
    text += f" {counted(idle=plan.idle, gil=plan.gil)}"
    text += f" ({looks:,} looks asked for, {plan.rate_hz} a second), {mode}"
    text += f", {capture.errors:,} unreadable" if capture.errors else ""
    return text + shares_note(idle=plan.idle, gil=plan.gil)


def render(folded: Folded, form: str, note: str = "", hz: float | None = None) -> str:
    """Stacks in a format.

    Raises:
        UsageError: There is no such format.
    """
    if form == "folded":
        return format_folded(folded)
    if form == "speedscope":
        return speedscope.write(folded, folded.title, f"kvtop {__version__}", hz)
    if form == "svg":
        return svg.write(build(folded), folded.title, note)
    if form == "html":
        return html.write(build(folded), folded.title, note)
    raise UsageError(f"unknown format {form!r}", "one of " + ", ".join(FORMATS))


def write_capture(capture: Capture, path: Path, form: str) -> None:
    """Write a capture in a format, whole or not at all.

    Raises:
        StorageError, DeniedError: It cannot be written.
    """
    hz = float(capture.plan.rate_hz)
    write(path, render(capture.folded, form, note_of(capture), hz))


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all; readers never see half of it.

    Raises:
        StorageError, DeniedError: It cannot be written.
    """
    temporary = ""
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", errors="replace", dir=path.parent, prefix=".kvtop-", delete=False
        ) as file:
            temporary = file.name
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        temporary = ""
    except PermissionError:
        raise DeniedError(f"{path} may not be written", "choose another place with -o") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise StorageError(f"{path} cannot be written: {reason}") from None
    finally:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _umask() -> int:
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            return next((int(line.split()[1], 8) for line in file if line[:6] == "Umask:"), 0o077)
    except (OSError, ValueError):
        return 0o077


def load(path: Path) -> Folded:
    """Stacks from a `.folded` or a speedscope file, whichever it is.

    Raises:
        NotFoundError, StorageError: It cannot be read.
        BadDataError: It is neither.
    """
    text = read_text(path)
    try:
        if text[:4096].lstrip("\ufeff \t\r\n").startswith("{"):
            return speedscope.read(text, path.name)
        folded = parse(text, path.name)
    except BadDataError as error:
        raise BadDataError(f"{path}: {error.what}", error.remedy) from None
    if folded.skipped:
        noun = "line" if folded.skipped == 1 else "lines"
        title = f"{path.name}, {folded.skipped:,} {noun} not read"
        folded = replace(folded, title=title)
    return folded


def newest(folder: Path) -> list[Path]:
    """Folded captures in a folder that kvtop has written, the newest last."""
    with contextlib.suppress(OSError):
        found = [path for path in folder.glob("kvtop-*.folded") if path.is_file()]
        return sorted(found, key=lambda path: (path.stat().st_mtime, path.name))
    return []
