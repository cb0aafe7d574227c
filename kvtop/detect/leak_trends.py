"""Leaks that show only over time: the floor at idle moments, and the release balance."""

from __future__ import annotations

from kvtop.detect.engine_track import LAST_FLOORS, EngineTrack
from kvtop.detect.leak_rules import SPECIFIC
from kvtop.detect.rule import NOTHING, Candidate, Rule, Verdict, duration
from kvtop.detect.series import Trend
from kvtop.detect.thresholds import Thresholds
from kvtop.detect.track import Track

_LAST_CONFIDENCE = 3.7
"""Sigma: by chance in one of 10,000 moments."""


def floor_falling(_track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """Fewer blocks come back at each idle moment than at the one before."""
    from_metrics = engine.floors_from_metrics
    if from_metrics:
        metrics = engine.metrics
        if metrics is None or metrics.gauges_frozen_s is not None or not metrics.num_blocks:
            return None
        usable = float(metrics.num_blocks)
    else:
        counts = engine.counts
        if counts is None or engine.engine.requests is None:
            return None
        usable = float(counts.usable)
    points = engine.floors
    if len(points) < limits.floor_moments or usable <= 0:
        return NOTHING
    every, last = engine.floor_trends()
    # Among many windows of few moments one falls by chance: they need more confidence.
    surer = max(limits.floor_confidence, _LAST_CONFIDENCE)
    found = _falling(every, limits.floor_confidence) or _falling(last, surer)
    if found is None:
        return NOTHING
    fall = found.first[1] - found.last[1]
    # A floor that rose again at the last moment has ended the trend.
    if 100 * fall / usable < limits.floor_percent or points[-1][1] > points[-2][1]:
        return NOTHING
    left_s = found.last[1] / -found.slope_s
    told_by = "the gauges only" if from_metrics else "the probe"
    return (
        Candidate(
            summary=f"At {found.points} idle moments the free blocks went from "
            f"{found.first[1]:.0f} to {found.last[1]:.0f}. At this rate none is left in "
            f"{duration(left_s)}.",
            evidence={
                "floor": f"{found.first[1]:.0f} -> {found.last[1]:.0f} of {usable:.0f} blocks",
                "slope": f"{found.slope_s * 3600:.1f} blocks an hour",
                "confidence": f"{-found.sigma:.1f} sigma over {found.points} idle moments",
                "time left": duration(left_s),
                "told by": told_by,
            },
            # Gauges can be wrong on their own; they prove no leak.
            severity="info" if from_metrics else None,
            next_step="Put the probe in (`kvtop attach`): gauges alone prove no leak."
            if from_metrics
            else None,
        ),
    )


def _falling(found: Trend | None, sigma: float) -> Trend | None:
    return found if found and found.sigma <= -sigma and found.slope_s < 0 else None


def imbalance(_track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """More is handed out than comes back or is still owned by a request."""
    if not engine.probe_fresh or engine.engine.requests is None:
        return None
    width_s = limits.balance_window_s
    allocated = engine.counter_delta("allocated", width_s)
    freed = engine.counter_delta("freed", width_s)
    touched = engine.counter_delta("touched", width_s)
    if allocated is None or freed is None or len(engine.owned) < 2:
        return None
    grown = engine.owned[-1][1] - engine.owned[0][1]
    # What live requests own more than before need not have come back yet.
    due = allocated + (touched or 0) - grown
    if due < limits.balance_blocks:
        return NOTHING
    ratio = freed / due
    if ratio >= limits.balance_good:
        return NOTHING
    return (
        Candidate(
            summary=f"Of {due:.0f} block references due in the last "
            f"{duration(engine.counters.span_s(width_s))} only {freed:.0f} were given back "
            f"({100 * ratio:.0f} %). A healthy engine gives back 95 % and more.",
            start=ratio < limits.balance_low,
            evidence={
                "allocated": f"{allocated:.0f}",
                "prefix hits": "-" if touched is None else f"{touched:.0f}",
                "given back": f"{freed:.0f}",
                "still owned, change": f"{grown:+d}",
                "ratio": f"{ratio:.2f}",
            },
        ),
    )


RULES = (
    Rule(
        name="leak.floor-falling",
        severity="warning",
        title="The free blocks at idle moments become fewer and fewer",
        explanation="When no request is left, every block should be free or cached. The count at "
        "such moments is the floor; a floor that falls from one idle moment to the next is a "
        "leak, however slow. The slope is the median of all pairs of moments, so that one odd "
        "moment makes no trend.",
        starts="at least {floor_moments} idle moments, a fall of {floor_percent} of the pool, and "
        f"{{floor_confidence}} confidence; or the same over the last {LAST_FLOORS} of them, with "
        f"{_LAST_CONFIDENCE:g} sigma",
        clears="the floor rises, or the trend is not certain any more, for {clear_s}",
        next_step="Let it run with the probe in until leak.ghost-blocks names the blocks; plan a "
        "restart within the time left.",
        disproof="The floor returns to its first value at a later idle moment.",
        needs="probe; from metrics alone it is a hint (info)",
        thresholds=("floor_moments", "floor_percent", "floor_confidence"),
        yields_to=SPECIFIC,
        engine=floor_falling,
    ),
    Rule(
        name="leak.imbalance",
        severity="warning",
        title="Fewer blocks are given back than are handed out",
        explanation="Over a window, references handed out (allocations and prefix hits) come back, "
        "or requests that still live own them. What does neither is lost. About 0.95 and above "
        "is healthy.",
        starts="given back / due below {balance_low} over {balance_window_s} with at least "
        "{balance_blocks}, for {balance_s}",
        clears="above {balance_good} for {clear_s}",
        next_step="See which rule names the blocks. Without one, record a session (key R).",
        disproof="The references come back later, with nothing lost at an idle moment.",
        needs="probe",
        thresholds=(
            "balance_low",
            "balance_good",
            "balance_window_s",
            "balance_blocks",
            "balance_s",
        ),
        for_s="balance_s",
        yields_to=(*SPECIFIC, "leak.delayed-free"),
        engine=imbalance,
    ),
)
