"""Captured stacks for a report: top functions as a table, and the last ones as a picture."""

from __future__ import annotations

from collections import Counter

from kvtop.errors import BadDataError
from kvtop.flame import svg
from kvtop.flame.capture import counted, shares_note
from kvtop.flame.explain import split
from kvtop.flame.folded import Folded, code_of
from kvtop.flame.record import folded_of
from kvtop.flame.tree import build
from kvtop.model.capture import OK, StackCapture
from kvtop.model.frames import split_frame
from kvtop.session.anonymize import Anonymizer
from kvtop.session.reader import SessionReader
from kvtop.session.summary import CaptureSummary
from kvtop.session.units import utc

MOST = 20
"""Captures listed, the last ones."""
PICTURES = 3
"""Of these, with a picture: each is some hundred kilobytes."""
TOP = 10
"""Functions of each."""
_LEAST_PIXELS = 1.5


def captures_of(reader: SessionReader, anonymizer: Anonymizer | None) -> list[CaptureSummary]:
    """What a report says of the captures of a session, in their order.

    Raises:
        BadDataError: They are damaged.
    """
    found = reader.captures()[-MOST:]
    taken = [capture for capture in found if capture.outcome == OK]
    out = []
    for capture in found:
        full = reader.stacks_of(capture)
        full = anonymizer.capture(full) if anonymizer else full
        out.append(_summary(full, picture=capture in taken[-PICTURES:]))
    return out


def _summary(capture: StackCapture, picture: bool) -> CaptureSummary:
    title = f"pid {capture.pid}, {utc(capture.time_s)}"
    if capture.why:
        title += f", for {capture.why}"
    try:
        folded = folded_of(capture, title) if capture.folded else None
    except BadDataError:
        folded = None
    if folded is None:
        return CaptureSummary(title, f"no stacks: {capture.outcome}")
    idle, gil = (word in capture.mode.split(", ") for word in ("idle", "gil"))
    note = (
        f"{capture.samples:,} samples in {capture.seconds:.0f} s, {counted(idle=idle, gil=gil)}"
        f" (up to {capture.seconds * capture.rate_hz:,.0f} looks, {capture.rate_hz} a second),"
        f" {capture.mode}"
    )
    if capture.errors:
        note += f", {capture.errors:,} unreadable"
    if capture.left_out:
        note += f", {capture.left_out:,} rare stacks left out"
    note += shares_note(idle=idle, gil=gil)
    shares = ", ".join(f"{name} {share:.0f} %" for name, share in split(folded).items())
    image = svg.write(build(folded), title, "", _LEAST_PIXELS) if picture else ""
    # Inside HTML it is no document of its own.
    return CaptureSummary(title, note, shares, _top(folded), image.partition("?>")[2].strip())


def _top(folded: Folded) -> list[tuple[str, str, float, float]]:
    """Function, place, and shares of samples with it on top and anywhere, 0-100."""
    own: Counter[str] = Counter()
    anywhere: Counter[str] = Counter()
    total = 0
    for frames, count in folded.stacks:
        code = code_of(frames)
        total += count
        if code:
            own[code[-1]] += count
            for label in set(code):
                anywhere[label] += count
    rows = []
    for label, count in own.most_common(TOP):
        function, file, line = split_frame(label)
        place = file if line is None else f"{file}:{line}"
        rows.append((function, place, 100.0 * count / total, 100.0 * anywhere[label] / total))
    return rows
