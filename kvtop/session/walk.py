"""A walk along a session file: the charts and the findings as they were at each tick.

The judge and the history are functions of the snapshots before a moment, so a player that
jumps must look at those again. The walk has a reader of its own: the player's stays where
the screen is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from kvtop.model.history import History
from kvtop.model.snapshot import Finding, Snapshot
from kvtop.session.reader import SessionReader
from kvtop.session.timeline import Event

BACK_S = 600.0
"""How far back a jump looks: longer than almost every rule needs."""
MOST_BETWEEN = 600
"""Ticks that are walked one by one rather than jumped over."""

ROUGH_TICKS = 7200
"""Ticks of the first look at a long file: as many as a report judges."""

Judge = Callable[[Snapshot], tuple[Finding, ...]]
"""Takes the snapshots in their order; gives the findings that hold at each."""


class Walk:
    """Findings and history up to one tick.

    Args:
        path: The session file.
        make_judge: Makes a judge that has seen nothing.
        back_s: Seconds before a tick that are looked at after a jump.
    """

    def __init__(self, path: Path, make_judge: Callable[[], Judge], back_s: float = BACK_S) -> None:
        self.reader = SessionReader(path)
        self._make_judge = make_judge
        self._judge = make_judge()
        self._back_s = back_s
        self.history = History()
        """Numbers of the ticks walked."""
        self.findings: tuple[Finding, ...] = ()
        """What holds at `tick`."""
        self.tick = 0
        """The last tick walked. 0: none."""

    def follows(self, tick: int) -> bool:
        """Whether a tick is reached without forgetting anything."""
        return self.tick != 0 and 0 <= tick - self.tick <= MOST_BETWEEN

    def to(self, tick: int) -> Iterator[int]:
        """Walk to a tick, one a step, so that others can work in between.

        A jump back, or far ahead, forgets everything and begins `back_s` before it.

        Yields:
            Each tick as it was taken.
        """
        reader = self.reader
        if tick > reader.last_tick:
            reader.refresh()
        tick = min(max(tick, reader.first_tick), reader.last_tick)
        if not self.follows(tick):
            self._judge = self._make_judge()
            self.history = History()
            self.findings = ()
            self.tick = reader.tick_at(reader.time_of(tick) - self._back_s) - 1
        while self.tick < tick:
            snapshot = reader.load(self.tick + 1)
            self.history.append(snapshot)
            self.findings = self._judge(snapshot)
            self.tick += 1
            yield self.tick

    def close(self) -> None:
        """Close the file."""
        self.reader.close()


class Scan:
    """Looks for the beginning of every finding in a session.

    A long file is judged twice: first every so many-th tick, so that its timeline is filled
    in a minute and not in a quarter of an hour, then every tick from the first one on.

    Args:
        path: The session file.
        make_judge: Makes a judge that has seen nothing.
        rough_ticks: Ticks of the first look; a file of no more has only the exact one.
    """

    def __init__(
        self, path: Path, make_judge: Callable[[], Judge], rough_ticks: int = ROUGH_TICKS
    ) -> None:
        self._reader = SessionReader(path)
        reader = self._reader
        stride = -(-(reader.last_tick - reader.first_tick + 1) // rough_ticks)
        self._rough = _Pass(reader, make_judge(), stride) if stride > 1 else None
        self._exact = _Pass(reader, make_judge(), 1)

    def step(self) -> bool:
        """Judge the next tick; False when there is none (yet)."""
        if self.looking_over and self._rough is not None:
            self._rough.step()
            return True
        if self._exact.tick >= self._reader.last_tick and not self._reader.refresh():
            return False
        self._exact.step()
        return True

    @property
    def looking_over(self) -> bool:
        """Whether the first, rough look is still under way."""
        rough = self._rough
        return rough is not None and rough.tick + rough.stride <= self._reader.last_tick

    @property
    def events(self) -> list[tuple[Event, str]]:
        """Findings as events of kind `finding`, each with its severity, in order.

        Up to `tick` they are exact; behind it they are those of the rough look.
        """
        rough = self._rough.events if self._rough is not None else []
        return self._exact.events + [pair for pair in rough if pair[0].tick > self._exact.tick]

    @property
    def version(self) -> tuple[int, int]:
        """Another value when `events` may be others."""
        rough = self._rough.events if self._rough is not None else []
        behind = sum(event.tick > self._exact.tick for event, _ in rough)
        return len(self._exact.events), behind

    @property
    def tick(self) -> int:
        """The last tick judged exactly."""
        return self._exact.tick

    @property
    def share(self) -> float:
        """How much of the file has been judged, rough or exact, 0 to 1."""
        if self._rough is not None and not self.looking_over:
            return 1.0
        reader = self._reader
        length = max(reader.last_tick - reader.first_tick + 1, 1)
        done = max(self._exact.tick, self._rough.tick if self._rough is not None else 0)
        return min(max((done - reader.first_tick + 1) / length, 0.0), 1.0)

    def close(self) -> None:
        """Close the file."""
        self._reader.close()


class _Pass:
    """Judges every so many-th tick, in order."""

    def __init__(self, reader: SessionReader, judge: Judge, stride: int) -> None:
        self._reader = reader
        self._judge = judge
        self._held: set[tuple[str, int | None, tuple[str, ...]]] = set()
        self.stride = stride
        self.tick = reader.first_tick - stride
        self.events: list[tuple[Event, str]] = []

    def step(self) -> None:
        """Judge the next one."""
        snapshot = self._reader.load(self.tick + self.stride)
        self.tick += self.stride
        held = set()
        for finding in self._judge(snapshot):
            if finding.rule.startswith("diagnosis."):
                continue
            key = (finding.rule, finding.engine_pid, finding.request_ids[:1])
            held.add(key)
            if key not in self._held:
                text = f"{finding.severity} {finding.rule}: {finding.summary}"
                event = Event(self.tick, snapshot.time_s, "finding", text)
                self.events.append((event, finding.severity))
        self._held = held
