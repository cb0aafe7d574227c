"""The report of a session: one HTML file that needs nothing else, or Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtop.session.report_template import PAGE
from kvtop.session.summary import (
    CaptureSummary,
    EngineSummary,
    FindingSpan,
    RequestRow,
    Series,
    Summary,
)
from kvtop.session.svg import Curve, Mark, plot
from kvtop.session.text import html_text, markdown_text
from kvtop.session.units import size_text, span_text, utc

_STATES = (
    ("used", "#5faf5f"),
    ("shared", "#5fd7d7"),
    ("held", "#ffd700"),
    ("ghost", "#ff5f5f"),
    ("cached", "#5f87af"),
    ("free", "#4e4e4e"),
)
_COLOURS = {"critical": "#ff5f5f", "warning": "#ffd700", "marker": "#d787d7"}
_BLUE, _GREEN, _YELLOW = "#5f87af", "#5faf5f", "#ffd700"
DASH = "-"
_MOST_NAME = 100
"""Characters of a request id, a host or an engine's name; longer ones are cut."""


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return DASH
    text = f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:,.1f}"
    return f"{text} {unit}".strip()


def facts(summary: Summary) -> list[tuple[str, str]]:
    """What was watched, as names and texts."""
    info = summary.info
    end = info.closed_reason or "not closed: its writer was killed, or still writes"
    return [
        ("Host", _short(info.host) or DASH),
        ("From", utc(summary.first_s)),
        ("To", utc(summary.last_s)),
        ("Length", span_text(summary.last_s - summary.first_s)),
        ("Snapshots", f"{summary.ticks:,}"),
        ("Recorded by", f"kvtop {info.version}" + (" (demo: simulated)" if info.demo else "")),
        ("Names", "anonymized" if info.anonymized else "as recorded"),
        ("Ended", end),
    ]


def _judged(summary: Summary) -> str:
    if summary.judged_every == 1:
        return "judged again from every snapshot"
    return f"judged again from every {summary.judged_every}th snapshot: short ones may be missing"


def _held(finding: FindingSpan) -> str:
    return f"{utc(finding.first_s)} to {utc(finding.last_s)}"


def _short(text: str) -> str:
    """A name from outside, cut in the middle where it would fill the page."""
    return text if len(text) <= _MOST_NAME else f"{text[: _MOST_NAME - 24]}...{text[-20:]}"


def _request_cells(row: RequestRow) -> list[str]:
    return [
        _short(row.id),
        utc(row.first_s),
        DASH if row.seconds is None else span_text(row.seconds),
        _number(row.peak_blocks),
        _number(row.block_seconds),
        _number(row.preemptions),
    ]


_REQUEST_HEAD = ("Request", "First seen", "Seen for", "Most blocks", "Block-seconds", "Preempted")


def _engine_cells(engine: EngineSummary) -> list[str]:
    used = [value for _, value in engine.series["blocks_used"] if value is not None]
    ghosts = [value for _, value in engine.series["blocks_ghost"] if value is not None]
    return [
        _short(engine.title),
        _number(max(used) if used else None),
        _number(max(ghosts) if ghosts else None),
        _number(engine.preemptions),
        _number(engine.alloc_failures),
        _number(engine.hit_percent, "%"),
    ]


_ENGINE_HEAD = (
    "Engine",
    "Most used blocks",
    "Most ghost blocks",
    "Preemptions",
    "Failed allocations",
    "Prefix hits (mean)",
)


