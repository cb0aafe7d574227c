"""What a report says, as data: gathered once, shown as HTML or Markdown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kvtop.model.snapshot import Finding, Snapshot
from kvtop.session.anonymize import Anonymizer
from kvtop.session.format import damage
from kvtop.session.reader import Marker, SessionInfo, SessionReader
from kvtop.session.schema import SLOT_BITS, SLOTS
from kvtop.session.timeline import Event, timeline

POINTS = 400
"""Points of a plot at most."""
MOST_JUDGED = 7200
"""Snapshots judged at most: two hours at one a second."""
TOP = 15
"""Requests, functions and events listed at most."""

Judge = Callable[[Snapshot], tuple[Finding, ...]]
"""Takes the snapshots in their order; gives the findings that hold at each."""

Series = list[tuple[float, float | None]]
"""Unix seconds and value; None where nothing was read."""

_ENGINE_SERIES = (
    "blocks_total",
    "blocks_null",
    "blocks_free",
    "blocks_cached",
    "blocks_used",
    "blocks_shared",
    "blocks_held",
    "blocks_ghost",
    "running",
    "waiting",
    "kv_used_percent",
    "prefix_hit_percent",
    "generation_tokens_s",
)


@dataclass(slots=True)
class FindingSpan:
    """One finding over the time that it held."""

    finding: Finding
    """As it was last."""
    first_s: float
    """When it was first there."""
    last_s: float
    """When it was last there."""


@dataclass(frozen=True, slots=True)
class EngineSummary:
    """One engine process."""

    title: str
    """Rank, pid, model and version in one line."""
    series: dict[str, Series]
    """Values over time, by column of `engine_sample`."""
    block_bytes: int | None
    """Bytes a block."""
    preemptions: int | None
    """During the session. None: nobody counted."""
    alloc_failures: int | None
    """During the session. None: nobody counted."""
    hit_percent: float | None
    """Mean of the windows with queries. None: there were none."""


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request of a list."""

    id: str
    """Text from outside."""
    first_s: float
    """First seen."""
    seconds: float | None
    """How long it was seen. None: it was there when the writer was killed."""
    peak_blocks: int | None
    """Most blocks at once."""
    block_seconds: int | None
    """Blocks times seconds."""
    preemptions: int | None
    """Times it was preempted."""


@dataclass(frozen=True, slots=True)
class CaptureSummary:
    """One capture of whole stacks."""

    title: str
    """Process, time, and the finding that asked for it."""
    note: str
    """How it was taken, or why there are no stacks."""
    shares: str = ""
    """Categories and their shares of the samples."""
    top: list[tuple[str, str, float, float]] = field(default_factory=list)
    """Function, place, and shares of samples with it on top and anywhere, 0-100."""
    picture: str = ""
    """An SVG element; what is from outside in it is escaped. Empty: none is shown."""


@dataclass(slots=True)
class Summary:
    """Everything in a report."""

    info: SessionInfo
    """What was recorded."""
    first_s: float
    """Time of the first tick."""
    last_s: float
    """Time of the last tick."""
    ticks: int
    """Snapshots in the file."""
    engines: list[EngineSummary] = field(default_factory=list)
    """Engines in the order of their first tick."""
    gpus: list[tuple[str, dict[str, Series], int | None]] = field(default_factory=list)
    """Title, series by column of `gpu_sample`, total memory in bytes."""
    findings: list[FindingSpan] = field(default_factory=list)
    """Worst first."""
    judged_every: int = 1
    """Every how many-th snapshot was judged."""
    most_held: list[RequestRow] = field(default_factory=list)
    """By blocks times seconds."""
    longest: list[RequestRow] = field(default_factory=list)
    """By time seen."""
    markers: list[Marker] = field(default_factory=list)
    """In order."""
    events: list[Event] = field(default_factory=list)
    """Restarts, source gaps and the like, in order; no single preemptions."""
    events_left_out: int = 0
    """Events that are not listed."""
    stacks: list[tuple[str, str, float]] = field(default_factory=list)
    """Function, place, and mean share of samples with it on top, 0-100."""
    captures: list[CaptureSummary] = field(default_factory=list)
    """Whole stacks, in order; filled by who can draw them."""


def gather(
    reader: SessionReader, judge: Judge | None = None, anonymizer: Anonymizer | None = None
) -> Summary:
    """Everything a report says.

    Args:
        reader: The file.
        judge: What judges the snapshots. None: no findings.
        anonymizer: Applied to everything shown. None: as recorded.

    Raises:
        BadDataError: The file is damaged.
    """
    with damage(reader.path, "its tables"):
        out = _gather(reader, anonymizer)
    if judge is not None:
        _judge(reader, judge, anonymizer, out)
    return out


def _gather(reader: SessionReader, anonymizer: Anonymizer | None) -> Summary:
    info = reader.info
    if anonymizer is not None:
        info = replace(info, host=anonymizer.host(info.host), anonymized=True)
    out = Summary(
        info=info,
        first_s=reader.first_s,
        last_s=reader.last_s,
        ticks=reader.last_tick - reader.first_tick + 1,
    )
    hide = anonymizer
    out.engines = _engines(reader, hide)
    out.gpus = _gpus(reader)
    out.most_held = _requests(reader, hide, longest=False)
    out.longest = _requests(reader, hide, longest=True)
    out.markers = [
        Marker(m.tick, m.time_s, hide.text(m.note) if hide else m.note) for m in reader.markers()
    ]
    events = [e for e in timeline(reader) if e.kind not in ("preemption", "marker")]
    out.events_left_out = max(0, len(events) - 4 * TOP)
    out.events = [
        Event(e.tick, e.time_s, e.kind, hide.text(e.text) if hide else e.text)
        for e in events[: 4 * TOP]
    ]
    out.stacks = _stacks(reader, hide)
    return out


