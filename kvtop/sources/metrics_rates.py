"""From pages to `EngineMetrics`: rates, hit rates and percentiles over a sliding window.

All of it is pure. A window is a tuple of pages, oldest first, the newest last; `advance`
makes the next window and `derive` reads one.

Nothing is ever computed across a server restart: a counter that falls, or another start
time of the process, begins a new epoch, and only pages of the newest epoch are compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvtop.model.snapshot import EngineMetrics
from kvtop.sources.metrics_page import EngineSample, Histogram, Samples

RATE_WINDOW_S = 10.0
"""Rates are the mean over about this long."""
LONG_WINDOW_S = 60.0
"""Hit rate and latency are over about this long."""
MAX_GAP_S = 120.0
"""Pages further apart than this are not compared."""
MIN_GAP_S = 0.001
"""Nor are pages closer than this."""
FROZEN_AFTER_S = 3.0
"""Counters may rest this long, with requests running, before it is remarked."""
SPACING_S = 0.9
"""Pages are kept no closer than this, apart from the newest: it bounds the memory."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One page with its time."""

    mono_s: float
    """Monotonic clock when it had come."""
    samples: Samples
    """The page."""
    epoch_s: dict[int, float]
    """By engine: time of the first page since the server's last (re)start."""
    moved_s: dict[int, float]
    """By engine: time of the first page with the counters as they are now."""


Window = tuple[Timed, ...]
"""Pages, oldest first."""


def advance(window: Window, samples: Samples, mono_s: float) -> Window:
    """Add a page and let go of those that are no longer needed.

    Args:
        window: The window so far; empty at the start.
        samples: The new page.
        mono_s: Monotonic time of it. A page not newer than the last replaces it.

    Returns:
        The new window, at most about `MAX_GAP_S / SPACING_S` pages.
    """
    last = window[-1] if window else None
    epoch_s: dict[int, float] = {}
    moved_s: dict[int, float] = {}
    for index, engine in samples.engines.items():
        before = last.samples.engines.get(index) if last else None
        if last is None or before is None or _restarted(last.samples, samples, before, engine):
            epoch_s[index] = moved_s[index] = mono_s
        else:
            epoch_s[index] = last.epoch_s[index]
            same = _all_counters(before) == _all_counters(engine)
            moved_s[index] = last.moved_s[index] if same else mono_s
    new = Timed(mono_s, samples, epoch_s, moved_s)
    kept = list(window)
    if kept and (
        kept[-1].mono_s >= mono_s
        or (len(kept) > 1 and kept[-1].mono_s - kept[-2].mono_s < SPACING_S)
    ):
        kept.pop()
    inside = [t for t in kept if mono_s - LONG_WINDOW_S * 1.05 <= t.mono_s < mono_s]
    if not inside:
        inside = [t for t in kept[-1:] if mono_s - MAX_GAP_S <= t.mono_s < mono_s]
    return (*inside, new)


def derive(window: Window, engine_count: int | None = None) -> dict[int, EngineMetrics]:
    """What the newest page says, with rates from the pages before it.

    Percentiles are the upper bound of the histogram bucket that holds the median of the
    last `LONG_WINDOW_S`: the true value is not above it. None where nothing was observed
    in the window or the median lies above the last finite bound.

    Args:
        window: From `advance`.
        engine_count: Engines that `num_gpu_blocks` sums over. None: those on the page.

    Returns:
        By engine index. Whatever has no series, or not two pages yet, is None.
    """
    if not window:
        return {}
    newest = window[-1]
    count = engine_count or len(newest.samples.engines)
    return {
        index: _engine(window, index, sample, count)
        for index, sample in newest.samples.engines.items()
    }


