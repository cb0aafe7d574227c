"""Every number that a rule decides by, in one table; each can be set in the config file.

The section `[findings]` of the configuration takes the names of this table:

    [findings]
    ghost_idle_samples = 10
    gpu_full_percent = 97
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from kvtop.errors import UsageError


@dataclass(frozen=True, slots=True)
class Threshold:
    """What one threshold is, for documentation and for checking a value."""

    name: str
    """Its name in the config file."""
    default: float
    """Its value when the config file says nothing."""
    unit: str
    """Its unit, as shown."""
    low: float
    """Smallest value that makes sense."""
    high: float
    """Largest value that makes sense."""
    meaning: str
    """One plain line."""


def _t(default: float, unit: str, low: float, high: float, meaning: str) -> float:
    default = float(default)
    found: float = field(
        default=default, metadata={"unit": unit, "low": low, "high": high, "meaning": meaning}
    )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The numbers in force. Each field's unit, bounds and meaning stand beside it."""

    # How the record is read.
    gap_s: float = _t(10, "s", 1, 3600, "two snapshots further apart than this are a gap")
    stale_s: float = _t(5, "s", 1, 600, "a reading older than this proves nothing")
    clear_s: float = _t(5, "s", 0, 3600, "a finding ends when its cause is away for this long")
    unknown_s: float = _t(
        30, "s", 0, 3600, "a finding ends when its data cannot be read for this long"
    )

    # Leaks.
    ghost_idle_samples: float = _t(
        5, "readings", 2, 1000, "idle readings in a row in which a block is a ghost"
    )
    ghost_busy_s: float = _t(
        20, "s", 1, 3600, "under load: how long a block stays a ghost before it counts"
    )
    ghost_busy_steps: float = _t(
        20, "steps", 1, 100000, "under load: scheduler steps that a ghost must outlive"
    )
    ghost_critical_percent: float = _t(
        10, "%", 0.1, 100, "share of the pool in ghosts that makes it critical"
    )
    mismatch_s: float = _t(5, "s", 1, 3600, "how long a ref count differs from the tables")
    mismatch_steps: float = _t(
        10, "steps", 1, 100000, "scheduler steps that a wrong ref count must outlive"
    )
    identity_s: float = _t(5, "s", 1, 3600, "how long the states and the free queue disagree")
    orphan_table_s: float = _t(10, "s", 1, 3600, "how long a table has no request")
    zombie_s: float = _t(10, "s", 1, 3600, "how long a request runs on without its client")
    lease_s: float = _t(
        480,
        "s",
        1,
        86400,
        "how long a KV connector may keep blocks; set it to your connector's own",
    )
    lease_grace_s: float = _t(30, "s", 0, 3600, "time past the lease before it counts")
    fence_s: float = _t(10, "s", 1, 3600, "how long finished blocks may wait for a step's fence")
    fence_steps: float = _t(20, "steps", 1, 100000, "scheduler steps that such a wait must outlive")
    delayed_free_s: float = _t(5, "s", 1, 3600, "age of a delayed free that is worth a note")
    floor_moments: float = _t(6, "moments", 4, 60, "idle moments that a falling floor needs")
    floor_percent: float = _t(2, "%", 0.1, 100, "fall of the floor, share of the pool")
    floor_confidence: float = _t(
        2.3, "sigma", 1, 10, "confidence that the floor falls (Mann-Kendall)"
    )
    balance_window_s: float = _t(300, "s", 30, 300, "window of the release balance")
    balance_blocks: float = _t(200, "blocks", 10, 1e7, "allocations that a balance needs")
    balance_low: float = _t(0.7, "ratio", 0, 1, "released / allocated that alarms")
    balance_good: float = _t(0.9, "ratio", 0, 1, "released / allocated that is well again")
    balance_s: float = _t(60, "s", 0, 3600, "how long the balance must be low")

    # GPU memory.
    gpu_growth_bytes_s: float = _t(5e6, "B/s", 1e3, 1e12, "growth without new requests")
    gpu_growth_s: float = _t(10, "s", 3, 600, "how long it grows")
    gpu_growth_settle_s: float = _t(
        30, "s", 0, 3600, "an engine must have been known for this long"
    )
    gpu_outside_bytes: float = _t(
        256e6, "B", 1e6, 1e12, "growth of an engine's own GPU memory that counts"
    )
    gpu_outside_s: float = _t(300, "s", 60, 1200, "how long that growth is watched")
    gpu_unaccounted_bytes: float = _t(
        2e9, "B", 1e8, 1e12, "device memory that no visible process explains"
    )
    gpu_unaccounted_s: float = _t(30, "s", 1, 3600, "how long it stays unexplained")
    gpu_full_percent: float = _t(92, "%", 50, 100, "device memory in use that alarms")
    gpu_full_clear_percent: float = _t(90, "%", 50, 100, "device memory in use that is well again")
    gpu_full_s: float = _t(30, "s", 1, 3600, "how long the device is that full")
    gpu_reserved_percent: float = _t(
        70, "%", 10, 100, "use from which the reservation is explained"
    )
    gpu_reserved_s: float = _t(60, "s", 10, 3600, "how long the use must be flat for it")
    gpu_lost_s: float = _t(5, "s", 1, 3600, "how long a GPU that could be read cannot be read")

    # Host memory.
    rss_window_s: float = _t(120, "s", 60, 1800, "window of fast growth")
    rss_bytes_s: float = _t(0.5e6, "B/s", 1e3, 1e12, "fast growth that counts")
    rss_bytes: float = _t(64e6, "B", 1e6, 1e13, "total growth in the window that counts")
    rss_slow_bytes_s: float = _t(0.05e6, "B/s", 1e2, 1e12, "growth over an hour that counts")
    rss_settle_s: float = _t(60, "s", 0, 3600, "growth right after a start is not looked at")

    # Pressure.
    kv_full_percent: float = _t(95, "%", 50, 100, "pool use that counts as full")
    kv_full_clear_percent: float = _t(90, "%", 10, 100, "pool use that is well again")
    kv_full_s: float = _t(10, "s", 1, 3600, "how long the pool is full")
    storm_window_s: float = _t(30, "s", 5, 300, "window in which preemptions are counted")
    storm_count: float = _t(10, "", 2, 1e6, "preemptions in the window that a storm needs")
    storm_per_request: float = _t(
        0.25, "", 0.01, 100, "preemptions a request in the window; healthy is about 0.07"
    )
    storm_clear_per_request: float = _t(0.1, "", 0, 100, "preemptions a request, well again")
    thrash_preemptions: float = _t(
        5, "", 2, 1000, "preemptions of one request; a healthy engine has at most 4"
    )
    thrash_restarts: float = _t(3, "", 2, 1000, "restarts of one request without a new token")
    alloc_window_s: float = _t(300, "s", 30, 300, "window in which failed allocations are counted")
    alloc_failures: float = _t(20, "", 1, 1e9, "failed allocations in the window worth a note")
    alloc_share: float = _t(0.5, "", 0.01, 100, "failures a step from which it is a warning")
    wedged_s: float = _t(30, "s", 5, 3600, "how long nothing is admitted")
    hog_percent: float = _t(60, "%", 10, 100, "share of all blocks with one request or tenant")
    hog_use_percent: float = _t(80, "%", 10, 100, "pool use from which that matters")
    hog_s: float = _t(30, "s", 1, 3600, "how long it holds them while others wait")

    # Efficiency.
    hit_fall_points: float = _t(20, "points", 1, 100, "fall of the hit rate below its baseline")
    hit_fall_share: float = _t(0.6, "ratio", 0, 1, "and below this share of the baseline")
    hit_baseline_s: float = _t(600, "s", 120, 3600, "history that a baseline needs")
    hit_s: float = _t(60, "s", 1, 3600, "how long the hit rate stays low")
    short_prompts: float = _t(20, "requests", 5, 1e6, "requests seen before prompts are judged")
    short_share: float = _t(0.8, "ratio", 0.1, 1, "share of prompts shorter than a block")
    slack_percent: float = _t(40, "%", 5, 100, "token slots in held blocks that hold nothing")
    slack_use_percent: float = _t(50, "%", 1, 100, "pool use from which that matters")
    slack_s: float = _t(60, "s", 1, 3600, "how long the slack stays")
    unhit_window_s: float = _t(300, "s", 60, 300, "window in which the cache gets no hit")
    unhit_blocks: float = _t(1000, "blocks", 10, 1e9, "allocations in it that such a verdict needs")
    unhit_cached_percent: float = _t(30, "%", 1, 100, "share of the pool in cached blocks")
    cache_life_s: float = _t(10, "s", 0.1, 3600, "mean life of a cached block that is too short")
    cache_life_for_s: float = _t(30, "s", 1, 3600, "how long it stays that short")
    skew_points: float = _t(50, "points", 5, 100, "pool use of two engines of a server apart")
    skew_s: float = _t(60, "s", 1, 3600, "how long they are apart")

    # Health.
    stall_s: float = _t(10, "s", 1, 3600, "work and no scheduler step for this long")
    stopped_s: float = _t(3, "s", 0, 3600, "how long the process is stopped")
    orphan_s: float = _t(6, "s", 1, 3600, "how long an engine's API servers are gone")
    dead_s: float = _t(2, "s", 0, 3600, "how long an engine's process is gone")
    frozen_s: float = _t(30, "s", 5, 3600, "gauges claim work and no counter moves")
    no_metrics_s: float = _t(15, "s", 1, 3600, "how long /metrics is not readable")
    restart_note_s: float = _t(60, "s", 1, 3600, "how long a restart is told")
    paused_s: float = _t(5, "s", 1, 3600, "how long an engine is paused or asleep")


