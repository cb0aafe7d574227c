"""Bounded history of numbers: what charts are drawn from and detectors look back on.

It stands beside the model and not in the stream, because detectors and drawing
read it and may not know where snapshots come from.
"""

from __future__ import annotations

import math
from array import array

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
    """The last `max_points` snapshots as numbers, one column of floats a series.

    Columns and not rows: an hour of snapshots is a megabyte, and a series is read
    without looking into thousands of dictionaries.

    Args:
        max_points: Snapshots kept; older ones are dropped.
    """

    def __init__(self, max_points: int = 3600) -> None:
        self._max = max_points
        self._times = array("d")
        self._columns: dict[tuple[str, str], array[float]] = {}
        self._last_counters: dict[str, tuple[float, dict[str, int | None]]] = {}

    def __len__(self) -> int:
        return min(len(self._times), self._max)

    def append(self, snapshot: Snapshot) -> None:
        """Add one snapshot's numbers."""
        row: dict[tuple[str, str], float | None] = {}
        for engine in snapshot.engines:
            key = engine_key(engine)
            for name, value in self._engine_row(key, engine, snapshot.mono_s).items():
                row[key, name] = value
        for gpu in snapshot.gpus:
            for name in _GPU:
                row[f"gpu {gpu.index}", name] = getattr(gpu, name)
        for new in row.keys() - self._columns.keys():
            self._columns[new] = array("d", [math.nan]) * len(self._times)
        for place, column in self._columns.items():
            number = row.get(place)
            column.append(math.nan if number is None else number)
        self._times.append(snapshot.time_s)
        # Dropped in pieces, so that it costs nothing most of the time.
        if len(self._times) > self._max + max(self._max // 8, 1):
            self._drop(len(self._times) - self._max)

    def _drop(self, points: int) -> None:
        del self._times[:points]
        for name, column in list(self._columns.items()):
            del column[:points]
            if all(value != value for value in column):  # noqa: PLR0124 - only NaN differs
                del self._columns[name]

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
        times = self._times[-self._max :].tolist()
        column = self._columns.get((key, name))
        if column is None:
            return times, [None] * len(times)
        values = column[-self._max :].tolist()
        return times, [None if value != value else value for value in values]  # noqa: PLR0124

    def gpu_series(self, index: int, name: str) -> Series:
        """One GPU's `mem_used_bytes`, `util_percent` or `power_w`."""
        return self.series(f"gpu {index}", name)
