"""The lines around the panels: header, footer, the list of sources, the empty screen."""

from __future__ import annotations

from collections.abc import Sequence

from kvtop.draw.numbers import clock, count, duration
from kvtop.draw.pick import RANK, engine_of, now, source_of, why
from kvtop.draw.text import (
    DASH,
    Field,
    block,
    choose,
    clip,
    fields,
    fit,
    line_width,
    pad,
    safe,
    wrap,
)
from kvtop.draw.view import Line, Run, View
from kvtop.model.snapshot import Engine, Snapshot, SourceState, SourceStatus

_STATE_STYLES = {
    SourceState.OK: "ok",
    SourceState.STARTING: "dim",
    SourceState.STALE: "warn",
    SourceState.FAILED: "crit",
    SourceState.OFF: "dim",
}
_STUCK_S = 5.0
"""From this age of the last step on, the header says it; steps take milliseconds."""


def header(snap: Snapshot, view: View, width: int) -> Line:
    """First line of the screen: what is watched, and whether it can be believed.

    Args:
        snap: What is on screen.
        view: What the user chose.
        width: Cells.
    """
    left: list[Field] = [(5, ((f"kvtop {safe(snap.version, view.ascii)}", "header"),))]
    engine = engine_of(snap, view)
    if engine is None:
        left.append((3, (("no vLLM server found", "warn"),)))
    else:
        left += _engine_fields(snap, view, engine)
    right: list[Field] = []
    if snap.demo or (engine is not None and engine.simulated):
        right.append((0, ((" DEMO ", "demo"),)))
    if view.player is not None:
        right.append((0, ((" REPLAY ", "demo"),)))
    if view.recording:
        right.append((1, ((f" {safe(view.recording, view.ascii)} ", "rec"),)))
    if snap.dropped > 0:
        right.append((2, ((f"{count(snap.dropped)} not recorded", "warn"),)))
    if view.paused:
        right.append((0, ((" PAUSED ", "paused"),)))
    right.append((4, ((clock(snap.time_s), ""),)))
    # One list decides what stays; the right-hand part then goes to the right edge.
    kept = choose([*left, *right], width)
    starts = fields([part for part in kept if part in left], width)
    ends = fields([part for part in kept if part in right], width)
    space = width - line_width(starts) - line_width(ends)
    return fit((*starts, (" " * max(space, 0), ""), *ends), width)


def _engine_fields(snap: Snapshot, view: View, engine: Engine) -> list[Field]:
    parts: list[Field] = []
    if engine.model:
        parts.append((3, ((clip(safe(engine.model, view.ascii), 40, view.ascii), "header"),)))
    parts.append((7, ((f"vLLM {safe(engine.vllm_version or '-', view.ascii)}", ""),)))
    number = "-" if engine.engine is None else str(engine.engine)
    several = f" ({view.engine % len(snap.engines) + 1} of {len(snap.engines)})"
    text = f"engine {number}" + (several if len(snap.engines) > 1 else "")
    parts.append((4 if len(snap.engines) > 1 else 8, ((text, ""),)))
    parts.append((6, ((f"pid {'-' if engine.pid is None else engine.pid}", ""),)))
    trouble = _trouble(engine)
    if trouble:
        parts.append((0, ((trouble, "crit"),)))
    elif engine.state and engine.state not in ("running", "idle"):
        parts.append((1, ((safe(engine.state, view.ascii), "warn"),)))
    elif engine.state:
        parts.append((9, ((safe(engine.state, view.ascii), "label"),)))
    parts.append((2, _probe(snap, view, engine)))
    if view.player is None:
        parts.append((10, ((f"every {view.interval_s:g}s", "label"),)))
    return parts


def _trouble(engine: Engine) -> str:
    """Why the engine's figures may not move, as far as it can be read directly."""
    if not engine.alive or engine.state == "gone":
        return "GONE"
    if engine.process_state in ("T", "t"):
        return "STOPPED (SIGSTOP)"
    if engine.process_state == "Z":
        return "ZOMBIE PROCESS"
    age = engine.probe.step_age_s if engine.probe is not None else None
    if engine.state == "running" and age is not None and age >= _STUCK_S:
        return f"no step for {duration(age)}"
    return ""


def _probe(snap: Snapshot, view: View, engine: Engine) -> Line:
    source = source_of(snap, "engine", engine)
    if source is not None and source.state in (SourceState.FAILED, SourceState.STALE):
        since = source.value_time_s if source.value_time_s is not None else source.since_s
        age = duration(now(snap, view) - since)
        return ((f"probe {source.state.value.upper()} {age}", "crit"),)
    if engine.probe is None:
        starting = source is not None and source.state is SourceState.STARTING
        return (("probe starting", "dim"),) if starting else (("no probe", "warn"),)
    if engine.probe.errors:
        return ((f"probe {count(engine.probe.errors)} errors", "warn"),)
    return (("probe ", ""), ("ok", "ok"))


