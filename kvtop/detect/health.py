"""Is the engine at work, at rest, or stuck: told apart by evidence."""

from __future__ import annotations

from kvtop.detect.engine_track import EngineTrack
from kvtop.detect.rule import NOTHING, Candidate, Verdict, count, duration
from kvtop.detect.thresholds import Thresholds
from kvtop.detect.track import Track
from kvtop.model.snapshot import Frame, SourceState

_AT_REST = ("paused", "sleeping", "starting", "gone")
_REPEATS_S = 12.0
_COMPILE = ("_dynamo", "_inductor", "torch/_compile", "triton/compiler", "cudagraph", "cuda_graph")


def _work(engine: EngineTrack) -> int | None:
    """Requests that the engine could do something for. None: not known."""
    if engine.engine.requests is None:
        return None
    totals = engine.requests.totals
    return (
        len(totals.running)
        + len(totals.waiting)
        + sum(r.reason not in ("streaming", "paused") for r in totals.deferred)
    )


def _inside_a_step(track: Track, engine: EngineTrack, step_age_s: float) -> bool:
    """Whether the engine went into a step after the newest cut and has not come out.

    An engine at rest gives a new cut whenever it is asked; one that answers with an old cut
    is inside a scheduler call. The probe may also save its time and repeat a cut, for ten
    seconds at most.
    """
    cut_age_s = track.mono_s - engine.cut_mono_s
    return cut_age_s >= _REPEATS_S and step_age_s <= cut_age_s + 2.0


def _top_frame(track: Track, engine: EngineTrack) -> Frame | None:
    pid = engine.engine.pid
    stacks = track.stacks.get(pid) if pid is not None else None
    return stacks.frames[0] if stacks and stacks.frames else None


def _frame_text(frame: Frame | None) -> str:
    if frame is None:
        return "not sampled"
    line = "" if frame.line is None else f":{frame.line}"
    return f"{frame.function} ({frame.file}{line})"


def is_compiling(track: Track, engine: EngineTrack) -> bool:
    """Whether fresh stacks show a compiler at work in the engine or its workers."""
    pids = (engine.engine.pid, *engine.engine.worker_pids)
    return any(
        any(word in frame.file for word in _COMPILE)
        for pid in pids
        if pid is not None and pid in track.stacks
        for frame in track.stacks[pid].frames
        if frame.total_percent >= 20.0
    )


def stopped(_track: Track, engine: EngineTrack, _limits: Thresholds) -> Verdict:
    """The engine's process is stopped by a signal or a debugger."""
    state = engine.engine.process_state
    if state is None or not engine.engine.alive:
        return None
    if state not in ("T", "t"):
        return NOTHING
    by = "a signal" if state == "T" else "a debugger or a profiler"
    return (
        Candidate(
            summary=f"The engine core is stopped by {by}. It serves nothing, while /health may "
            "still answer 200.",
            evidence={"process state": state, "pid": str(engine.engine.pid or "-")},
        ),
    )


