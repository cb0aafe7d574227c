"""A session as Trace Event JSON, which Perfetto and Chrome's tracing page open.

Engines and GPUs are processes. A request is an asynchronous slice from its first to its
last tick, with its phases nested inside; blocks and GPU figures are counters, preemptions,
captures of stacks and markers are instants. Times are microseconds since 1970, UTC.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kvtop.session import tables
from kvtop.session.anonymize import Anonymizer
from kvtop.session.reader import SessionReader
from kvtop.session.schema import SLOT_BITS, SLOTS
from kvtop.session.text import plain

_GPU_PID = 100_000
_BLOCKS = ("free", "cached", "used", "shared", "held", "ghost")
_ENGINE_COUNTERS = {
    "requests": ("running", "waiting"),
    "KV use %": ("kv_used_percent",),
    "prefix hits %": ("prefix_hit_percent",),
    "tokens/s": ("prompt_tokens_s", "generation_tokens_s"),
}
_GPU_COUNTERS = ("mem_used_bytes", "util_percent", "power_w", "temperature_c")

Item = dict[str, Any]


def trace_events(reader: SessionReader, anonymizer: Anonymizer | None = None) -> Iterator[Item]:
    """The events of a session.

    Args:
        reader: The file.
        anonymizer: Applied to every text. None: as recorded.
    """
    yield from _names(reader, anonymizer)
    yield from _counters(reader)
    yield from _requests(reader, anonymizer)
    yield from _preemptions(reader, anonymizer)
    yield from _captures(reader)
    for marker in reader.markers():
        note = anonymizer.text(marker.note) if anonymizer else marker.note
        yield {
            "ph": "i",
            "s": "g",
            "name": f"marker {plain(note)}".strip(),
            "ts": round(marker.time_s * 1e6),
            "pid": 1,
            "tid": 0,
        }


def _captures(reader: SessionReader) -> Iterator[Item]:
    for capture in reader.captures():
        tick = max(capture.tick, reader.first_tick)
        yield {
            "ph": "i",
            "s": "g",
            "name": f"stacks of pid {capture.pid}",
            "ts": round(reader.time_of(tick) * 1e6),
            "pid": 1,
            "tid": 0,
            "args": {"samples": capture.samples, "seconds": capture.seconds},
        }


def trace_text(reader: SessionReader, anonymizer: Anonymizer | None = None) -> Iterator[str]:
    """The trace as pieces of one JSON document."""
    yield '{"displayTimeUnit":"ms","traceEvents":['
    between = "\n"
    for event in trace_events(reader, anonymizer):
        yield between + json.dumps(event, separators=(",", ":"), allow_nan=False)
        between = ",\n"
    yield "\n]}\n"


def _name(pid: int, name: str) -> Item:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def _names(reader: SessionReader, anonymizer: Anonymizer | None) -> Iterator[Item]:
    seen = {}
    for slot, engine, pid, model in reader.sql(
        "SELECT slot, engine, pid, model FROM engine_change ORDER BY rowid"
    ):
        shown = model if model is None or anonymizer is None else anonymizer.name("model", model)
        seen[slot] = f"engine {'-' if engine is None else engine} pid {pid} {shown or ''}".strip()
    for slot, text in seen.items():
        yield _name(slot + 1, plain(text))
    gpus = dict(reader.sql("SELECT slot, gpu || ' ' || coalesce(name, '') FROM gpu_change"))
    for slot, text in gpus.items():
        yield _name(_GPU_PID + slot, plain(f"GPU {text}"))


def _counters(reader: SessionReader) -> Iterator[Item]:
    wanted = [f"blocks_{name}" for name in _BLOCKS]
    wanted += [name for names in _ENGINE_COUNTERS.values() for name in names]
    for time_us, slot, values in _samples(reader, "engine_sample", wanted):
        pid = slot + 1
        blocks = {name: values[f"blocks_{name}"] for name in _BLOCKS}
        if blocks["free"] is not None:
            yield _counter(pid, "KV blocks", time_us, blocks)
        for title, names in _ENGINE_COUNTERS.items():
            known = {name: values[name] for name in names if values[name] is not None}
            if known:
                yield _counter(pid, title, time_us, known)
    for time_us, slot, values in _samples(reader, "gpu_sample", list(_GPU_COUNTERS)):
        for name in _GPU_COUNTERS:
            if values[name] is not None:
                yield _counter(_GPU_PID + slot, name, time_us, {name: values[name]})


def _samples(
    reader: SessionReader, table: str, wanted: list[str]
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    part = 1000
    for first in range(reader.first_tick, reader.last_tick + 1, part):
        for row in reader.sql(
            f"SELECT t.time_us, s.id & {SLOTS - 1}, {', '.join(wanted)} FROM {table} s"  # noqa: S608
            f" JOIN tick t ON t.tick = s.id >> {SLOT_BITS} WHERE s.id >= ? AND s.id < ?"
            " ORDER BY s.id",
            first << SLOT_BITS,
            (first + part) << SLOT_BITS,
        ):
            yield row[0], row[1], dict(zip(wanted, row[2:], strict=True))


def _counter(pid: int, name: str, time_us: int, values: dict[str, Any]) -> Item:
    return {"ph": "C", "name": name, "ts": time_us, "pid": pid, "tid": 0, "args": values}


def _requests(reader: SessionReader, anonymizer: Anonymizer | None) -> Iterator[Item]:
    names = [name for name, _ in tables.columns(reader, "request")]
    times: dict[int, int] = {}
    end_us = round(reader.last_s * 1e6)

    def time_us(tick: int | None) -> int | None:
        if tick is None:
            return None
        if tick not in times:
            found = reader.sql("SELECT time_us FROM tick WHERE tick = ?", tick)
            if len(times) > 10_000:
                times.clear()
            times[tick] = found[0][0] if found else round(reader.first_s * 1e6)
        return times[tick]

    for row in tables.rows(reader, "request", anonymizer):
        life = dict(zip(names, row, strict=True))
        first = life["first_us"] or time_us(life["first_tick"]) or 0
        last = life["last_us"] or end_us
        base: Item = {
            "cat": "request",
            # Of its process: with a plain id Perfetto shows it outside of all processes.
            "id2": {"local": hex(life["request"])},
            "pid": life["slot"] + 1,
            "tid": 0,
        }
        arguments = {
            key: life[key]
            for key in ("prompt_tokens", "output_tokens", "peak_blocks", "preemptions")
            if life[key] is not None
        }
        title = plain(life["id"])
        yield {**base, "ph": "b", "name": title, "ts": first, "args": arguments}
        runs, decodes = time_us(life["first_run_tick"]), time_us(life["first_decode_tick"])
        edges = [("waiting", first), ("prefill", runs), ("decode", decodes)]
        known = [(name, start) for name, start in edges if start is not None]
        ends = [start for _, start in known[1:]] + [last]
        for (name, start), end in zip(known, ends, strict=True):
            if end > start:
                yield {**base, "ph": "b", "name": name, "ts": start}
                yield {**base, "ph": "e", "name": name, "ts": end}
        yield {**base, "ph": "e", "name": title, "ts": last}


def _preemptions(reader: SessionReader, anonymizer: Anonymizer | None) -> Iterator[Item]:
    for time_us, slot, name, blocks in reader.sql(
        "SELECT t.time_us, n.slot, n.id, e.blocks_before FROM request_event e"
        " JOIN tick t ON t.tick = e.tick JOIN request_name n ON n.request = e.request"
        " WHERE e.phase = 'preempted' ORDER BY e.rowid"
    ):
        shown = anonymizer.name("request", name) if anonymizer else name
        yield {
            "ph": "i",
            "s": "p",
            "name": f"preempted {plain(shown)}",
            "ts": time_us,
            "pid": slot + 1,
            "tid": 0,
            "args": {} if blocks is None else {"blocks": blocks},
        }
