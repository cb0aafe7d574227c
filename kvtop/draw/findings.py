"""What is wrong: the line at the top, the list of findings, and one of them in full."""

from __future__ import annotations

from collections.abc import Iterable

from kvtop.draw.numbers import clock, count, duration
from kvtop.draw.pick import engine_of, now
from kvtop.draw.text import Field, block, clip, fields, fit, line_width, pad, safe, wrap
from kvtop.draw.view import Line, Run, View
from kvtop.model.snapshot import Engine, Finding, Snapshot

_RANK = {"critical": 0, "warning": 1, "info": 2}
SEVERITY_STYLES = {"critical": "crit", "warning": "warn", "info": "label"}
"""Style of each severity; the word itself is always there too."""
_DIAGNOSIS = "diagnosis."
_RULE_CELLS = 26
_LABEL_CELLS = 10
_MOST_RUNS = 40
_MOST_REQUESTS = 20


def key_of(finding: Finding) -> str:
    """A name for a finding that stays the same while it holds."""
    return f"{finding.rule} {finding.engine_pid} {finding.since_s!r} {finding.request_ids[:1]}"


def is_diagnosis(finding: Finding) -> bool:
    """Whether it is the verdict on a whole engine and not one thing that is wrong."""
    return finding.rule.startswith(_DIAGNOSIS)


def rank(finding: Finding) -> int:
    """0 is the worst severity."""
    return _RANK.get(finding.severity, len(_RANK))


def found_blocks(engine: Engine, findings: Iterable[Finding]) -> frozenset[int]:
    """Blocks of an engine that warnings and worse are about."""
    blocks: set[int] = set()
    for finding in findings:
        if finding.engine_pid == engine.pid and finding.severity in ("warning", "critical"):
            blocks.update(finding.block_ids)
    return frozenset(blocks)


def diagnosis_line(snap: Snapshot, view: View, width: int) -> Line:
    """The verdict on the engine on screen in one line: the worst severity first, as a word.

    Args:
        snap: What is on screen.
        view: Its `findings` are shown.
        width: Cells.
    """
    engine = engine_of(snap, view)
    pid = engine.pid if engine is not None else None
    mine = [finding for finding in view.findings if finding.engine_pid in (pid, None)]
    if not mine:
        return fit((("no verdict on this engine yet: too little was seen of it", "dim"),), width)
    first = min(mine, key=lambda f: (rank(f), not is_diagnosis(f), f.since_s))
    style = SEVERITY_STYLES.get(first.severity, "label")
    others = [f for f in view.findings if f is not first and not is_diagnosis(f)]
    tail = _tail(others)
    room = width - line_width(tail) - 2
    if room < 24:
        tail, room = (), width
    word = f"{safe(first.severity, view.ascii)}: "
    text = clip(word + safe(first.summary, view.ascii), room, view.ascii)
    quiet = "label" if rank(first) >= _RANK["info"] else style
    head: Line = ((text[: len(word)], style), (text[len(word) :], quiet))
    space = width - line_width(head) - line_width(tail)
    return fit((*head, (" " * max(space, 0), ""), *tail), width)


def _tail(others: list[Finding]) -> Line:
    """How many more there are, and the key that lists them."""
    runs: list[Run] = []
    for severity in _RANK:
        number = sum(1 for finding in others if finding.severity == severity)
        if number:
            style = SEVERITY_STYLES[severity]
            runs += [(f"+{number} {severity} ", style)]
    return (*runs, ("w", "key"), (" why", "label"))


