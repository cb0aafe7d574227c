"""Tables and views of a session file.

Views for people: `gpu`, `engine`, `request`, `source`, `stack`, `marker`, `capture` and more,
each with times in UTC. Tables for kvtop: what changed at each tick (`frame`, `block_frame`, see
`session.frames`), from which the exact snapshots come back.
"""

from __future__ import annotations

import dataclasses

from kvtop.session import numbers

SLOT_BITS = 10
"""A sample's id is `tick << SLOT_BITS | slot`: appended in order, found by tick."""
SLOTS = 1 << SLOT_BITS

_TIME = "strftime('%Y-%m-%dT%H:%M:%S', t.time_us / 1000000, 'unixepoch')"
_UTC = f"{_TIME} || printf('.%06dZ', t.time_us % 1000000) AS time_utc"


def _list(columns: tuple[numbers.Column, ...]) -> str:
    return ", ".join(f"s.{column.name}" for column in columns)


TABLES_SQL = f"""
CREATE TABLE meta(name TEXT PRIMARY KEY, value);
CREATE TABLE tick(tick INTEGER PRIMARY KEY, time_us INTEGER NOT NULL, mono_us INTEGER NOT NULL,
    key_tick INTEGER NOT NULL);
CREATE INDEX tick_time ON tick(time_us);
CREATE TABLE frame(tick INTEGER PRIMARY KEY, state BLOB NOT NULL, requests BLOB NOT NULL);
CREATE TABLE block_frame(tick INTEGER PRIMARY KEY, columns BLOB NOT NULL);
CREATE TABLE gpu_sample(id INTEGER PRIMARY KEY, {numbers.ddl(numbers.GPU_COLUMNS)});
CREATE TABLE gpu_change(tick INTEGER NOT NULL, slot INTEGER NOT NULL, gpu INTEGER, uuid TEXT,
    name TEXT, mem_total_bytes INTEGER, power_limit_w REAL, simulated INTEGER, error TEXT);
CREATE TABLE gpu_process(tick INTEGER NOT NULL, slot INTEGER NOT NULL, pid INTEGER,
    command TEXT, mem_bytes INTEGER, engine_pid INTEGER);
CREATE TABLE engine_sample(id INTEGER PRIMARY KEY, {numbers.ddl(numbers.ENGINE_COLUMNS)});
CREATE TABLE engine_change(tick INTEGER NOT NULL, slot INTEGER NOT NULL, engine INTEGER,
    pid INTEGER, server TEXT, alive INTEGER, state TEXT, model TEXT, vllm_version TEXT,
    block_size_tokens INTEGER, block_bytes INTEGER, max_model_len_tokens INTEGER,
    max_num_seqs INTEGER, prefix_caching INTEGER, simulated INTEGER);
CREATE TABLE request_name(request INTEGER PRIMARY KEY, slot INTEGER NOT NULL,
    first_tick INTEGER NOT NULL, id TEXT NOT NULL);
CREATE TABLE request_life(request INTEGER PRIMARY KEY, last_tick INTEGER NOT NULL,
    ended INTEGER NOT NULL, first_run_tick INTEGER, first_decode_tick INTEGER,
    arrival_us INTEGER, prompt_tokens INTEGER, output_tokens INTEGER,
    max_tokens INTEGER, cached_tokens INTEGER, peak_blocks INTEGER,
    block_seconds INTEGER, preemptions INTEGER, lora TEXT);
CREATE TABLE request_event(tick INTEGER NOT NULL, request INTEGER NOT NULL, was TEXT,
    phase TEXT NOT NULL, blocks_before INTEGER, owed_blocks INTEGER);
CREATE TABLE request_sample(tick INTEGER NOT NULL, request INTEGER NOT NULL,
    blocks INTEGER, shared_blocks INTEGER, computed_tokens INTEGER, output_tokens INTEGER);
CREATE TABLE source_change(tick INTEGER NOT NULL, name TEXT NOT NULL, kind TEXT, state TEXT,
    since_s REAL, reason TEXT, remedy TEXT);
CREATE TABLE function(function INTEGER PRIMARY KEY, name TEXT, file TEXT, line INTEGER,
    thread TEXT);
CREATE TABLE stack_sample(tick INTEGER NOT NULL, pid INTEGER, role TEXT, samples INTEGER,
    function INTEGER, self_percent REAL, total_percent REAL);
CREATE TABLE marker_note(marker INTEGER PRIMARY KEY, tick INTEGER NOT NULL,
    time_us INTEGER NOT NULL, note TEXT NOT NULL);
CREATE TABLE detail(tick INTEGER NOT NULL, engine_pid INTEGER, request_id TEXT NOT NULL,
    json BLOB NOT NULL);
CREATE INDEX detail_request ON detail(request_id, tick);
CREATE TABLE flame_capture(capture INTEGER PRIMARY KEY, tick INTEGER NOT NULL,
    time_us INTEGER NOT NULL, pid INTEGER NOT NULL, pids TEXT NOT NULL, seconds REAL,
    rate_hz INTEGER, mode TEXT, why TEXT, outcome TEXT NOT NULL, samples INTEGER,
    errors INTEGER, left_out INTEGER, folded BLOB);
"""
"""The tables of a new file. Column units are in the names; `_us` is microseconds since 1970,
UTC (`mono_us`: of the monotonic clock), `_total` counts since the probe or server started.
`detail.json` is raw deflate of JSON (plain JSON in format 1), `flame_capture.folded` (since
format 2) zlib of folded stacks."""


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """A view for people, and how to read it in parts."""

    select: str
    """Its columns."""
    source: str
    """Its FROM clause; no WHERE."""
    key: str
    """Column that it is read along."""
    shift: int = 0
    """Bits that the key is above the tick, or above the number of the request."""