def html_report(summary: Summary) -> str:
    """The report as one HTML document."""
    parts: list[str] = []
    parts.append(_html_table(("", ""), facts(summary)))
    parts.append("<h2>Findings</h2>")
    parts.append(f"<p class='note'>{html_text(_judged(summary))}</p>")
    parts += [_html_finding(finding) for finding in summary.findings]
    if not summary.findings:
        parts.append("<p>Nothing was found.</p>")
    parts.append("<h2>Timeline</h2>")
    parts += _plots(summary)
    if summary.engines:
        parts.append("<h2>Engines</h2>")
        parts.append(_html_table(_ENGINE_HEAD, map(_engine_cells, summary.engines)))
    if summary.most_held:
        parts.append("<h2>Requests that held most</h2>")
        parts.append(_html_table(_REQUEST_HEAD, map(_request_cells, summary.most_held)))
        parts.append("<h2>Requests that stayed longest</h2>")
        parts.append(_html_table(_REQUEST_HEAD, map(_request_cells, summary.longest)))
    if summary.markers:
        parts.append("<h2>Markers</h2>")
        rows = [(utc(marker.time_s), marker.note) for marker in summary.markers]
        parts.append(_html_table(("Time", "Note"), rows))
    if summary.events:
        parts.append("<h2>Restarts, sources and gaps</h2>")
        parts.append(_html_table(("Time", "What"), _event_rows(summary)))
    if summary.stacks:
        parts.append("<h2>Top frames</h2>")
        parts.append(_html_table(_STACK_HEAD, _stack_rows(summary)))
    if summary.captures:
        parts.append("<h2>Flame graphs</h2>")
        parts += [_html_capture(capture) for capture in summary.captures]
    title = f"kvtop report: {_short(summary.info.host) or 'session'}, {utc(summary.first_s)}"
    return PAGE.replace("@TITLE@", html_text(title)).replace("@BODY@", "\n".join(parts))


def _html_capture(capture: CaptureSummary) -> str:
    parts = [
        f"<h3>{html_text(capture.title)}</h3>",
        f"<p class='note'>{html_text(capture.note)}</p>",
    ]
    if capture.shares:
        parts.append(f"<p>{html_text(capture.shares)}</p>")
    if capture.top:
        parts.append(_html_table(_CAPTURE_HEAD, _capture_rows(capture)))
    if capture.picture:
        # Wider than a phone; it scrolls inside its own frame.
        parts.append(f"<div class='wide flame'>{capture.picture}</div>")
    return "".join(parts)


_CAPTURE_HEAD = ("Function", "Where", "On top", "In stack")


def _capture_rows(capture: CaptureSummary) -> list[tuple[str, ...]]:
    return [
        (name, place, f"{own:.1f} %", f"{total:.1f} %") for name, place, own, total in capture.top
    ]


_STACK_HEAD = ("Function", "Where", "On top (mean)")


def _stack_rows(summary: Summary) -> list[tuple[str, str, str]]:
    return [(name, place, f"{share:.1f} %") for name, place, share in summary.stacks]


def _event_rows(summary: Summary) -> list[tuple[str, str]]:
    rows = [(utc(event.time_s), event.text) for event in summary.events]
    if summary.events_left_out:
        rows.append(("", f"and {summary.events_left_out:,} more"))
    return rows


