"""Blocks that stay in a bad state: which, since when, over how many steps.

Works on byte columns. A reading in which nothing changed costs one comparison; a
change costs one step a block that changed, never one a block of the pool.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_NONZERO = re.compile(rb"[^\0]+", re.DOTALL)
_MAX_COHORTS = 64


def positions(mask: bytes) -> list[int]:
    """Indexes of the bytes that are not zero."""
    found: list[int] = []
    for run in _NONZERO.finditer(mask):
        found.extend(range(run.start(), run.end()))
    return found


def xor(a: bytes, b: bytes) -> bytes:
    """Byte by byte; both of one length."""
    return (int.from_bytes(a, "little") ^ int.from_bytes(b, "little")).to_bytes(len(a), "little")


def both(a: bytes, b: bytes) -> bytes:
    """Byte-by-byte and; both of one length."""
    return (int.from_bytes(a, "little") & int.from_bytes(b, "little")).to_bytes(len(a), "little")


@dataclass(slots=True)
class Cohort:
    """Blocks that entered the state in the same reading."""

    blocks: set[int]
    """Those that are still in it."""
    time_s: float
    """Wall clock of the first reading."""
    mono_s: float
    """Monotonic clock of the first reading."""
    oldest_s: float
    """The same of the oldest block, where cohorts were joined."""
    step: int
    """Scheduler step of the first reading."""
    idle_readings: int
    """Newest readings in a row with an idle engine, all with these blocks in the state."""


class BlockWatch:
    """Follows the blocks marked in a mask from reading to reading."""

    def __init__(self) -> None:
        self.cohorts: list[Cohort] = []
        self._mask = b""
        self._version = 0
        self._sorted: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def __bool__(self) -> bool:
        return bool(self.cohorts)

    def clear(self) -> None:
        """Forget everything: what comes next is seen for the first time."""
        self.cohorts.clear()
        self._mask = b""

    def update(
        self, mask: bytes | None, *, time_s: float, mono_s: float, step: int, idle: bool
    ) -> None:
        """Take one reading.

        Args:
            mask: One byte a block, 1 where the block is in the state, 0 elsewhere.
                None: no block is.
            time_s: Wall clock.
            mono_s: Monotonic clock.
            step: Scheduler step.
            idle: True when the engine has no live request.
        """
        if mask is None:
            self.clear()
            return
        if len(mask) != len(self._mask):
            self.clear()
            self._mask = bytes(len(mask))
        entered: set[int] = set()
        if mask != self._mask:
            changed = positions(xor(mask, self._mask))
            entered = {block for block in changed if mask[block]}
            left = set(changed) - entered
            if left:
                for cohort in self.cohorts:
                    cohort.blocks -= left
                self.cohorts = [cohort for cohort in self.cohorts if cohort.blocks]
            self._mask = mask
            self._version += 1
        for cohort in self.cohorts:
            cohort.idle_readings = cohort.idle_readings + 1 if idle else 0
        if entered:
            self.cohorts.append(Cohort(entered, time_s, mono_s, mono_s, step, 1 if idle else 0))
            self._bound(mono_s)

    def _bound(self, mono_s: float) -> None:
        """Join neighbours as if both had come with the younger: never too early.

        Those are joined whose blocks then look least younger for their age, so that they
        count late by a small share only.
        """
        while len(self.cohorts) > _MAX_COHORTS:
            all_of = self.cohorts
            at = min(
                range(len(all_of) - 1),
                key=lambda i: (
                    (all_of[i + 1].mono_s - all_of[i].oldest_s)
                    / (mono_s - all_of[i + 1].mono_s + 1.0)
                ),
            )
            all_of[at + 1].blocks |= all_of[at].blocks
            all_of[at + 1].oldest_s = all_of[at].oldest_s
            del all_of[at]

    def settled(
        self,
        *,
        mono_s: float,
        step: int,
        for_s: float,
        steps: float,
        idle_readings: float | None = None,
    ) -> Settled | None:
        """The blocks that have been in the state long enough.

        Args:
            mono_s: Monotonic clock now.
            step: Scheduler step now.
            for_s: Seconds that are long enough together with `steps`.
            steps: Scheduler steps that are long enough together with `for_s`.
            idle_readings: Idle readings in a row that are long enough by themselves.
                None: idle readings do not count by themselves.
        """
        ripe = [
            cohort
            for cohort in self.cohorts
            if (idle_readings is not None and cohort.idle_readings >= idle_readings)
            or (mono_s - cohort.mono_s >= for_s and step - cohort.step >= steps)
        ]
        if not ripe:
            return None
        first = min(ripe, key=lambda cohort: cohort.mono_s)
        # Sorting 20,000 ids takes longer than everything else here together.
        key = (self._version, *(id(cohort) for cohort in ripe))
        if self._sorted[0] != key:
            self._sorted = (key, tuple(sorted(_union(cohort.blocks for cohort in ripe))))
        return Settled(
            blocks=self._sorted[1],
            since_s=first.time_s,
            age_s=mono_s - first.mono_s,
            steps=step - first.step,
        )


def _union(sets: Iterable[set[int]]) -> set[int]:
    union: set[int] = set()
    for one in sets:
        union |= one
    return union


@dataclass(frozen=True, slots=True)
class Settled:
    """Blocks that have been in a state long enough."""

    blocks: tuple[int, ...]
    """Their ids, ascending."""
    since_s: float
    """Wall clock at which the first of them was seen in it."""
    age_s: float
    """Seconds since then, monotonic."""
    steps: int
    """Scheduler steps since then."""