def footer(_snap: Snapshot, view: View, width: int, keys: Sequence[tuple[str, str]]) -> Line:
    """Last line of the screen: the search being typed, a message, or the keys.

    Args:
        _snap: Not needed; every part of the screen has the same first arguments.
        view: What the user chose.
        width: Cells.
        keys: Key and its short label, the most important first.
    """
    if view.search_open:
        # The end of a long text is where the typing is.
        text = safe(view.search, view.ascii)
        while text and line_width(((text, ""),)) > width - 2:
            text = text[1:]
        return fit((("/", "search"), (text, ""), ("_", "search")), width)
    if view.message:
        text = clip(safe(view.message, view.ascii), width, view.ascii)
        return fit(((text, "message"),), width)
    parts: list[Field] = [
        # Without colours only the spaces tell a key from its label.
        (at, ((key, "key"), (f" {label}", "key.label")))
        for at, (key, label) in enumerate(keys)
    ]
    # Where not even one fits, the beginning of the first is better than an empty line.
    return fit(fields(parts, width, "  ") or (parts[0][1] if parts else ()), width)


def nothing_found(snap: Snapshot, view: View, width: int, height: int) -> list[Line]:
    """The screen while there is no engine: what was looked for, and that it goes on."""
    source = source_of(snap, "discovery")
    lines: list[Line] = [(("No vLLM server found on this machine.", "warn"),), ()]
    said = why(source, view.ascii)
    # The source of discovery says what it looked for; its own verdict is the line above.
    _, found, looked = said.partition("looked for ")
    if not found:
        looked = said or "processes of vLLM, ports that answer /metrics, and kvtop probe sockets"
    lines += [((line, ""),) for line in wrap(f"Looked for: {looked}", width)]
    every = source.period_s if source is not None else None
    text = "Still looking" + (f", every {duration(every)}" if every else "")
    lines.append(())
    lines += [((line, ""),) for line in wrap(f"{text}; this screen comes alive by itself.", width)]
    hint = "Another host or port: kvtop --url http://HOST:PORT    To try it out: kvtop demo"
    lines += [((line, "dim"),) for line in wrap(hint, width)]
    others = [other for other in snap.sources if other.kind != "discovery"]
    if others:
        lines.append(())
        for other in others:
            lines += _source_lines(other, snap, view, width)
    top = max((height - len(lines)) // 3, 0)
    return block([*[()] * top, *_wrapped(lines, width)], width, height)


def _wrapped(lines: list[Line], width: int) -> list[Line]:
    """Single-run lines broken where they are too long; others as they are."""
    out: list[Line] = []
    for line in lines:
        if len(line) == 1 and line_width(line) > width:
            out += [((text, line[0][1]),) for text in wrap(line[0][0], width)]
        else:
            out.append(line)
    return out


def sources_panel(snap: Snapshot, view: View, width: int, height: int) -> list[Line]:
    """Every source with its state, the age of its value, and what to do; the worst first."""
    lines: list[Line] = []
    for source in sorted(snap.sources, key=lambda source: RANK[source.state]):
        lines += _source_lines(source, snap, view, width)
    engine = engine_of(snap, view)
    for other in snap.engines:
        asked = any(s.kind == "engine" and s.target_pid == other.pid for s in snap.sources)
        if other.pid is not None and other.probe is None and not asked:
            lines.append(((pad(f"engine {other.pid}", 30), ""), ("  ", ""), ("no probe", "warn")))
            said = safe(other.probe_reason, view.ascii)
            lines += [((f"  {line}", "label"),) for line in wrap(said, max(width - 2, 1)) if said]
    if engine is not None and engine.probe is not None:
        probe = engine.probe
        cost = f"probe {safe(probe.version, view.ascii)}: step {count(probe.step)}"
        cost += f", cut at {safe(probe.point, view.ascii)}, {count(probe.scan_us)} us a cut"
        share = DASH if probe.cost_percent is None else f"{probe.cost_percent:.2f}"
        cost += f", {share} % of the engine's thread"
        if probe.missing:
            cost += "; not available: " + safe(", ".join(probe.missing), view.ascii)
        lines += [((line, ""),) for line in wrap(cost, width)]
    if not lines:
        lines = [(("no sources yet", "dim"),)]
    offset = max(0, min(view.scroll.get("sources", 0), len(lines) - height))
    return block(lines[offset:], width, height)


def _source_lines(source: SourceStatus, snap: Snapshot, view: View, width: int) -> list[Line]:
    moment = now(snap, view)
    name = clip(safe(source.name, view.ascii), 30, view.ascii)
    age = "-" if source.value_time_s is None else duration(moment - source.value_time_s)
    value: Run = (f"value {age} old" if source.value_time_s is not None else "no value", "label")
    parts: list[Field] = [
        (1, ((pad(name, 30), ""),) if width >= 60 else ((name, ""),)),
        (0, ((pad(source.state.value, 8), _STATE_STYLES[source.state]),)),
        (3, ((f"for {duration(moment - source.since_s)}", "label"),)),
        (2, (value,)),
    ]
    if source.period_s is not None:
        parts.append((4, ((f"every {duration(source.period_s)}", "label"),)))
    reason = why(source, view.ascii)
    below = wrap(reason, max(width - 2, 1)) if reason else []
    return [fields(parts, width), *(((f"  {line}", "label"),) for line in below)]