def _sampled(change: str, table: str) -> str:
    return (
        f"{table} s JOIN tick t ON t.tick = s.id >> {SLOT_BITS} JOIN {change} c ON c.rowid ="  # noqa: S608
        f" (SELECT max(rowid) FROM {change} WHERE slot = (s.id & {SLOTS - 1}) AND tick <= t.tick)"
    )


VIEWS = {
    "engine": View(
        f"t.tick, {_UTC}, c.engine, c.pid, c.server, c.model, c.state, c.block_size_tokens,"
        f" c.block_bytes, {_list(numbers.ENGINE_COLUMNS)}",
        _sampled("engine_change", "engine_sample"),
        "s.id",
        SLOT_BITS,
    ),
    "gpu": View(
        f"t.tick, {_UTC}, c.gpu, c.name, c.uuid, c.mem_total_bytes, c.power_limit_w,"
        f" {_list(numbers.GPU_COLUMNS)}",
        _sampled("gpu_change", "gpu_sample"),
        "s.id",
        SLOT_BITS,
    ),
    "request": View(
        "n.request, n.id, n.slot, n.first_tick, t.time_us AS first_us, l.last_tick,"
        " e.time_us AS last_us, l.ended, l.first_run_tick, l.first_decode_tick, l.arrival_us,"
        " l.prompt_tokens, l.output_tokens, l.max_tokens, l.cached_tokens, l.peak_blocks,"
        " l.block_seconds, l.preemptions, l.lora",
        "request_name n LEFT JOIN tick t ON t.tick = n.first_tick"
        " LEFT JOIN request_life l ON l.request = n.request"
        " LEFT JOIN tick e ON e.tick = l.last_tick",
        "n.request",
    ),
    "sample": View(
        f"t.tick, {_UTC}, s.request, n.id, s.blocks, s.shared_blocks, s.computed_tokens,"
        " s.output_tokens",
        "request_sample s JOIN tick t ON t.tick = s.tick"
        " LEFT JOIN request_name n ON n.request = s.request",
        "s.tick",
    ),
    "event": View(
        f"t.tick, {_UTC}, s.request, n.id, s.was, s.phase, s.blocks_before, s.owed_blocks",
        "request_event s JOIN tick t ON t.tick = s.tick"
        " LEFT JOIN request_name n ON n.request = s.request",
        "s.tick",
    ),
    "source": View(
        f"t.tick, {_UTC}, c.name, c.kind, c.state, c.since_s, c.reason, c.remedy",
        "source_change c JOIN tick t ON t.tick = c.tick",
        "c.tick",
    ),
    "process": View(
        f"t.tick, {_UTC}, c.slot AS gpu, c.pid, c.command, c.mem_bytes, c.engine_pid",
        "gpu_process c JOIN tick t ON t.tick = c.tick",
        "c.tick",
    ),
    "stack": View(
        f"t.tick, {_UTC}, s.pid, s.role, s.samples, f.name AS function, f.file, f.line,"
        " f.thread, s.self_percent, s.total_percent",
        "stack_sample s JOIN tick t ON t.tick = s.tick JOIN function f ON f.function = s.function",
        "s.tick",
    ),
    "marker": View(f"t.tick, {_UTC}, t.marker, t.note", "marker_note t", "t.tick"),
    "capture": View(
        f"t.tick, {_UTC}, t.capture, t.pid, t.pids, t.seconds, t.rate_hz, t.mode, t.why,"
        " t.outcome, t.samples, t.errors, t.left_out, t.folded",
        "flame_capture t",
        "t.tick",
    ),
}
"""By name. `request` has one row a request; `sample` and `process` and `stack` are looks a
few minutes apart; what every tick held is in the frames (`kvtop export --json`)."""


def schema_sql() -> list[str]:
    """The statements that make an empty file."""
    views = [
        f"CREATE VIEW {name} AS SELECT {view.select} FROM {view.source}"  # noqa: S608
        for name, view in VIEWS.items()
    ]
    return [part for part in TABLES_SQL.split(";\n") if part.strip()] + views