def _engine(window: Window, index: int, now: EngineSample, engines: int) -> EngineMetrics:
    newest = window[-1]
    short = _base(window, index, RATE_WINDOW_S)
    long = _base(window, index, LONG_WINDOW_S)
    then = long.samples.engines[index] if long else None

    def rate(key: str) -> float | None:
        if short is None:
            return None
        before = short.samples.engines[index].counters.get(key)
        return _rate(before, now.counters.get(key), newest.mono_s - short.mono_s)

    finished_s = None
    if short is not None and now.finished:
        before = short.samples.engines[index].finished
        if before:
            finished_s = _rate(
                sum(before.values()), sum(now.finished.values()), newest.mono_s - short.mono_s
            )
    frozen_s = newest.mono_s - newest.moved_s[index]
    hits, queries = now.counters.get("prefix_hits"), now.counters.get("prefix_queries")
    config = now.cache_config
    return EngineMetrics(
        kv_used_percent=_percent(now.kv_used),
        running=now.running,
        waiting=now.waiting,
        waiting_capacity=now.waiting_capacity,
        waiting_deferred=now.waiting_deferred,
        prefix_hit_percent=_share(
            _delta(then, now, "prefix_hits"), _delta(then, now, "prefix_queries")
        ),
        prefix_hit_total_percent=_share(hits, queries),
        preemptions_total=now.counters.get("preemptions"),
        preemptions_s=rate("preemptions"),
        prompt_tokens_total=now.counters.get("prompt_tokens"),
        prompt_tokens_s=rate("prompt_tokens"),
        generation_tokens_total=now.counters.get("generation_tokens"),
        generation_tokens_s=rate("generation_tokens"),
        finished_total=dict(now.finished),
        finished_s=finished_s,
        num_blocks=_blocks_of_one(_count(config.get("num_gpu_blocks")), engines),
        block_size_tokens=_count(config.get("block_size")),
        prefix_caching={"True": True, "False": False}.get(config.get("enable_prefix_caching", "")),
        kv_size_tokens=_count(config.get("kv_cache_size_tokens")),
        sleep_state=now.sleep_state,
        gauges_frozen_s=frozen_s if now.running and frozen_s >= FROZEN_AFTER_S else None,
        ttft_p50_s=_median(then.ttft if then else None, now.ttft),
        itl_p50_s=_median(then.itl if then else None, now.itl),
    )


def _restarted(
    old_page: Samples, new_page: Samples, before: EngineSample, after: EngineSample
) -> bool:
    old, new = old_page.start_time_s, new_page.start_time_s
    if old is not None and new is not None and old != new:
        return True
    was, now = _all_counters(before), _all_counters(after)
    return any(now.get(key, value) < value for key, value in was.items())


def _all_counters(sample: EngineSample) -> dict[str, float]:
    return {**sample.counters, **{f"finished {k}": v for k, v in sample.finished.items()}}


def _base(window: Window, index: int, width_s: float) -> Timed | None:
    """The page to compare the newest with: the oldest of the width, else the one before."""
    newest = window[-1]
    usable = [
        t
        for t in window[:-1]
        if index in t.samples.engines and newest.epoch_s[index] <= t.mono_s < newest.mono_s
    ]
    inside = [t for t in usable if t.mono_s >= newest.mono_s - width_s * 1.05]
    return inside[0] if inside else (usable[-1] if usable else None)


def _rate(before: float | None, after: float | None, dt_s: float) -> float | None:
    if before is None or after is None or after < before or dt_s < MIN_GAP_S:
        return None
    rate = (after - before) / dt_s
    return rate if math.isfinite(rate) else None


def _delta(then: EngineSample | None, now: EngineSample, key: str) -> float | None:
    before = then.counters.get(key) if then else None
    after = now.counters.get(key)
    return None if before is None or after is None or after < before else after - before


def _percent(share: float | None) -> float | None:
    percent = None if share is None else share * 100
    return percent if percent is not None and math.isfinite(percent) else None


def _share(part: float | None, whole: float | None) -> float | None:
    """Percent. The two counters are not read at one instant, so it is cut off at 100."""
    if part is None or whole is None or whole <= 0:
        return None
    return 100.0 if part >= whole else min(100.0, 100.0 * part / whole)


def _median(then: Histogram | None, now: Histogram | None) -> float | None:
    if then is None or now is None or then.bounds != now.bounds:
        return None
    grown = [b - a for a, b in zip(then.counts, now.counts, strict=True)]
    if not grown or grown[-1] <= 0 or min(grown) < 0:
        return None
    half = grown[-1] / 2
    bound = next(b for b, n in zip(now.bounds, grown, strict=True) if n >= half)
    return bound if bound != float("inf") else None


def _count(label: str | None) -> int | None:
    """A label that should be a positive whole number."""
    if label is None or not (label.isascii() and label.isdecimal() and len(label) <= 15):
        return None
    return int(label) or None


def _blocks_of_one(total: int | None, engines: int) -> int | None:
    """The label adds all engines up; None where it cannot be equal parts."""
    if total is None or engines < 1 or total % engines:
        return None
    return total // engines
