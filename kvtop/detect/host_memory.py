"""Host memory of a server's processes: steady growth, fast or slow."""

from __future__ import annotations

from kvtop.detect.engine_track import FAST_PIECES, SLOW_PIECES, EngineTrack
from kvtop.detect.rule import NOTHING, Candidate, Rule, Verdict, duration, size
from kvtop.detect.series import Trend
from kvtop.detect.thresholds import Thresholds
from kvtop.detect.track import Track


def role_of(engine: EngineTrack, pid: int) -> str:
    """What a process of an engine is, in words."""
    if pid == engine.engine.pid:
        return "engine core"
    if pid in engine.engine.worker_pids:
        return "worker"
    return "API server" if pid in engine.engine.api_pids else "process"


def rss_growth(track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """Resident memory rises all the way through a window."""
    if not engine.rss or track.mono_s - engine.first_mono_s < limits.rss_settle_s:
        return None
    found = []
    told = False
    for pid, (fast, slow) in engine.rss.items():
        told = told or len(fast) > FAST_PIECES
        trend = _growing(fast.steady(FAST_PIECES), limits.rss_bytes_s, limits.rss_bytes)
        trend = trend or _growing(
            slow.steady(SLOW_PIECES), limits.rss_slow_bytes_s, limits.rss_bytes
        )
        if trend is None:
            continue
        role = role_of(engine, pid)
        grown = trend.last[1] - trend.first[1]
        found.append(
            Candidate(
                summary=f"The {role} (pid {pid}) grew by {size(grown)} of host memory in "
                f"{duration(trend.last[0] - trend.first[0])} without levelling off.",
                subject=str(pid),
                evidence={
                    "process": f"{role}, pid {pid}",
                    "resident": f"{size(trend.first[1])} -> {size(trend.last[1])}",
                    "slope": f"{size(trend.slope_s * 60)} a minute",
                    "confidence": f"{trend.sigma:.1f} sigma over {trend.points} points",
                },
            )
        )
    if found:
        return tuple(found)
    return NOTHING if told else None


def _growing(found: Trend | None, rate: float, total: float) -> Trend | None:
    if found is None or found.slope_s < rate or found.last[1] - found.first[1] < total:
        return None
    return found


RULES = (
    Rule(
        name="host.rss-growth",
        severity="warning",
        title="A process of the server grows in host memory",
        explanation="Resident memory of the engine core, an API server or a worker rises in every "
        "piece of the window and does not level off. Request state that is never dropped, a "
        "queue nobody reads or a cache without bound looks like this.",
        starts="steady growth of {rss_bytes_s} over {rss_window_s}, or of {rss_slow_bytes_s} over "
        "half an hour and more, and at least {rss_bytes}; not in the first {rss_settle_s}",
        clears="the growth stops or levels off for {clear_s}",
        next_step="Take a flame graph of that process (key f); compare its growth with the "
        "requests it has served.",
        disproof="The memory levels off, or falls when the load ends.",
        needs="process table",
        thresholds=("rss_window_s", "rss_bytes_s", "rss_bytes", "rss_slow_bytes_s", "rss_settle_s"),
        engine=rss_growth,
    ),
)
