"""The top-frames panel: what the engine's Python is doing, by py-spy."""

from __future__ import annotations

from kvtop.draw.numbers import count, duration, percent, rate, short
from kvtop.draw.pick import engine_of, greyed, is_old, now, old_line, source_of, why
from kvtop.draw.text import Field, block, cell_width, clip, fields, pad, safe, wrap
from kvtop.draw.view import Line, View
from kvtop.model.history import engine_key
from kvtop.model.snapshot import Engine, Frame, Snapshot, SourceState, Stacks

ROLES = {"engine": "EngineCore", "worker": "Worker", "api": "API server"}


def roles_of(engine: Engine | None) -> dict[int, str]:
    """The processes of an engine and their roles: engine core, workers, API servers."""
    if engine is None:
        return {}
    roles = {} if engine.pid is None else {engine.pid: "engine"}
    for role, pids in (("worker", engine.worker_pids), ("api", engine.api_pids)):
        for pid in pids:
            roles.setdefault(pid, role)
    return roles


def processes_of(engine: Engine | None, role: str) -> list[int]:
    """The processes of an engine whose frames are shown.

    Args:
        engine: The engine. None: no processes.
        role: Only those of this role. Empty, or one that none of them has: all.
    """
    roles = roles_of(engine)
    return [pid for pid in roles if roles[pid] == role] or list(roles)


def _of_engine(snap: Snapshot, view: View) -> list[Stacks]:
    pids = processes_of(engine_of(snap, view), view.stacks_role)
    return sorted(
        (stacks for stacks in snap.stacks if stacks.pid in pids),
        key=lambda stacks: pids.index(stacks.pid),
    )


def title(snap: Snapshot, view: View, width: int) -> str:
    """`Top frames  EngineCore 4740  py-spy 2 Hz  0.9% of a core  and 2 more`."""
    parts: list[Field] = [(0, (("Top frames", ""),))]
    found = _of_engine(snap, view)
    if found and view.stacks_on:
        role = safe(ROLES.get(found[0].role, found[0].role), view.ascii)
        parts.append((1, ((f"{role} {found[0].pid}", ""),)))
        parts.append((2, ((f"py-spy {_hertz(found[0].rate_hz)}", ""),)))
        cost = _cost_percent(found)
        if cost is not None:
            parts.append((4, ((f"{cost:.1f}% of a core", ""),)))
        if len(found) > 1:
            parts.append((3, ((f"and {len(found) - 1} more", ""),)))
    return clip("".join(text for text, _ in fields(parts, width)), width, view.ascii)


def _hertz(value: float) -> str:
    """Samples a second: `0.9 Hz`."""
    return f"{value:.1f} Hz" if value < 10 else f"{short(value)} Hz"


def _cost_percent(found: list[Stacks]) -> float | None:
    """CPU time that sampling these processes takes, percent of a core. None: not measured."""
    known = [s.cost_ms * s.rate_hz / 10.0 for s in found if s.cost_ms is not None and s.rate_hz]
    return sum(known) if known else None


def stacks_panel(snap: Snapshot, view: View, width: int, height: int) -> list[Line]:
    """The frames of the engine's processes, the hottest first; or why there are none."""
    if not view.stacks_on:
        return block([(("hidden, not sampling", "dim"),)], width, height)
    found = _of_engine(snap, view)
    source = source_of(snap, "stacks", engine_of(snap, view))
    # A process that only waits says nothing while another one works.
    shown = [stacks for stacks in found if not stacks.stalled] or found
    frames = [(stacks, frame) for stacks in shown for frame in stacks.frames]
    if not frames:
        return block(_none(snap, view, width, bool(found)), width, height)
    frames.sort(key=lambda pair: (-_rank(pair[1].self_percent), -_rank(pair[1].total_percent)))
    lines: list[Line] = []
    old = is_old(source)
    if old:
        lines.append(((clip(old_line(source, snap, view), width, view.ascii), "warn"),))
    lines += _balance(found, shown, snap, view, width)[: max(height - len(lines) - 3, 0)]
    lines.append(_heads(width))
    start = len(lines)
    offset = view.scroll.get("stacks", 0)
    room = max(height - start, 0)
    offset = max(0, min(offset, len(frames) - room))
    for stacks, frame in frames[offset : offset + room]:
        role = "" if len(shown) == 1 else f"{ROLES.get(stacks.role, stacks.role)} {stacks.pid}"
        lines.append(_row(frame, role, width, view.ascii))
    if old:
        lines = [lines[0], *greyed(lines[1:])]
    if len(lines) < height:
        lines.append(fields(_account(found, snap, view), width, ", "))
    return block(lines, width, height)


def _account(found: list[Stacks], snap: Snapshot, view: View) -> list[Field]:
    """How much the panel stands on."""
    of = f" of {len(found)} processes" if len(found) > 1 else ""
    total = sum(stacks.samples for stacks in found)
    window = duration(max(stacks.window_s for stacks in found))
    age = duration(now(snap, view) - max(stacks.time_s for stacks in found))
    parts: list[Field] = [
        (0, ((f"{count(total)} samples{of} in {window}", "dim"),)),
        (1, ((f"newest {age} ago", "dim"),)),
    ]
    unread = sum(stacks.unread for stacks in found)
    if unread:
        parts.append((2, ((f"{count(unread)} more could not be read", "dim"),)))
    return parts


