"""The moments of a session that are worth a look."""

from __future__ import annotations

from dataclasses import dataclass

from kvtop.model.capture import OK
from kvtop.session.format import damage
from kvtop.session.reader import SessionReader
from kvtop.session.schema import SLOT_BITS, SLOTS


@dataclass(frozen=True, slots=True)
class Event:
    """A moment worth a look, for the timeline."""

    tick: int
    """Tick at that moment."""
    time_s: float
    """When."""
    kind: str
    """`marker`, `stacks`, `preemption`, `restart`, `source`, `gap`."""
    text: str
    """One plain line; parts may come from outside."""


def timeline(reader: SessionReader) -> list[Event]:
    """Markers, preemptions, restarts, source changes and gaps, in order.

    Findings are not here: they are judged from the snapshots.
    """
    with damage(reader.path, "its timeline"):
        return sorted(_all(reader), key=lambda event: (event.tick, event.kind))


def _all(reader: SessionReader) -> list[Event]:
    out = [Event(m.tick, m.time_s, "marker", m.note) for m in reader.markers()]
    out += _captures(reader)
    out += _preemptions(reader)
    out += _restarts(reader)
    for tick, time_us, name, state, reason in reader.sql(
        "SELECT c.tick, t.time_us, c.name, c.state, c.reason FROM source_change c"
        " JOIN tick t USING (tick) WHERE c.state IN ('failed', 'stale') ORDER BY c.tick"
    ):
        out.append(Event(tick, time_us / 1e6, "source", f"{name} {state}: {reason}"))
    out += _gaps(reader)
    return out


def _captures(reader: SessionReader) -> list[Event]:
    out = []
    for capture in reader.captures():
        text = f"stacks of pid {capture.pid}"
        if capture.outcome == OK:
            text += f": {capture.samples:,} samples in {capture.seconds:.0f} s"
        else:
            text += f": none, {capture.outcome}"
        tick = max(capture.tick, reader.first_tick)
        out.append(Event(tick, reader.time_of(tick), "stacks", text))
    return out


def _preemptions(reader: SessionReader) -> list[Event]:
    rows = reader.sql(
        "SELECT t.tick, s.id & ?, t.time_us,"
        " coalesce(s.probe_preemptions_total, s.preemptions_total)"
        " FROM engine_sample s JOIN tick t ON t.tick = s.id >> ? ORDER BY s.id",
        SLOTS - 1,
        SLOT_BITS,
    )
    out = []
    last: dict[int, float] = {}
    # A new process counts from zero: what it has at its first tick says nothing.
    begins = set(reader.sql("SELECT tick, slot FROM engine_change"))
    for tick, slot, time_us, total in rows:
        if total is None:
            continue
        if (tick, slot) in begins and total < last.get(slot, 0):
            last.pop(slot)
        more = total - last.get(slot, total)
        last[slot] = total
        if more > 0:
            text = "1 preemption" if more == 1 else f"{more:.0f} preemptions"
            out.append(Event(tick, time_us / 1e6, "preemption", text))
    return out


def _restarts(reader: SessionReader) -> list[Event]:
    out = []
    seen: dict[tuple[int, str], tuple[int | None, bool]] = {}
    for tick, time_us, slot, server, pid, alive in reader.sql(
        "SELECT c.tick, t.time_us, c.slot, c.server, c.pid, c.alive FROM engine_change c"
        " JOIN tick t USING (tick) ORDER BY c.rowid"
    ):
        before = seen.get((slot, server))
        seen[slot, server] = (pid, bool(alive))
        if before is not None and before[1] and not alive:
            out.append(Event(tick, time_us / 1e6, "restart", f"engine {pid} is gone"))
        elif before is not None and before[0] != pid:
            out.append(Event(tick, time_us / 1e6, "restart", f"engine is now pid {pid}"))
    return out


def _gaps(reader: SessionReader) -> list[Event]:
    interval = reader.info.interval_s or 1.0
    rows = reader.sql(
        "SELECT b.tick, b.time_us, b.mono_us - a.mono_us FROM tick b"
        " JOIN tick a ON a.tick = b.tick - 1 WHERE b.mono_us - a.mono_us > ?",
        round(max(5 * interval, 5.0) * 1e6),
    )
    return [
        Event(tick, time_us / 1e6, "gap", f"nothing recorded for {lost / 1e6:.0f} s before")
        for tick, time_us, lost in rows
    ]
