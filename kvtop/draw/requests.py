"""The requests table: who holds the blocks.

Column widths are fixed, so that numbers stay in place from frame to frame. On a narrow
screen whole columns go, the least important first; the column sorted by stays. Only
the rows on screen are drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtop.draw.numbers import count, duration, percent, short, size_short
from kvtop.draw.pick import engine_of, greyed, is_old, source_of, why
from kvtop.draw.text import (
    DASH,
    Field,
    block,
    cell_width,
    clip,
    clip_middle,
    fields,
    fit,
    pad,
    safe,
    wrap,
)
from kvtop.draw.view import Line, Run, View
from kvtop.model.snapshot import Engine, Phase, Request, Snapshot

SortKey = float | int | str | None


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table."""

    title: str
    """Its head, and its name in `View.sort`."""
    width: int
    """Cells; for ID and REASON the least."""
    importance: int
    """The largest goes first when the screen is narrow."""
    key: Callable[[Request], SortKey]
    """What it is sorted by; None sorts last either way."""
    text: Callable[[Request], str]
    """What is drawn; from outside, so it is made visible afterwards where needed."""
    right: bool = True
    """Numbers are aligned right."""


_PHASES = {
    phase: at
    for at, phase in enumerate(
        (Phase.HELD, Phase.PREEMPTED, Phase.WAITING, Phase.PREFILL, Phase.DECODE)
    )
}
_GROWING = (("ID", 28), ("REASON", 30), ("ID", 40))
"""Which column takes spare cells, up to which width, one after the other."""


def _hit(request: Request) -> float | None:
    if request.cached_tokens is None or not request.prompt_tokens:
        return None
    return 100.0 * request.cached_tokens / request.prompt_tokens


def reason_text(request: Request) -> str:
    """Why a request waits or is held, or that its client is gone; empty when nothing applies."""
    if request.client == "gone":
        since = request.client_gone_s
        gone = "client gone" if since is None else f"client gone {duration(since)}"
        return f"{gone}, {request.reason}" if request.reason else gone
    if request.phase is Phase.HELD and request.held_s is not None:
        return f"{request.reason or request.status} {duration(request.held_s)}"
    if request.reason:
        return request.reason
    # RUNNING, WAITING and PREEMPTED say no more than the phase does.
    plain = request.status.upper() in ("RUNNING", "WAITING", "PREEMPTED")
    return "" if plain else request.status


TABLE: tuple[Column, ...] = (
    Column("ID", 8, 0, lambda r: r.id, lambda r: r.id, right=False),
    Column("PHASE", 9, 1, lambda r: _PHASES[r.phase], lambda r: r.phase.value, right=False),
    Column("AGE", 6, 3, lambda r: r.age_s, lambda r: duration(r.age_s)),
    Column("PROMPT", 7, 11, lambda r: r.prompt_tokens, lambda r: short(r.prompt_tokens, 7)),
    Column(
        "GEN/MAX",
        11,
        5,
        lambda r: r.output_tokens,
        lambda r: f"{short(r.output_tokens)}/{short(r.max_tokens)}",
    ),
    Column("BLOCKS", 7, 2, lambda r: r.blocks, lambda r: short(r.blocks, 7)),
    Column("SHARED", 7, 8, lambda r: r.shared_blocks, lambda r: short(r.shared_blocks, 7)),
    Column("MEM", 6, 4, lambda r: r.kv_bytes, lambda r: size_short(r.kv_bytes)),
    Column("SLACK", 6, 12, lambda r: r.slack_tokens, lambda r: short(r.slack_tokens, 6)),
    Column("HIT", 5, 9, _hit, lambda r: percent(_hit(r))),
    Column("PREEMPT", 8, 7, lambda r: r.preemptions, lambda r: short(r.preemptions, 8)),
    Column("OWED", 6, 10, lambda r: r.owed_blocks, lambda r: short(r.owed_blocks, 6)),
    Column("PRIO", 5, 13, lambda r: r.priority, lambda r: short(r.priority, 5)),
    Column("LORA", 12, 14, lambda r: r.lora, lambda r: r.lora or DASH, right=False),
    Column("REASON", 16, 6, lambda r: reason_text(r) or None, reason_text, right=False),
)
"""All columns in drawing order."""

