"""Simulated time, and how it is tied to the real one.

Everything the simulation does depends on simulated time only, so that a seed gives the
same run on any machine. A paced clock makes the real world wait; a free one does not.
"""

from __future__ import annotations

import time
from typing import Protocol

_SLICE_S = 0.2
"""Longest single sleep, real seconds: how late a request to stop can be noticed."""
_MAX_LAG_S = 0.5
"""After falling behind by more, real seconds, the lost time is given up, not caught up."""


class SimClock(Protocol):
    """Simulated time."""

    now_s: float
    """Simulated seconds since start."""
    stopping: bool
    """Set from outside: do not wait any more."""

    def advance(self, seconds: float) -> None:
        """Let `seconds` of simulated time pass, as the model runs."""

    def wait_until(self, when_s: float) -> None:
        """Let simulated time pass until `when_s`, with nothing to do."""

    def wall(self) -> float:
        """Unix seconds now."""


class FreeClock:
    """Simulated time that costs no real time; for tests."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.stopping = False

    def advance(self, seconds: float) -> None:
        """Let simulated time pass."""
        self.now_s += seconds

    def wait_until(self, when_s: float) -> None:
        """Let simulated time pass."""
        self.now_s = max(self.now_s, when_s)

    def wall(self) -> float:
        """A made-up Unix time."""
        return 1_700_000_000.0 + self.now_s


class PacedClock:
    """Simulated time that passes `speed` times as fast as real time.

    Args:
        speed: Simulated seconds a real second.
    """

    def __init__(self, speed: float = 1.0) -> None:
        self.now_s = 0.0
        self.stopping = False
        self.speed = speed
        self._origin_s = time.monotonic()

    def restart(self) -> None:
        """Tie `now_s` to the present moment, after a slow start."""
        self._origin_s = time.monotonic() - self.now_s / self.speed

    def advance(self, seconds: float) -> None:
        """Let simulated time pass and sleep as long as that takes."""
        self.now_s += seconds
        self._sleep_until_due()

    def wait_until(self, when_s: float) -> None:
        """Sleep until `when_s` of simulated time."""
        self.now_s = max(self.now_s, when_s)
        self._sleep_until_due()

    def real_now_s(self) -> float:
        """Where simulated time would be if it never waited for the engine; any thread."""
        return (time.monotonic() - self._origin_s) * self.speed

    def wall(self) -> float:
        """Unix seconds now."""
        return time.time()

    def _sleep_until_due(self) -> None:
        due_s = self._origin_s + self.now_s / self.speed
        while not self.stopping:
            left_s = due_s - time.monotonic()
            if left_s < -_MAX_LAG_S:
                # Stopped by a signal, or the machine is overloaded.
                self._origin_s -= left_s
            if left_s <= 0:
                return
            time.sleep(min(left_s, _SLICE_S))