def _bucketed(reader: SessionReader, table: str, slot: int, names: tuple[str, ...]) -> Any:
    """Means over buckets of ticks: one row a bucket, its time first."""
    ticks = reader.last_tick - reader.first_tick + 1
    width = max(1, -(-ticks // POINTS))
    means = ", ".join(f"avg(s.{name})" for name in names)
    return reader.sql(
        f"SELECT min(t.time_us) / 1e6, {means} FROM {table} s"  # noqa: S608
        f" JOIN tick t ON t.tick = s.id >> {SLOT_BITS} WHERE (s.id & {SLOTS - 1}) = ?"
        " GROUP BY (t.tick - ?) / ? ORDER BY t.tick",
        slot,
        reader.first_tick,
        width,
    )


def _series(rows: Any, names: tuple[str, ...]) -> dict[str, Series]:
    return {name: [(row[0], row[index + 1]) for row in rows] for index, name in enumerate(names)}


def _engines(reader: SessionReader, hide: Anonymizer | None) -> list[EngineSummary]:
    out = []
    for (slot,) in reader.sql("SELECT DISTINCT slot FROM engine_change ORDER BY slot"):
        rank, pid, server, model, version, block_bytes = reader.sql(
            "SELECT engine, pid, server, model, vllm_version, block_bytes FROM engine_change"
            " WHERE slot = ? ORDER BY rowid DESC LIMIT 1",
            slot,
        )[0]
        if hide is not None:
            server = hide.server(server)
            model = None if model is None else hide.name("model", model)
        parts = [f"engine {'-' if rank is None else rank}", server, model]
        parts += [f"pid {pid}" if pid is not None else None]
        parts += [f"vLLM {version}" if version is not None else None]
        preemptions, failures, hits = reader.sql(
            "SELECT max(probe_preemptions_total) - min(probe_preemptions_total),"
            " max(alloc_failures_total) - min(alloc_failures_total), avg(prefix_hit_percent)"
            " FROM engine_sample WHERE (id & ?) = ?",
            SLOTS - 1,
            slot,
        )[0]
        rows = _bucketed(reader, "engine_sample", slot, _ENGINE_SERIES)
        out.append(
            EngineSummary(
                title="  ".join(part for part in parts if part),
                series=_series(rows, _ENGINE_SERIES),
                block_bytes=block_bytes,
                preemptions=preemptions,
                alloc_failures=failures,
                hit_percent=hits,
            )
        )
    return out


def _gpus(reader: SessionReader) -> list[tuple[str, dict[str, Series], int | None]]:
    names = ("mem_used_bytes", "util_percent", "power_w")
    out = []
    for slot, index, name, total in reader.sql(
        "SELECT slot, gpu, name, mem_total_bytes FROM gpu_change WHERE rowid IN"
        " (SELECT max(rowid) FROM gpu_change GROUP BY slot) ORDER BY slot"
    ):
        rows = _bucketed(reader, "gpu_sample", slot, names)
        out.append((f"GPU {index} {name or ''}".strip(), _series(rows, names), total))
    return out


def _judge(reader: SessionReader, judge: Judge, hide: Anonymizer | None, out: Summary) -> None:
    step = max(1, -(-out.ticks // MOST_JUDGED))
    out.judged_every = step
    spans: dict[tuple[str, int | None, str], FindingSpan] = {}
    for tick in range(reader.first_tick, reader.last_tick + 1, step):
        snapshot = reader.load(tick)
        if hide is not None:
            snapshot = hide.snapshot(snapshot)
        for finding in judge(snapshot):
            key = (finding.rule, finding.engine_pid, " ".join(finding.request_ids[:1]))
            span = spans.get(key)
            if span is None:
                spans[key] = FindingSpan(finding, snapshot.time_s, snapshot.time_s)
            else:
                span.finding, span.last_s = finding, snapshot.time_s
    rank = {"critical": 0, "warning": 1}
    out.findings = sorted(
        spans.values(), key=lambda span: (rank.get(span.finding.severity, 2), span.first_s)
    )


def _requests(reader: SessionReader, hide: Anonymizer | None, *, longest: bool) -> list[RequestRow]:
    rows = reader.sql(
        "SELECT n.id, t.time_us / 1e6, (e.time_us - t.time_us) / 1e6, l.peak_blocks,"
        " l.block_seconds, l.preemptions FROM request_life l"
        " JOIN request_name n ON n.request = l.request"
        " LEFT JOIN tick t ON t.tick = max(n.first_tick, ?)"
        " LEFT JOIN tick e ON e.tick = l.last_tick"
        " ORDER BY CASE WHEN ? THEN l.last_tick - n.first_tick ELSE l.block_seconds END DESC"
        " LIMIT ?",
        reader.first_tick,
        longest,
        TOP,
    )
    return [RequestRow(hide.name("request", row[0]) if hide else row[0], *row[1:]) for row in rows]


def _stacks(reader: SessionReader, hide: Anonymizer | None) -> list[tuple[str, str, float]]:
    rows = reader.sql(
        "SELECT f.name, f.file, f.line, avg(s.self_percent) AS share FROM stack_sample s"
        " JOIN function f ON f.function = s.function GROUP BY f.name, f.file"
        " ORDER BY share DESC LIMIT ?",
        TOP,
    )
    out = []
    for name, file, line, share in rows:
        place = hide.path(file) if hide else file
        out.append((name, place if line is None else f"{place}:{line}", share or 0.0))
    return out
