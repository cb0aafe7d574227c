"""What of a snapshot is on screen: the chosen engine and GPU, and their sources."""

from __future__ import annotations

from collections.abc import Iterable

from kvtop.draw.numbers import duration
from kvtop.draw.text import safe
from kvtop.draw.view import Line, View
from kvtop.model.snapshot import Engine, Gpu, Snapshot, SourceState, SourceStatus

RANK = {
    SourceState.FAILED: 0,
    SourceState.STALE: 1,
    SourceState.STARTING: 2,
    SourceState.OFF: 3,
    SourceState.OK: 4,
}
"""The worst state first."""


def engine_of(snap: Snapshot, view: View) -> Engine | None:
    """The engine on screen. None: none found."""
    return snap.engines[view.engine % len(snap.engines)] if snap.engines else None


def gpu_of(snap: Snapshot, view: View) -> Gpu | None:
    """The GPU on screen. None: none can be read."""
    return snap.gpus[view.gpu % len(snap.gpus)] if snap.gpus else None


def now(snap: Snapshot, view: View) -> float:
    """The moment that ages are taken against, Unix seconds."""
    return view.now_s or snap.time_s


def source_of(snap: Snapshot, kind: str, engine: Engine | None = None) -> SourceStatus | None:
    """The status of a kind of source, the worst one if there are several.

    Args:
        snap: All sources.
        kind: See `SourceStatus.kind`.
        engine: Only sources that look at this engine. Its processes are known by pid,
            its /metrics page by the server in the name of the source.
    """
    found = [source for source in snap.sources if source.kind == kind]
    if engine is not None:
        pids = {engine.pid, *engine.api_pids, *engine.worker_pids} - {None}
        mine = [
            source
            for source in found
            if source.target_pid in pids
            or (source.target_pid is None and source.name.endswith(" " + engine.server))
        ]
        if mine or kind in ("engine", "metrics"):
            found = mine
    return min(found, key=lambda source: RANK[source.state], default=None)


def is_old(source: SourceStatus | None) -> bool:
    """Whether the values of a source are older than they should be."""
    return source is not None and source.state in (SourceState.FAILED, SourceState.STALE)


def why(source: SourceStatus | None, ascii: bool = False) -> str:  # noqa: A002 - the option
    """Reason and remedy of a source in plain words; empty when it gives none."""
    if source is None:
        return ""
    return "; ".join(safe(part, ascii) for part in (source.reason, source.remedy) if part)


def old_line(source: SourceStatus | None, snap: Snapshot, view: View) -> str:
    """One line that says how old the values on screen are, and why. Empty: they are not."""
    if source is None or not is_old(source):
        return ""
    word = "STALE" if source.state is SourceState.STALE else "FAILED"
    if source.value_time_s is None:
        age = "no value yet"
    else:
        age = f"values {duration(now(snap, view) - source.value_time_s)} old"
    reason = why(source, view.ascii)
    return f"{word} {age}: {reason}" if reason else f"{word} {age}"


def greyed(lines: Iterable[Line]) -> list[Line]:
    """Lines in grey; the cursor stays, and the block map, which says nothing in grey."""
    return [
        tuple(
            (text, style if style.startswith(("map:", "cursor")) else "dim") for text, style in line
        )
        for line in lines
    ]