COLUMNS = tuple(column.title for column in TABLE)
"""Their titles: what `View.sort` can be."""

_BY_TITLE = {column.title: column for column in TABLE}


def visible_requests(snap: Snapshot, view: View) -> list[Request]:
    """The requests of the engine on screen: filtered by `View.search`, sorted by `View.sort`.

    Unknown values come last whichever way it is sorted; equal ones by id.
    """
    engine = engine_of(snap, view)
    if engine is None or not engine.requests:
        return []
    wanted = view.search.casefold()
    kept = [
        request
        for request in engine.requests
        if not wanted
        or wanted in request.id.casefold()
        or wanted in request.status.casefold()
        or wanted in request.phase.value
    ]
    column = _BY_TITLE.get(view.sort, _BY_TITLE["BLOCKS"])
    kept.sort(key=lambda request: request.id)
    with_key = [(column.key(request), request) for request in kept]
    known = [(key, request) for key, request in with_key if key is not None]
    unknown = [request for key, request in with_key if key is None]
    # One column has keys of one type, so they can be compared.
    known.sort(key=lambda pair: pair[0], reverse=view.reverse)
    return [request for _, request in known] + unknown


def cursor_index(rows: list[Request], view: View) -> int:
    """Row of the cursor; 0 when its request is not there."""
    return next((at for at, row in enumerate(rows) if row.id == view.cursor_id), 0)


def first_row(snap: Snapshot, view: View, height: int) -> int:
    """First request shown in a panel of `height` lines, so that the cursor can be seen.

    The ui keeps it in `View.scroll["requests"]`, else the table jumps when the cursor turns.
    """
    rows = visible_requests(snap, view)
    return _window(len(rows), cursor_index(rows, view), view.scroll.get("requests", 0), height - 1)


def _window(total: int, cursor: int, offset: int, room: int) -> int:
    if room <= 0:
        return cursor
    offset = min(max(offset, cursor - room + 1, 0), cursor)
    return max(min(offset, total - room), 0)


def row_at(snap: Snapshot, view: View, height: int, y: int) -> Request | None:
    """The request drawn on line `y` (0: the column heads) of a panel of `height` lines."""
    if y < 1 or y >= height:
        return None
    rows = visible_requests(snap, view)
    offset = view.scroll.get("requests", 0)
    at = _window(len(rows), cursor_index(rows, view), offset, height - 1) + y - 1
    return rows[at] if at < len(rows) else None


def columns_for(width: int, view: View, engine: Engine | None) -> list[tuple[Column, int]]:
    """The columns that fit, each with its width; ID and REASON share what is left."""
    requests = engine.requests if engine is not None and engine.requests else ()
    hidden = set()
    if all(request.lora is None for request in requests):
        hidden.add("LORA")
    if all(not request.priority for request in requests):
        hidden.add("PRIO")
    kept = [column for column in TABLE if column.title not in hidden or column.title == view.sort]
    total = sum(column.width for column in kept) + len(kept) - 1
    for column in sorted(kept, key=lambda column: -column.importance):
        if total <= width or len(kept) == 1:
            break
        if column.title in ("ID", view.sort):
            continue
        kept.remove(column)
        total -= column.width + 1
    if total > width and len(kept) > 1:
        kept = [_BY_TITLE["ID"]]
        total = _BY_TITLE["ID"].width
    widths = {column.title: min(column.width, width) for column in kept}
    spare = width - total
    for name, most in _GROWING:
        if name in widths and spare > 0:
            more = min(spare, most - widths[name])
            widths[name] += more
            spare -= more
    return [(column, widths[column.title]) for column in kept]


def column_at(snap: Snapshot, view: View, width: int, x: int) -> str | None:
    """Title of the column drawn at cell `x`; for a click on the heads."""
    left = 0
    for column, cells in columns_for(width, view, engine_of(snap, view)):
        if left <= x < left + cells:
            return column.title
        left += cells + 1
    return None


