"""What has changed since a moment that the user pinned."""

from __future__ import annotations

from kvtop.draw.numbers import clock, count
from kvtop.draw.style import state_style
from kvtop.draw.text import Field, fields
from kvtop.draw.view import Line, View
from kvtop.model.blocks import BlockState
from kvtop.model.history import engine_key
from kvtop.model.snapshot import Engine, Snapshot

_STATES = (
    (BlockState.GHOST, "ghost", 1),
    (BlockState.HELD, "held", 2),
    (BlockState.USED, "used", 3),
    (BlockState.SHARED, "shared", 5),
    (BlockState.CACHED, "cached", 4),
    (BlockState.FREE, "free", 3),
)


def baseline_line(snap: Snapshot, engine: Engine, view: View, width: int) -> Line:
    """`since 12:04:51  ghost +3  used +214`; empty where no moment is pinned.

    Args:
        snap: What is on screen; in a replay it may be earlier than the pinned moment.
        engine: The engine on screen.
        view: Its `baseline`.
        width: Cells.
    """
    base = view.baseline
    if base is None:
        return ()
    word = "since" if snap.time_s >= base.time_s else "before"
    parts: list[Field] = [(0, ((f"{word} {clock(base.time_s)}", "key"),))]
    before, counts = base.counts.get(engine_key(engine)), engine.blocks
    if before is None or counts is None:
        text = "this engine was not known then" if before is None else "no block counts now"
        parts.append((1, ((text, "dim"),)))
        return fields(parts, width)
    changes = [(s, n, i, getattr(counts, n) - getattr(before, n)) for s, n, i in _STATES]
    for state, name, importance, change in changes:
        if change:
            sign = "+" if change > 0 else ""
            parts.append(
                (
                    importance,
                    ((f"{name} ", "label"), (f"{sign}{count(change)}", state_style(state))),
                )
            )
    if not any(change for *_, change in changes):
        parts.append((1, (("no difference", "dim"),)))
    return fields(parts, width)
