"""One request: all its numbers, and its block table from logical to physical.

Neighbouring entries that differ in nothing but their place are one line: a table of
thousands of blocks is mostly runs, and what is odd stands out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtop.draw.numbers import count, duration, percent, rate, size
from kvtop.draw.pick import engine_of, now
from kvtop.draw.requests import hit_percent, reason_text
from kvtop.draw.style import state_style
from kvtop.draw.text import (
    DASH,
    Field,
    block,
    clip,
    clip_middle,
    fields,
    line_width,
    pad,
    safe,
    wrap,
)
from kvtop.draw.view import Detail, Line, Run, View
from kvtop.model.blocks import LETTERS, BlockState
from kvtop.model.snapshot import Engine, Phase, Request, Snapshot

_SHARED = "SHARED WITH"
_HEADS = (
    ("LOGICAL", 2, 13),
    ("BLOCK", 0, 17),
    ("STATE", 3, 8),
    ("REFS", 4, 4),
    ("TOKENS", 6, 15),
    (_SHARED, 5, len(_SHARED)),
)
"""Columns of the table: title, importance (the largest goes first), cells."""
_STATES: dict[int | None, BlockState] = {int(state): state for state in BlockState}


@dataclass(frozen=True, slots=True)
class _Entry:
    """A run of table entries."""

    group: int
    first: int
    last: int
    block: int
    step: int
    """1: physical ids rise with logical ones; 0: all the same block (null)."""
    tokens: int | None
    state: int | None
    refs: int | None
    shared: tuple[str, ...]


def title(_snap: Snapshot, view: View, width: int) -> str:
    """`Request cmpl-42`."""
    name = view.detail.request_id if view.detail is not None else DASH
    return clip(f"Request {safe(name, view.ascii)}", width, view.ascii)


def detail_panel(snap: Snapshot, view: View, width: int, height: int) -> list[Line]:
    """The numbers of the request and its table, from line `View.scroll["detail"]` on."""
    lines = detail_lines(snap, view, width)
    offset = max(0, min(view.scroll.get("detail", 0), len(lines) - height))
    return block(lines[offset:], width, height)


def detail_lines(snap: Snapshot, view: View, width: int) -> list[Line]:
    """All lines of the panel; their number bounds the scrolling."""
    detail = view.detail
    if detail is None:
        return [(("no request chosen", "dim"),)]
    engine = engine_of(snap, view)
    request = _find(engine, detail.request_id)
    lines: list[Line] = []
    if request is None:
        text = (
            "This request is no longer in the scheduler; below is its last table, if one was read."
        )
        lines += [((line, "warn"),) for line in wrap(text, width)]
    else:
        lines += _numbers(request, snap, view, width)
    lines.append(())
    if detail.error:
        text = f"No block table: {safe(detail.error, view.ascii)}"
        return lines + [((line, "warn"),) for line in wrap(text, width)]
    if detail.step is None:
        return [*lines, (("asking the probe for its block table", "dim"),)]
    return lines + _table(detail, engine, view, width)


def _find(engine: Engine | None, request_id: str) -> Request | None:
    requests = engine.requests if engine is not None else None
    return next((request for request in requests or () if request.id == request_id), None)


def _numbers(request: Request, snap: Snapshot, view: View, width: int) -> list[Line]:
    ascii = view.ascii  # noqa: A001 - the name of the option
    speed = None
    if request.output_tokens and request.age_s:
        speed = request.output_tokens / request.age_s
    arrived = request.arrival_time_s
    pairs: list[tuple[str, str, str]] = [
        ("status", safe(request.status, ascii), ""),
        ("phase", request.phase.value, f"phase.{request.phase.value}"),
        ("reason", safe(reason_text(request), ascii) or DASH, ""),
        ("age", duration(request.age_s), ""),
        ("arrived", DASH if arrived is None else f"{duration(now(snap, view) - arrived)} ago", ""),
        ("held", duration(request.held_s), ""),
        ("prompt", f"{count(request.prompt_tokens)} tok", ""),
        ("output", f"{count(request.output_tokens)} of {count(request.max_tokens)} tok", ""),
        ("mean output", rate(speed), ""),
        ("computed", f"{count(request.computed_tokens)} tok", ""),
        ("prefix hit", f"{count(request.cached_tokens)} tok {percent(hit_percent(request))}", ""),
        ("blocks", count(request.blocks), ""),
        ("shared", count(request.shared_blocks), "state.shared" if request.shared_blocks else ""),
        ("memory", size(request.kv_bytes), ""),
        ("slack", f"{count(request.slack_tokens)} tok", ""),
        ("preempted", f"{count(request.preemptions)} times", ""),
        ("owes", f"{count(request.owed_blocks)} blocks", ""),
        ("priority", count(request.priority), ""),
        ("LoRA", safe(request.lora, ascii) if request.lora else DASH, ""),
        ("client", _client(request), "warn" if request.client == "gone" else ""),
    ]
    lines: list[Line] = []
    runs: list[Run] = []
    for label, value, style in pairs:
        part: Line = ((label + " ", "label"), (value, style or "value"))
        if runs and line_width(runs) + 3 + line_width(part) > width:
            lines.append(tuple(runs))
            runs = []
        if runs:
            runs.append(("   ", ""))
        runs.extend(part)
    lines.append(tuple(runs))
    wrapped: list[Line] = []
    for line in lines:
        if line_width(line) <= width:
            wrapped.append(line)
        else:
            text = "".join(text for text, _ in line)
            wrapped += [((piece, "value"),) for piece in wrap(text, width)]
    return wrapped


def _client(request: Request) -> str:
    if request.client is None:
        return f"{DASH} (not known)"
    if request.client == "gone":
        return f"gone {duration(request.client_gone_s)}"
    return request.client


def _state(
    physical: int, refs: int | None, shared: bool, states: bytes | None, same: bool, held: bool
) -> int | None:
    """State of a block of the table.

    The table is read when it is asked for, the map at the last snapshot. Only when both
    are of one step does the map know more than the table itself: a block in a table
    may have been free a step before.
    """
    seen = states[physical] if states is not None and 0 <= physical < len(states) else None
    if same or seen == BlockState.NULL:
        return seen
    if shared or (refs or 0) > 1:
        return BlockState.SHARED
    if refs == 1:
        return BlockState.HELD if held else BlockState.USED
    return None


def _entries(detail: Detail, states: bytes | None, same: bool, held: bool) -> list[_Entry]:
    out: list[_Entry] = []
    for at, (group, tokens, blocks) in enumerate(detail.tables):
        refs: Sequence[int] = detail.refs[at] if at < len(detail.refs) else ()
        run: _Entry | None = None
        for logical, physical in enumerate(blocks):
            count_refs = refs[logical] if logical < len(refs) else None
            shared = tuple(detail.shared_with.get(physical, ()))
            state = _state(physical, count_refs, bool(shared), states, same, held)
            if run is not None and (state, count_refs, shared) == (run.state, run.refs, run.shared):
                length = run.last - run.first + 1
                step = physical - run.block if length == 1 else run.step
                if step in (0, 1) and physical == run.block + step * length:
                    run = _Entry(
                        group,
                        run.first,
                        logical,
                        run.block,
                        step,
                        tokens,
                        state,
                        count_refs,
                        shared,
                    )
                    out[-1] = run
                    continue
            run = _Entry(group, logical, logical, physical, 1, tokens, state, count_refs, shared)
            out.append(run)
    return out


def _table(detail: Detail, engine: Engine | None, view: View, width: int) -> list[Line]:
    states = engine.pools[0].states if engine is not None and engine.pools else None
    probe = engine.probe if engine is not None else None
    request = _find(engine, detail.request_id)
    entries = _entries(
        detail,
        states,
        same=probe is not None and probe.step == detail.step,
        held=request is not None and request.phase is Phase.HELD,
    )
    total = sum(len(blocks) for _, _, blocks in detail.tables)
    groups = f"in {count(len(detail.tables))} KV groups" if len(detail.tables) > 1 else ""
    lines: list[Line] = [
        fields(
            [
                (0, (("block table ", "label"), (f"{count(total)} entries", "value"))),
                (1, ((f"at step {count(detail.step)}", "label"),)),
                (2, ((groups, "label"),)),
            ],
            width,
        )
    ]
    lines += [((line, "warn"),) for text in _old(detail, request) for line in wrap(text, width)]
    if not entries:
        lines.append((("it holds no blocks", "dim"),))
        return lines
    heads: list[Field] = [
        (importance, ((pad(title, cells), "table.head"),)) for title, importance, cells in _HEADS
    ]
    kept = fields(heads, width, " ")
    shown = {text.strip() for text, _ in kept}
    lines.append(kept)
    group = None
    for entry in entries:
        if len(detail.tables) > 1 and entry.group != group:
            group = entry.group
            lines.append(((f"group {group}, {count(entry.tokens)} tok a block", "label"),))
        lines.append(_entry_line(entry, shown, width, view.ascii))
    return lines


def _old(detail: Detail, request: Request | None) -> list[str]:
    """On replay a table is seldom of the very moment shown: says so, and what differs."""
    if not detail.age_s:
        return []
    text = f"This table was read {duration(detail.age_s)} before the moment shown."
    total = sum(len(blocks) for _, _, blocks in detail.tables)
    now_held = request.blocks if request is not None else None
    if now_held is not None and now_held != total:
        text += f" It had {count(total)} entries; the request now holds {count(now_held)} blocks."
    return [text]


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


def _entry_line(entry: _Entry, shown: set[str], width: int, ascii: bool) -> Line:  # noqa: A002
    state = _STATES.get(entry.state)
    style = state_style(state) if state is not None else "dim"
    length = entry.last - entry.first
    physical = _span(entry.block, entry.block + entry.step * length)
    name = DASH if state is None else f"{LETTERS[state]} {state.name.lower()}"
    tokens = DASH
    if entry.tokens:
        tokens = _span(entry.first * entry.tokens, (entry.last + 1) * entry.tokens - 1)
    refs = DASH if entry.refs is None else str(entry.refs)
    cells = {
        "LOGICAL": (_span(entry.first, entry.last), ""),
        "BLOCK": (physical, style),
        "STATE": (name, style),
        "REFS": (refs, ""),
        "TOKENS": (tokens, "label"),
    }
    parts: list[Field] = [
        (importance, ((pad(cells[title][0], width, title == "REFS"), cells[title][1]),))
        for title, importance, width in _HEADS
        if title in shown and title in cells
    ]
    room = width - line_width(fields(parts, width, " ")) - 1
    if _SHARED in shown and entry.shared and room > 0:
        parts.append((9, ((_names(entry.shared, room, ascii), "state.shared"),)))
    return fields(parts, width, " ")


def _names(ids: Sequence[str], room: int, ascii: bool) -> str:  # noqa: A002 - the option
    """As many ids as fit, then how many more there are."""
    out = ""
    for at, name in enumerate(ids):
        joined = f"{out}, {safe(name, ascii)}" if out else safe(name, ascii)
        rest = len(ids) - at - 1
        tail = f" +{rest}" if rest else ""
        if line_width(((joined + tail, ""),)) > room:
            left = len(ids) - at
            return (
                f"{out} +{left}"
                if out
                else clip_middle(safe(name, ascii), room - len(tail), ascii) + tail
            )
        out = joined
    return out