def table() -> tuple[Threshold, ...]:
    """All thresholds with their defaults, in the order of this file."""
    return tuple(
        Threshold(
            name=f.name,
            default=float(f.default),  # type: ignore[arg-type]
            unit=f.metadata["unit"],
            low=f.metadata["low"],
            high=f.metadata["high"],
            meaning=f.metadata["meaning"],
        )
        for f in fields(Thresholds)
    )


def apply_overrides(overrides: Mapping[str, object]) -> Thresholds:
    """The defaults with some numbers changed.

    Args:
        overrides: Name to number, as the config file's `[findings]` section gives it.

    Raises:
        UsageError: A name is unknown, or a value is not a number within its bounds.
    """
    known = {threshold.name: threshold for threshold in table()}
    values: dict[str, float] = {}
    for name, raw in overrides.items():
        threshold = known.get(name)
        if threshold is None:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(
                f"[findings]: no threshold is named {str(name)!r}",
                f"{hint}`kvtop findings --thresholds` lists them",
            )
        if isinstance(raw, bool) or not isinstance(raw, (int, float)) or not math.isfinite(raw):
            raise UsageError(f"[findings] {name}: {raw!r} is not a number", "write a plain number")
        if not threshold.low <= raw <= threshold.high:
            raise UsageError(
                f"[findings] {name}: {raw!r} is out of bounds",
                f"from {threshold.low:g} to {threshold.high:g} {threshold.unit}".rstrip(),
            )
        values[name] = float(raw)
    limits: Thresholds = replace(Thresholds(), **values)
    for low, high in (
        ("balance_low", "balance_good"),
        ("gpu_full_clear_percent", "gpu_full_percent"),
        ("kv_full_clear_percent", "kv_full_percent"),
        ("storm_clear_per_request", "storm_per_request"),
    ):
        if getattr(limits, low) > getattr(limits, high):
            raise UsageError(
                f"[findings]: {low} is above {high}", "a finding could start and never end"
            )
    return limits


DEFAULTS = Thresholds()
"""What is in force when the config file says nothing."""