def title(snap: Snapshot, view: View, width: int) -> str:
    """`Requests 31 running  4 waiting  2 preempted  0 held`."""
    engine = engine_of(snap, view)
    parts: list[Field] = [(0, (("Requests", ""),))]
    if engine is not None and engine.requests is not None:
        number = dict.fromkeys(Phase, 0)
        for request in engine.requests:
            number[request.phase] += 1
        running = number[Phase.PREFILL] + number[Phase.DECODE]
        counted = [(1, f"{count(running)} running"), (2, f"{count(number[Phase.WAITING])} waiting")]
        counted.append((3, f"{count(number[Phase.PREEMPTED])} preempted"))
        counted.append((4, f"{count(number[Phase.HELD])} held"))
        gone = sum(1 for request in engine.requests if request.client == "gone")
        if gone:
            counted.append((3, f"{count(gone)} without client"))
        parts += [(importance, ((text, ""),)) for importance, text in counted]
    elif engine is not None and engine.metrics is not None:
        metrics = engine.metrics
        parts.append((1, ((f"{count(metrics.running)} running", ""),)))
        parts.append((2, ((f"{count(metrics.waiting)} waiting", ""),)))
    if view.search:
        found = len(visible_requests(snap, view))
        shown = clip(safe(view.search, view.ascii), 20, view.ascii)
        parts.append((1, ((f"/{shown} {count(found)} found", ""),)))
    head, rest = parts[0], parts[1:]
    line = fields(rest, max(width - 9, 0))
    return clip("".join(text for text, _ in fields([head, (1, line)], width, " ")), width)


def requests_panel(snap: Snapshot, view: View, width: int, height: int) -> list[Line]:
    """The column heads and the requests around the cursor."""
    engine = engine_of(snap, view)
    if engine is None:
        return block([(("no engine yet", "dim"),)], width, height)
    if engine.requests is None:
        reason = safe(engine.probe_reason, view.ascii) or why(
            source_of(snap, "engine", engine), view.ascii
        )
        text = f"No requests to list: {reason or 'the probe has not answered yet'}"
        return block([((line, "warn"),) for line in wrap(text, width)], width, height)
    columns = columns_for(width, view, engine)
    rows = visible_requests(snap, view)
    lines = [_heads(columns, view)]
    if not rows:
        text = f"nothing matches /{safe(view.search, view.ascii)}" if view.search else "no requests"
        lines.append(((clip(text, width, view.ascii), "dim"),))
        return block(lines, width, height)
    cursor = cursor_index(rows, view)
    first = _window(len(rows), cursor, view.scroll.get("requests", 0), height - 1)
    for at, request in enumerate(rows[first : first + max(height - 1, 0)], start=first):
        line = _row(request, columns, view.ascii)
        if at == cursor:
            style = "cursor" if view.focus == "requests" else "cursor.idle"
            line = (("".join(text for text, _ in fit(line, width)), style),)
        lines.append(line)
    if is_old(source_of(snap, "engine", engine)):
        lines = greyed(lines)
    return block(lines, width, height)


def _heads(columns: list[tuple[Column, int]], view: View) -> Line:
    runs: list[Run] = []
    for at, (column, cells) in enumerate(columns):
        text = column.title
        sorted_by = column.title == view.sort
        if sorted_by:
            up, down = ("^", "v") if view.ascii else ("▲", "▼")
            text = text[: cells - 1] + (down if view.reverse else up)
        style = "table.sort" if sorted_by else "table.head"
        runs.append((pad(clip(text, cells, view.ascii), cells, column.right), style))
        if at < len(columns) - 1:
            runs.append((" ", "table.head"))
    return tuple(runs)


def _row(request: Request, columns: list[tuple[Column, int]], ascii: bool) -> Line:  # noqa: A002
    runs: list[Run] = []
    for at, (column, cells) in enumerate(columns):
        text = column.text(request)
        if not column.right:
            cutter = clip_middle if column.title == "ID" else clip
            text = cutter(safe(text, ascii), cells, ascii)
        elif cell_width(text) > cells:
            text = "#" * cells
        style = ""
        if column.title == "PHASE":
            style = f"phase.{request.phase.value}"
        elif column.title == "REASON" and request.client == "gone":
            style = "warn"
        elif (column.title == "OWED" and request.owed_blocks) or (
            column.title == "PREEMPT" and request.preemptions
        ):
            style = "phase.preempted"
        elif text == DASH:
            style = "dim"
        runs.append((pad(text, cells, column.right), style))
        if at < len(columns) - 1:
            runs.append((" ", ""))
    return tuple(runs)