def _html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = ""
    if any(head):
        top = "<tr>" + "".join(f"<th>{html_text(name)}</th>" for name in head) + "</tr>"
    body = "".join(
        "<tr>" + "".join(f"<td>{html_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<div class='wide'><table>{top}{body}</table></div>"


def _html_finding(span: FindingSpan) -> str:
    finding = span.finding
    evidence = _html_table(("", ""), list(finding.evidence.items())) if finding.evidence else ""
    parts = [
        f"<section class='finding {html_text(finding.severity)}'>",
        f"<h3>{html_text(finding.severity)}: {html_text(finding.summary)}</h3>",
        f"<p class='note'>{html_text(finding.rule)}, {html_text(_held(span))}</p>",
        evidence,
        f"<p><b>Next:</b> {html_text(finding.next_step)}</p>" if finding.next_step else "",
        f"<p class='note'>Wrong if: {html_text(finding.disproof)}</p>" if finding.disproof else "",
        "</section>",
    ]
    return "".join(parts)


def _marks(summary: Summary) -> list[Mark]:
    marks = [
        Mark(span.first_s, _COLOURS[span.finding.severity], span.finding.summary)
        for span in summary.findings
        if span.finding.severity in _COLOURS
    ]
    marks += [Mark(m.time_s, _COLOURS["marker"], f"marker {m.note}") for m in summary.markers]
    return marks


def _known(series: Series) -> bool:
    return any(value is not None for _, value in series)


def _plots(summary: Summary) -> list[str]:
    span = (summary.first_s, summary.last_s)
    marks = _marks(summary)
    out: list[str] = []
    for engine in summary.engines:
        series = engine.series
        if _known(series["blocks_free"]):
            out.append(
                plot(
                    f"KV blocks, {_short(engine.title)}",
                    [Curve(name, colour, series[f"blocks_{name}"]) for name, colour in _STATES],
                    span,
                    stacked=True,
                    marks=marks,
                )
            )
        if _known(series["running"]):
            curves = [
                Curve("running", _GREEN, series["running"]),
                Curve("waiting", _YELLOW, series["waiting"]),
            ]
            out.append(plot(f"Requests, {_short(engine.title)}", curves, span, marks=marks))
        if _known(series["prefix_hit_percent"]):
            hits = [Curve("hit rate", _BLUE, series["prefix_hit_percent"])]
            out.append(
                plot(
                    f"Prefix-cache hits, {_short(engine.title)}",
                    hits,
                    span,
                    top=100.0,
                    label=lambda value: f"{value:.0f} %",
                    marks=marks,
                )
            )
    out += _memory_plots(summary, span, marks)
    return out or ["<p>No numbers were recorded.</p>"]


def _memory_plots(summary: Summary, span: tuple[float, float], marks: list[Mark]) -> list[str]:
    kv = [
        Curve(f"KV in use, {_short(engine.title)}", _GREEN, _kv_bytes(engine))
        for engine in summary.engines
        if engine.block_bytes is not None and _known(engine.series["blocks_used"])
    ]
    out = []
    for title, series, total in summary.gpus:
        if not _known(series["mem_used_bytes"]):
            continue
        curves = [Curve("GPU memory in use", _BLUE, series["mem_used_bytes"]), *kv]
        out.append(
            plot(
                f"Memory, {title}",
                curves,
                span,
                top=None if total is None else float(total),
                label=size_text,
                marks=marks,
            )
        )
    return out


def _kv_bytes(engine: EngineSummary) -> Series:
    series = engine.series
    names = ("blocks_used", "blocks_shared", "blocks_held", "blocks_ghost")
    out: Series = []
    for index, (time_s, _) in enumerate(series["blocks_used"]):
        values = [series[name][index][1] for name in names]
        known = [value for value in values if value is not None]
        complete = len(known) == len(values)
        out.append((time_s, sum(known) * (engine.block_bytes or 0) if complete else None))
    return out


def markdown_report(summary: Summary) -> str:
    """The report as Markdown, without plots."""
    lines = [f"# kvtop report: {markdown_text(_short(summary.info.host) or 'session')}", ""]
    lines += [f"- {name}: {markdown_text(text)}" for name, text in facts(summary)]
    lines += ["", "## Findings", "", f"({_judged(summary)})", ""]
    for span in summary.findings:
        finding = span.finding
        lines.append(f"### {finding.severity}: {markdown_text(finding.summary)}")
        lines += ["", f"{markdown_text(finding.rule)}, {_held(span)}", ""]
        lines += [
            f"- {markdown_text(name)}: {markdown_text(text)}"
            for name, text in finding.evidence.items()
        ]
        if finding.next_step:
            lines.append(f"- Next: {markdown_text(finding.next_step)}")
        lines.append("")
    if not summary.findings:
        lines += ["Nothing was found.", ""]
    tables: list[tuple[str, Sequence[str], list[Sequence[str]]]] = [
        ("Engines", _ENGINE_HEAD, [_engine_cells(engine) for engine in summary.engines]),
        ("Requests that held most", _REQUEST_HEAD, [_request_cells(r) for r in summary.most_held]),
        (
            "Requests that stayed longest",
            _REQUEST_HEAD,
            [_request_cells(r) for r in summary.longest],
        ),
        ("Markers", ("Time", "Note"), [(utc(m.time_s), m.note) for m in summary.markers]),
        ("Restarts, sources and gaps", ("Time", "What"), list(_event_rows(summary))),
        ("Top frames", _STACK_HEAD, list(_stack_rows(summary))),
    ]
    for title, head, rows in tables:
        if rows:
            lines += [f"## {title}", "", *_markdown_table(head, rows), ""]
    if summary.captures:
        lines += ["## Flame graphs", ""]
    for capture in summary.captures:
        lines += [f"### {markdown_text(capture.title)}", "", markdown_text(capture.note), ""]
        if capture.top:
            lines += [markdown_text(capture.shares), ""]
            lines += [*_markdown_table(_CAPTURE_HEAD, _capture_rows(capture)), ""]
    return "\n".join(lines)


def _markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    out = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    out += [f"| {' | '.join(markdown_text(cell) for cell in row)} |" for row in rows]
    return out
