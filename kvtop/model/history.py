"""Bounded history of numbers: what charts are drawn from and detectors look back on.

It stands beside the model and not in the stream, because detectors and drawing
read it and may not know where snapshots come from.
"""

from __future__ import annotations

from collections import deque

from kvtop.model.snapshot import Engine, Snapshot

_BLOCKS = ("free", "cached", "used", "shared", "held", "ghost")
_METRICS = (
    "kv_used_percent",
    "running",
    "waiting",
    "preemptions_s",
    "prefix_hit_percent",
    "generation_tokens_s",
)
_RATES = {
    "alloc_s": "allocated",
    "freed_s": "freed",
    "touched_s": "touched",
    "evicted_s": "evicted",
    "steps_s": "steps",
}
_GPU = ("mem_used_bytes", "util_percent", "power_w")

Series = tuple[list[float], list[float | None]]
"""Times in Unix seconds and the values at them; None where nothing was read."""


def engine_key(engine: Engine) -> str:
    """A name for an engine that stays the same while its process lives."""
    if engine.pid is not None:
        return f"pid {engine.pid}"
    return f"{engine.server} engine {engine.engine if engine.engine is not None else '-'}"


class History:
    """The last `max_points` snapshots as numbers.

    Args:
        max_points: Snapshots kept; older ones are dropped.
    """

    def __init__(self, max_points: int = 3600) -> None:
        self._points: deque[tuple[float, dict[str, dict[str, float | None]]]] = deque(
            maxlen=max_points
        )
        self._last_counters: dict[str, tuple[float, dict[str, int | None]]] = {}

    def __len__(self) -> int:
        return len(self._points)

    def append(self, snapshot: Snapshot) -> None:
        """Add one snapshot's numbers."""
        row: dict[str, dict[str, float | None]] = {}
        for engine in snapshot.engines:
            key = engine_key(engine)
            row[key] = self._engine_row(key, engine, snapshot.mono_s)
        for gpu in snapshot.gpus:
            row[f"gpu {gpu.index}"] = {name: getattr(gpu, name) for name in _GPU}
        self._points.append((snapshot.time_s, row))

    def _engine_row(self, key: str, engine: Engine, mono_s: float) -> dict[str, float | None]:
        blocks = engine.blocks
        row: dict[str, float | None] = {
            name: None if blocks is None else getattr(blocks, name) for name in _BLOCKS
        }
        for name in _METRICS:
            row[name] = None if engine.metrics is None else getattr(engine.metrics, name)
        if engine.counters is None:
            self._last_counters.pop(key, None)
            return row
        now = {field: getattr(engine.counters, field) for field in _RATES.values()}
        before = self._last_counters.get(key)
        self._last_counters[key] = (mono_s, now)
        if before is None or mono_s <= before[0]:
            return row
        for name, counter in _RATES.items():
            new, old = now[counter], before[1][counter]
            # A counter that went back belongs to a new engine: no rate is known yet.
            if new is not None and old is not None and new >= old:
                row[name] = (new - old) / (mono_s - before[0])
        return row

    def series(self, key: str, name: str) -> Series:
        """One engine's values, `None` where it was not there or not readable.

        Args:
            key: From `engine_key`.
            name: A block state (blocks), a metric, or `alloc_s`, `freed_s`,
                `touched_s`, `evicted_s`, `steps_s` (per second).
        """
        times = [time_s for time_s, _ in self._points]
        return times, [row.get(key, {}).get(name) for _, row in self._points]

    def gpu_series(self, index: int, name: str) -> Series:
        """One GPU's `mem_used_bytes`, `util_percent` or `power_w`."""
        return self.series(f"gpu {index}", name)