def _rank(value: float) -> float:
    # NaN would leave the order undefined.
    return value if value == value else -1.0  # noqa: PLR0124 - only NaN differs from itself


def _balance(
    found: list[Stacks], shown: list[Stacks], snap: Snapshot, view: View, width: int
) -> list[Line]:
    """What the time goes into, and what really happens to blocks: two lines, or one wide one."""
    parts: list[Field] = []
    if all(stacks.stalled for stacks in found):
        parts.append((0, (("nothing runs; it waits here", "label"),)))
    elif shown[0].split:
        if len(shown) > 1:
            parts.append((0, ((ROLES.get(shown[0].role, shown[0].role), "label"),)))
        shares = sorted(shown[0].split.items(), key=lambda item: (-item[1], item[0]))
        parts += [
            (at, ((f" {name} {percent(share)} ", f"flame.{name}"),))
            for at, (name, share) in enumerate(shares, 1)
        ]
    rates = _rates(snap, view)
    if not rates:
        return [fields(parts, width, " ")] if parts else []
    counted: list[Field] = [
        (at, ((f"{name} ", "label"), (rate(value), "value")))
        for at, (name, value) in enumerate(rates)
    ]
    sizes = [sum(cell_width(text) for text, _ in line) for _, line in (*parts, *counted)]
    if parts and sum(sizes) + len(sizes) + 4 <= width:
        between: Line = (("   ", ""),)
        return [(*fields(parts, width, " "), *between, *fields(counted, width, " "))]
    lines = [fields(parts, width, " ")] if parts else []
    return [*lines, fields(counted, width)]


_SERIES = (
    ("alloc", "alloc_s"),
    ("free", "freed_s"),
    ("touch", "touched_s"),
    ("evict", "evicted_s"),
)
_POINTS = 10
"""Newest points that a rate is the mean of; one point alone jumps too much to be compared."""


def _rates(snap: Snapshot, view: View) -> list[tuple[str, float | None]]:
    """Blocks a second by the probe's counters; empty where there is no probe to count."""
    engine = engine_of(snap, view)
    if view.history is None or engine is None or engine.counters is None:
        return []
    out: list[tuple[str, float | None]] = []
    for name, column in _SERIES:
        times, values = view.history.series(engine_key(engine), column)
        times, values = times[-_POINTS - 1 :], values[-_POINTS - 1 :]
        known = [
            (value, max(end - begin, 0.0))
            for begin, end, value in zip(times[:-1], times[1:], values[1:], strict=True)
            if value is not None
        ]
        # Points are not equally far apart on a busy machine.
        span = sum(seconds for _, seconds in known)
        total = sum(value * seconds for value, seconds in known)
        out.append((name, total / span if span > 0 else None))
    return out


def _none(snap: Snapshot, view: View, width: int, sampled: bool) -> list[Line]:
    source = source_of(snap, "stacks", engine_of(snap, view))
    reason = why(source, view.ascii)
    if reason and source is not None and source.state is not SourceState.OK:
        style = "dim" if source.state is SourceState.STARTING else "warn"
        return [((line, style),) for line in wrap(f"No frames: {reason}", width)]
    if sampled:
        text = "no Python frame was running in the last window"
    elif source is not None and source.state is SourceState.OFF:
        text = "not sampling"
    else:
        text = "collecting"
    return [((line, "dim"),) for line in wrap(text, width)]


def _heads(width: int) -> Line:
    return fields(
        [(0, (("SELF", "table.head"),)), (2, ((" TOTAL FUNCTION", "table.head"),))], width
    )


def _row(frame: Frame, role: str, width: int, ascii: bool) -> Line:  # noqa: A002 - the option
    parts: list[Field] = [(0, ((pad(percent(frame.self_percent), 4, True), "value"),))]
    if width >= 20:
        parts.append((1, ((pad(percent(frame.total_percent), 5, True), ""),)))
    room = width - sum(len(runs[0][0]) + 1 for _, runs in parts)
    place = safe(frame.file, ascii) + (f":{frame.line}" if frame.line is not None else "")
    function = safe(frame.function, ascii)
    # The function matters most; the place is cut before it.
    name = clip(function, room, ascii)
    if room > 0:
        parts.append((2, ((name, ""),)))
    rest = clip(place, room - len(name) - 1, ascii)
    if rest and room - len(name) - 1 >= 6:
        parts.append((3, ((rest, "label"),)))
        extra = " ".join(part for part in (role, safe(frame.thread, ascii)) if part)
        left = room - len(name) - len(rest) - 2
        if left >= 4 and extra:
            parts.append((4, ((clip(extra, left, ascii), "dim"),)))
    return fields(parts, width, " ")