def stalled(track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """Work to do and no scheduler step."""
    if not engine.probe_fresh or engine.engine.probe is None:
        return None
    age_s, work = engine.engine.probe.step_age_s, _work(engine)
    if age_s is None or work is None:
        return None
    inside = _inside_a_step(track, engine, age_s)
    if age_s < limits.stall_s or not (work or inside) or engine.engine.state in _AT_REST:
        return NOTHING
    if is_compiling(track, engine):
        return NOTHING
    frame = _top_frame(track, engine)
    return (
        Candidate(
            summary=(
                f"{count(work, 'request is', 'requests are')} in the engine and it has begun no "
                f"step for {duration(age_s)}."
                if work
                else f"A scheduler step began {duration(age_s)} ago and has not ended."
            )
            + " It is neither paused nor asleep.",
            evidence={
                "no step for": duration(age_s),
                "step": str(engine.step),
                "requests": str(work) if work else "not known: the last cut is older than they are",
                "process state": engine.engine.process_state or "-",
                "top frame": _frame_text(frame),
            },
            since_s=track.now_s - age_s,
        ),
    )


def compiling(track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """No step because something is being compiled."""
    if not engine.probe_fresh or engine.engine.probe is None:
        return None
    age_s = engine.engine.probe.step_age_s
    if age_s is None or not _work(engine) or age_s < limits.stall_s:
        return NOTHING
    if not is_compiling(track, engine):
        return NOTHING
    return (
        Candidate(
            summary=f"No step for {duration(age_s)}: the engine is compiling. "
            "That is slow the first time a shape is seen.",
            evidence={"top frame": _frame_text(_top_frame(track, engine))},
        ),
    )


def at_rest(_track: Track, engine: EngineTrack, _limits: Thresholds) -> Verdict:
    """Paused or asleep: looks like a stall and is none."""
    state = engine.engine.state if engine.probe_fresh else None
    if state is None:
        sleep = engine.metrics.sleep_state if engine.metrics else None
        if sleep is None:
            return None
        state = "sleeping" if sleep != "awake" else "running"
    if state not in ("paused", "sleeping"):
        return NOTHING
    work = _work(engine)
    return (
        Candidate(
            summary=f"The engine is {state}. It was told to be, and goes on when it is told to.",
            subject=state,
            evidence={"state": state, "requests": "-" if work is None else str(work)},
            next_step="Resume it (/resume)." if state == "paused" else "Wake it (/wake_up).",
        ),
    )


def orphan(_track: Track, engine: EngineTrack, _limits: Thresholds) -> Verdict:
    """The engine lives and its API servers are gone."""
    if not engine.discovery_fresh or engine.engine.pid is None:
        return None
    if not engine.engine.alive or engine.engine.api_pids or not engine.had_api:
        return NOTHING
    workers = engine.engine.worker_pids
    pids = " ".join(str(pid) for pid in (engine.engine.pid, *workers))
    return (
        Candidate(
            summary=f"Engine core {engine.engine.pid} lives on although its API server is gone. "
            "It can serve nobody, and keeps its memory.",
            evidence={"engine core": str(engine.engine.pid), "workers": str(len(workers))},
            next_step=f"End it: kill {pids}",
        ),
    )


def dead(track: Track, engine: EngineTrack, _limits: Thresholds) -> Verdict:
    """The engine's process is gone."""
    if engine.engine.pid is None:
        return None
    if engine.engine.alive or not engine.was_alive:
        return NOTHING
    server = engine.engine.server
    snapshot = track.snapshot
    page_ok = engine.metrics_source is not None and engine.metrics_source.state in (
        SourceState.OK,
        SourceState.STALE,
    )
    front = page_ok or any(
        other.server == server and other.pid is None and other.api_pids
        for other in (snapshot.engines if snapshot else ())
    )
    totals = engine.requests.totals
    evidence = {
        "pid": str(engine.engine.pid),
        "API server": "still there" if front else "gone too",
        "requests at the end": str(totals.live) if engine.engine.requests is not None else "-",
    }
    path = engine.engine.last_snapshot
    if path is not None:
        evidence["cause"] = "an exception in the engine core"
        evidence["last snapshot"] = path
    return (
        Candidate(
            summary=f"Engine core {engine.engine.pid} is gone. "
            + (
                "Its API server is still there and can serve nothing."
                if front
                else "Its server is gone as well: "
                + ("stopped, or died together." if path is None else "died together.")
            ),
            evidence=evidence,
            next_step=None
            if path is None
            else f"See how it was as it died: kvtop once --file {path}",
            severity="critical" if front or path is not None else None,
        ),
    )


def stale_gauges(_track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """Gauges claim work and no counter moves."""
    metrics = engine.metrics
    if metrics is None:
        return None
    frozen_s = metrics.gauges_frozen_s
    if frozen_s is None or frozen_s < limits.frozen_s:
        return NOTHING
    work = _work(engine) if engine.probe_fresh else None
    if work:
        return NOTHING
    resting = engine.engine.state in ("paused", "sleeping") or metrics.sleep_state not in (
        None,
        "awake",
    )
    if resting:
        return NOTHING
    evidence = {
        "frozen for": duration(frozen_s),
        "gauge says running": "-" if metrics.running is None else str(metrics.running),
        "gauge says KV use": "-"
        if metrics.kv_used_percent is None
        else f"{metrics.kv_used_percent:.1f} %",
        "engine says": "no requests"
        if work == 0
        else engine.engine.probe_reason or "no probe to ask",
    }
    if work == 0:
        text = "The gauges of /metrics are STALE: the engine itself has no requests."
    else:
        text = (
            "The gauges of /metrics are STALE, or the engine is stuck: they claim work and no "
            f"counter has moved for {duration(frozen_s)}. They prove no leak."
        )
    return (
        Candidate(
            summary=text,
            evidence=evidence,
            # A probe that is in and gives no cut has said why.
            next_step=None
            if work == 0 or engine.engine.probe_reason
            else "Put the probe in (`kvtop attach`): it tells which.",
        ),
    )


def no_metrics(_track: Track, engine: EngineTrack, _limits: Thresholds) -> Verdict:
    """The server's metrics cannot be read, and why."""
    source = engine.metrics_source
    if source is None or not engine.engine.alive or not engine.engine.api_pids:
        return None
    if source.state in (SourceState.OK, SourceState.STALE) and engine.engine.metrics is not None:
        return NOTHING
    if source.state in (SourceState.STARTING, SourceState.OFF):
        return None
    failed = source.state is SourceState.FAILED
    reason = source.reason or "the page has no series of this engine yet"
    return (
        Candidate(
            summary=("/metrics cannot be read: " if failed else "/metrics tells nothing: ")
            + reason
            + ".",
            evidence={"source": source.name, "reason": reason},
            next_step=source.remedy or None,
        ),
    )


def restarted(track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """A new engine has taken the place of another."""
    if engine.restarted_mono_s is None:
        return NOTHING
    if track.mono_s - engine.restarted_mono_s > limits.restart_note_s:
        return NOTHING
    if engine.restarted_from is None:
        return (
            Candidate(
                summary="The server was restarted: its counters began again.",
                evidence={"server": engine.engine.server},
            ),
        )
    return (
        Candidate(
            summary=f"The engine was restarted: pid {engine.engine.pid} took the place of "
            f"{engine.restarted_from}. All counters began again.",
            evidence={"old pid": str(engine.restarted_from), "new pid": str(engine.engine.pid)},
        ),
    )
