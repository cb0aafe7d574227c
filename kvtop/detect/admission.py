"""Requests that wait and are not let in: told apart by who has the places and the blocks."""

from __future__ import annotations

from kvtop.detect.engine_track import EngineTrack
from kvtop.detect.pressure import blocks_needed
from kvtop.detect.rule import NOTHING, Candidate, Verdict, count, duration, shown, some
from kvtop.detect.thresholds import Thresholds
from kvtop.detect.track import Track
from kvtop.model.snapshot import Phase, Request


def _open(engine: EngineTrack) -> bool:
    """Whether the engine is meant to admit requests."""
    return engine.engine.state not in ("paused", "sleeping", "starting", "gone")


def _stuck(track: Track, engine: EngineTrack, limits: Thresholds) -> list[Request] | None:
    """Requests that wait for room and see none admitted. None: cannot be told."""
    counts = engine.counts
    if counts is None or engine.engine.requests is None or not engine.probe_new:
        return None
    reqs = engine.requests
    # With several adapters the head may wait for a free adapter slot, and rightly.
    waiting = [r for r in reqs.totals.waiting if r.lora is None and r.phase is not Phase.HELD]
    admitted = reqs.admitted_mono_s
    if not waiting or admitted is None or track.mono_s - admitted < limits.wedged_s:
        return []
    return waiting if _open(engine) else []


def _statuses(requests: list[Request]) -> str:
    return some(
        [f"{shown(r.id)} {r.status}" + (f" ({r.reason})" if r.reason else "") for r in requests], 8
    )


def _stuck_evidence(track: Track, engine: EngineTrack, waiting: list[Request]) -> dict[str, str]:
    totals, counts = engine.requests.totals, engine.counts
    admitted = engine.requests.admitted_mono_s
    evidence = {
        "waiting": str(len(waiting)),
        "running": str(len(totals.running)),
        "deferred": str(len(totals.deferred) + len(totals.held)),
        "limit": f"{engine.engine.max_num_seqs or '-'} (max_num_seqs)",
    }
    if counts is not None:
        evidence["free + cached"] = f"{counts.free + counts.cached} of {counts.usable} blocks"
    if admitted is not None:
        evidence["last admission"] = f"{duration(track.mono_s - admitted)} ago"
    parked = [*totals.deferred, *totals.held]
    if parked:
        evidence["deferred requests"] = _statuses(parked)
    return evidence


def _room(engine: EngineTrack, waiting: list[Request]) -> tuple[int, int | None]:
    """Blocks that can be had, and those that the least demanding waiting request needs."""
    counts = engine.counts
    have = 0 if counts is None else counts.free + counts.cached
    needs = [n for n in (blocks_needed(engine, r) for r in waiting) if n is not None]
    return have, min(needs) if needs else None


def wedged(track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """Slots are taken by requests that do not run, so that nothing is admitted."""
    waiting = _stuck(track, engine, limits)
    if waiting is None:
        return None
    totals, most = engine.requests.totals, engine.engine.max_num_seqs
    have, need = _room(engine, waiting)
    parked = len(totals.deferred) + len(totals.held)
    running = len(totals.running)
    if not waiting or most is None or need is None or have < need or not parked:
        return NOTHING
    if running >= most or running + parked < most:
        return NOTHING
    return (
        Candidate(
            summary=f"Nothing is admitted although {have} blocks can be had: {running} running and "
            f"{parked} deferred requests take all {most} places.",
            evidence=_stuck_evidence(track, engine, waiting),
            severity="critical" if running == 0 else None,
            request_ids=tuple(r.id for r in (*totals.deferred, *totals.held)),
        ),
    )


def idle_pool_blocked(track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """Requests wait, places and blocks are free, and nothing is admitted."""
    waiting = _stuck(track, engine, limits)
    if waiting is None:
        return None
    totals, most = engine.requests.totals, engine.engine.max_num_seqs
    have, need = _room(engine, waiting)
    running, parked = len(totals.running), len(totals.deferred) + len(totals.held)
    if not waiting or need is None or have < need:
        return NOTHING
    if most is None:
        if running:
            return NOTHING
    elif running + parked >= most:
        return NOTHING
    counts = engine.counts
    # A running batch may rightly hold back a newcomer: while its own blocks are short, and
    # while a long prompt takes every token of the batch.
    if running and (
        counts is None
        or have < counts.usable / 2
        or any(r.phase is Phase.PREFILL for r in totals.running)
    ):
        return NOTHING
    return (
        Candidate(
            summary=f"{count(len(waiting), 'request waits', 'requests wait')} and nothing is "
            f"admitted, although {have} blocks are free and the first needs {need}. "
            "The scheduler is stuck, not short of memory.",
            evidence=_stuck_evidence(track, engine, waiting),
            severity="critical" if running == 0 else None,
            request_ids=tuple(r.id for r in waiting),
        ),
    )


def blocked_by_parked(track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """Parked requests hold the blocks that the head of the queue needs."""
    waiting = _stuck(track, engine, limits)
    if waiting is None:
        return None
    totals, counts = engine.requests.totals, engine.counts
    have, need = _room(engine, waiting)
    if not waiting or need is None or have >= need or totals.running or counts is None:
        return NOTHING
    holders = sorted(
        (r for r in (*totals.deferred, *totals.held, *totals.waiting) if r.blocks),
        key=lambda r: -(r.blocks or 0),
    )
    kept = sum(r.blocks or 0 for r in holders)
    if not holders or have + kept < need or need > counts.usable:
        return NOTHING
    return (
        Candidate(
            summary=f"Nothing runs, and the first request needs {need} blocks of which {have} can "
            f"be had. {count(len(holders), 'parked request keeps', 'parked requests keep')} "
            f"{kept} blocks.",
            evidence={
                **_stuck_evidence(track, engine, waiting),
                "blocks needed": str(need),
                "kept by": some([f"{shown(r.id)} {r.blocks} ({r.status})" for r in holders], 6),
            },
            request_ids=tuple(r.id for r in holders),
        ),
    )