def findings_panel(snap: Snapshot, view: View, width: int, height: int) -> list[Line]:
    """Everything that holds now, one a line, with a cursor; `height` lines of `width` cells."""
    rows = view.findings
    if not rows:
        text = "Nothing found so far. Most rules need some seconds of history."
        return block([((line, "dim"),) for line in wrap(text, width)], width, height)
    at = cursor_row(view)
    page = max(height - 1, 1)
    first = min(max(at - page // 2, 0), max(len(rows) - page, 0))
    lines = [_head(width)] if height > 1 else []
    lines += [
        _row(finding, snap, view, width, chosen=row == at)
        for row, finding in enumerate(rows[first : first + page], first)
    ]
    return block(lines, width, height)


def cursor_row(view: View) -> int:
    """Row of the cursor in the list of findings; 0 where its finding is gone."""
    keys = [key_of(finding) for finding in view.findings]
    return keys.index(view.finding_key) if view.finding_key in keys else 0


def _columns(width: int) -> tuple[int, int, int]:
    """Cells of rule, since and engine; 0: no such column."""
    return (_RULE_CELLS if width >= 60 else 0, 7 if width >= 50 else 0, 8 if width >= 90 else 0)


def _head(width: int) -> Line:
    rule, since, engine = _columns(width)
    text = pad("SEVERITY", 9)
    text += pad("RULE", rule) if rule else ""
    text += pad("FOR", since) if since else ""
    text += pad("ENGINE", engine) if engine else ""
    return fit(((pad(text + "WHAT", width), "table.head"),), width)


def _row(finding: Finding, snap: Snapshot, view: View, width: int, *, chosen: bool) -> Line:
    rule, since, engine = _columns(width)
    ascii_only = view.ascii
    pid = "-" if finding.engine_pid is None else str(finding.engine_pid)
    word = pad(clip(safe(finding.severity, ascii_only), 8, ascii_only), 9)
    rest = ""
    if rule:
        rest += pad(clip(safe(finding.rule, ascii_only), rule - 1, ascii_only), rule)
    if since:
        rest += pad(duration(max(now(snap, view) - finding.since_s, 0.0)), since)
    if engine:
        rest += pad(clip(pid, engine - 1, ascii_only), engine)
    rest += clip(
        safe(finding.summary, ascii_only),
        max(width - line_width(((word + rest, ""),)), 0),
        view.ascii,
    )
    if chosen:
        return fit(((pad(word + rest, width), "cursor"),), width)
    return fit(((word, SEVERITY_STYLES.get(finding.severity, "label")), (rest, "")), width)


def shown_finding(view: View) -> tuple[Finding | None, bool]:
    """The finding that is open, as fresh as there is, and whether it still holds."""
    for finding in view.findings:
        if key_of(finding) == view.finding_key:
            return finding, True
    return view.finding, False


def finding_panel(snap: Snapshot, view: View, explanation: Iterable[str], width: int) -> list[Line]:
    """One finding in full: evidence, meaning, what to do, what would show that it is wrong.

    Args:
        snap: What is on screen.
        view: Its `finding` is shown, or the newest one of the same key.
        explanation: What its rule means, one text a paragraph.
        width: Cells a line.

    Returns:
        As many lines of `width` cells as it takes; the dialog scrolls them.
    """
    finding, holds = shown_finding(view)
    if finding is None:
        return [fit((("no finding is open", "dim"),), width)]
    ascii_only = view.ascii
    style = SEVERITY_STYLES.get(finding.severity, "label")
    where = "machine" if finding.engine_pid is None else f"engine pid {finding.engine_pid}"
    age = duration(max(now(snap, view) - finding.since_s, 0.0))
    parts: list[Field] = [
        (0, ((safe(finding.severity, ascii_only), style),)),
        (2, ((where, "label"),)),
        (1, ((f"since {clock(finding.since_s)}, for {age}", "label"),)),
    ]
    lines: list[Line] = [fields(parts, width)]
    if not holds:
        lines.append((("It no longer holds; this is how it was last.", "warn"),))
    lines += _text(finding.summary, width, ascii_only, "value")
    rows: list[tuple[str, str]] = list(finding.evidence.items())
    if finding.block_ids:
        rows.append(("blocks", f"{count(len(finding.block_ids))}: {_ids(finding.block_ids)}"))
    if finding.request_ids:
        names = ", ".join(finding.request_ids[:_MOST_REQUESTS])
        more = len(finding.request_ids) - _MOST_REQUESTS
        rows.append(("requests", names + (f" and {more} more" if more > 0 else "")))
    if rows:
        lines += [(), (("Evidence", "title"),)]
    for name, value in rows:
        lines += _labelled(name, value, width, ascii_only)
    for heading, texts in (
        ("What it means", tuple(explanation)),
        ("What to do", (finding.next_step,)),
        ("It would be wrong if", (finding.disproof,)),
    ):
        wanted = [text for text in texts if text]
        if wanted:
            lines += [(), ((heading, "title"),)]
        for text in wanted:
            lines += _text(text, width, ascii_only, "")
    return [fit(line, width) for line in lines]


def _text(text: str, width: int, ascii_only: bool, style: str) -> list[Line]:
    return [((line, style),) for line in wrap(safe(text, ascii_only), width)]


def _labelled(name: str, value: str, width: int, ascii_only: bool) -> list[Line]:
    label = safe(name, ascii_only)
    parts = wrap(f"{pad(label, _LABEL_CELLS)}  {safe(value, ascii_only)}", width)
    head = len(label)
    return [
        ((part[:head], "label"), (part[head:], "")) if at == 0 else (("  " + part, ""),)
        for at, part in enumerate(parts)
    ]


def _ids(blocks: tuple[int, ...]) -> str:
    """Block ids with neighbours joined: `3-7, 12`."""
    runs: list[list[int]] = []
    for number in blocks:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        elif len(runs) == _MOST_RUNS:
            return ", ".join(_run(run) for run in runs) + ", ..."
        else:
            runs.append([number, number])
    return ", ".join(_run(run) for run in runs)


def _run(run: list[int]) -> str:
    return str(run[0]) if run[0] == run[1] else f"{run[0]}-{run[1]}"
