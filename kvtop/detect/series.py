"""Numbers over time, kept small: counters, coarse buckets, and robust trends."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[float, float]
"""Monotonic time and value."""


class CounterLog:
    """Rows of counters over the last minutes; a row a second at most.

    Args:
        width_s: How far back rows are kept.
        spacing_s: Rows closer together than this replace each other.
    """

    def __init__(self, width_s: float, spacing_s: float = 0.9) -> None:
        self._width_s = width_s
        self._spacing_s = spacing_s
        self._times: list[float] = []
        self._rows: list[tuple[float | None, ...]] = []
        self._newest: tuple[float, tuple[float | None, ...]] | None = None

    def __len__(self) -> int:
        return len(self._times)

    def clear(self) -> None:
        """Forget every row."""
        self._times.clear()
        self._rows.clear()
        self._newest = None

    def append(self, mono_s: float, row: tuple[float | None, ...]) -> None:
        """Add a row. A counter that went back belongs to a new life: the old rows go."""
        if self._newest is not None:
            before = self._newest[1]
            if len(before) != len(row) or any(
                new is not None and old is not None and new < old
                for new, old in zip(row, before, strict=True)
            ):
                self.clear()
        self._newest = (mono_s, row)
        if not self._times or mono_s - self._times[-1] >= self._spacing_s:
            self._times.append(mono_s)
            self._rows.append(row)
            # Trimmed in lumps, so that a row costs constant time in the mean.
            old = bisect_left(self._times, mono_s - self._width_s)
            if old > 256:
                del self._times[:old]
                del self._rows[:old]

    def span_s(self, width_s: float) -> float:
        """Seconds that the rows within the width cover."""
        if self._newest is None:
            return 0.0
        start = bisect_left(self._times, self._newest[0] - width_s)
        return self._newest[0] - self._times[start] if start < len(self._times) else 0.0

    def delta(self, column: int, width_s: float) -> float | None:
        """How much a counter grew within the width; never over more than it.

        None: not known at either end, or fewer than two rows.
        """
        if self._newest is None:
            return None
        now_s, row = self._newest
        start = bisect_left(self._times, now_s - width_s)
        if start >= len(self._times) or self._times[start] >= now_s:
            return None
        new, old = row[column], self._rows[start][column]
        return None if new is None or old is None else new - old


@dataclass(slots=True)
class _Bucket:
    start_s: float
    low: float
    high: float
    total: float
    count: int


class Buckets:
    """A value in equal pieces of time; a piece keeps its least, its greatest and its mean.

    Args:
        width_s: Length of a piece.
        count: Most pieces kept.
    """

    def __init__(self, width_s: float, count: int) -> None:
        self._width_s = width_s
        self._buckets: deque[_Bucket] = deque(maxlen=count)
        self._begun = 0
        self._steady: tuple[tuple[int, int], Trend | None] | None = None

    def clear(self) -> None:
        """Forget everything."""
        self._buckets.clear()
        self._begun += 1

    def append(self, mono_s: float, value: float) -> None:
        """Add one value."""
        last = self._buckets[-1] if self._buckets else None
        if last is None or mono_s - last.start_s >= self._width_s:
            self._buckets.append(_Bucket(mono_s, value, value, value, 1))
            self._begun += 1
            return
        last.low = min(last.low, value)
        last.high = max(last.high, value)
        last.total += value
        last.count += 1

    def __len__(self) -> int:
        return len(self._buckets)

    def __iter__(self) -> Iterator[_Bucket]:
        return iter(self._buckets)

    def steady(self, pieces: int) -> Trend | None:
        """Steady growth over the last `pieces` complete pieces. None: not so, or too few.

        Worked out once a piece.
        """
        key = (self._begun, pieces)
        if self._steady is None or self._steady[0] != key:
            lows = self.lows()[-pieces:]
            self._steady = (key, steady_growth(lows) if len(lows) == pieces else None)
        return self._steady[1]

    def lows(self) -> list[Point]:
        """The least value of each complete piece."""
        return [(bucket.start_s, bucket.low) for bucket in self._buckets][:-1]

    def means(self) -> list[Point]:
        """The mean of each complete piece."""
        return [(bucket.start_s, bucket.total / bucket.count) for bucket in self._buckets][:-1]


@dataclass(frozen=True, slots=True)
class Trend:
    """A robust straight line through points."""

    slope_s: float
    """Median of the slopes of all pairs (Theil-Sen), a second."""
    sigma: float
    """Confidence that it rises (positive) or falls (negative): Mann-Kendall's z."""
    first: Point
    """First point."""
    last: Point
    """Last point."""
    points: int
    """How many."""


def trend(points: Sequence[Point]) -> Trend | None:
    """A trend that one odd point, or two, cannot make. None: fewer than four points.

    Equal values count neither way, and the variance is corrected for them, so that a
    level with one step in it is no trend.
    """
    n = len(points)
    if n < 4:
        return None
    slopes: list[float] = []
    sign = 0
    for i in range(n - 1):
        t0, v0 = points[i]
        for j in range(i + 1, n):
            t1, v1 = points[j]
            if t1 > t0:
                slopes.append((v1 - v0) / (t1 - t0))
            sign += (v1 > v0) - (v1 < v0)
    if not slopes:
        return None
    slopes.sort()
    middle = len(slopes) // 2
    slope = slopes[middle] if len(slopes) % 2 else (slopes[middle - 1] + slopes[middle]) / 2
    ties: dict[float, int] = {}
    for _, value in points:
        ties[value] = ties.get(value, 0) + 1
    variance = n * (n - 1) * (2 * n + 5) - sum(
        t * (t - 1) * (2 * t + 5) for t in ties.values() if t > 1
    )
    sigma = 0.0 if variance <= 0 else (sign - (sign > 0) + (sign < 0)) / math.sqrt(variance / 18)
    return Trend(slope, sigma, points[0], points[-1], n)


def steady_growth(points: Sequence[Point]) -> Trend | None:
    """The trend of points that rise all the way. None: they do not.

    All the way: the mean step is far above what steps of that spread would give by chance
    (t >= 5, so that neither a random walk nor one jump passes), and the second half rises at
    least half as fast as the first, so that a warm-up that levels off is no growth.
    """
    steps = [b[1] - a[1] for a, b in pairwise(points)]
    if len(steps) < 7:
        return None
    grown = points[-1][1] - points[0][1]
    mean = grown / len(steps)
    spread = math.sqrt(sum((step - mean) ** 2 for step in steps) / (len(steps) - 1))
    if grown <= 0 or grown < 5.0 * spread * math.sqrt(len(steps)):
        return None
    middle = len(points) // 2
    early = points[middle][1] - points[0][1]
    late = points[-1][1] - points[middle][1]
    return trend(points) if late >= 0.5 * early > 0 else None
