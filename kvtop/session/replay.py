"""Replay: a session file as the same stream of snapshots that a live engine gives.

It implements the feed of the screen, and adds the controls of a player. Intervals come
from the recording's monotonic clock; the clock that it is played against is injected.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtop.model.detail import Detail
from kvtop.model.snapshot import Engine, Snapshot
from kvtop.session.reader import SessionReader
from kvtop.session.timeline import Event, timeline
from kvtop.session.units import Span, parse_moment

SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""The speeds that `faster` and `slower` go through."""
LATE_S = 0.5
"""A screen that is later than this gets the newest due snapshot, as in the live stream."""
FOLLOW_S = 0.5
"""How often a file that is still being written is looked at, at its end."""


class PlayClock(Protocol):
    """The clock a session is played against."""

    def monotonic(self) -> float:
        """Seconds from some point."""

    async def sleep(self, seconds: float, /) -> None:
        """Wait."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where the player is."""

    tick: int
    """Tick shown."""
    time_s: float
    """Its time."""
    first_tick: int
    """First tick of the file."""
    last_tick: int
    """Last tick of the file."""
    first_s: float
    """Time of the first tick."""
    last_s: float
    """Time of the last tick."""
    playing: bool
    """False: paused."""
    speed: float
    """1 is as it was recorded."""
    at_end: bool
    """True: there is nothing after it (yet)."""
    growing: bool
    """True: its writer has not closed the file."""

    @property
    def percent(self) -> float:
        """Share of the session's time that is over, 0-100."""
        length = self.last_s - self.first_s
        return 100.0 * (self.time_s - self.first_s) / length if length > 0 else 100.0


class Replay:
    """Plays one session file.

    Args:
        reader: The open file; closed by `close`.
        clock: What it is played against.
        speed: One of `SPEEDS` or between.
        playing: False: begin paused.
    """

    def __init__(
        self,
        reader: SessionReader,
        clock: PlayClock,
        speed: float = 1.0,
        playing: bool = True,
    ) -> None:
        self.reader = reader
        self._clock = clock
        self._speed = min(max(speed, SPEEDS[0]), SPEEDS[-1])
        self._playing = playing
        self._tick = reader.first_tick
        self._wanted: int | None = reader.first_tick
        self._wake = asyncio.Event()
        self._closed = False
        self._events: list[Event] | None = None
        self._events_at = 0
        self._anchor = (0.0, 0.0)

    async def snapshots(self) -> AsyncIterator[Snapshot]:
        """Yield what the player shows, for as long as it is open."""
        while not self._closed:
            self._wake.clear()
            if self._wanted is not None:
                tick, self._wanted = self._wanted, None
                yield self._show(tick, jump=True)
            elif not self._playing:
                await self._wake.wait()
            else:
                due = await self._next_due()
                if due is not None:
                    yield self._show(due, jump=False)

    def _show(self, tick: int, jump: bool) -> Snapshot:
        self._tick = tick
        snapshot = self.reader.load(tick)
        if jump:
            self._anchor = (self._clock.monotonic(), snapshot.mono_s)
        return snapshot

    async def _next_due(self) -> int | None:
        """The next tick to show, once its time has come; None when something changed."""
        if self._tick >= self.reader.last_tick and not self.reader.refresh():
            await self._rest(FOLLOW_S)
            return None
        ahead = self.reader.clocks(self._tick + 1, self._tick + 256)
        played = (self._clock.monotonic() - self._anchor[0]) * self._speed + self._anchor[1]
        tick, _, mono_s = ahead[0]
        wait_s = (mono_s - played) / self._speed
        if wait_s > 0:
            if await self._rest(wait_s):
                return None
            return tick
        if -wait_s > LATE_S:
            due = [number for number, _, mono in ahead if mono <= played]
            tick = due[-1] if due else tick
        return tick

    async def _rest(self, seconds: float) -> bool:
        """Wait; True when a control ended it early."""
        sleeping = asyncio.ensure_future(self._clock.sleep(seconds))
        waking = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait({sleeping, waking}, return_when=asyncio.FIRST_COMPLETED)
            return self._wake.is_set()
        finally:
            for task in (sleeping, waking):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(sleeping, waking, return_exceptions=True)

    def _rebase(self) -> None:
        """Play on from the tick shown, from now."""
        clocks = self.reader.clocks(self._tick, self._tick)
        self._anchor = (self._clock.monotonic(), clocks[0][2] if clocks else 0.0)
        self._wake.set()

    def play(self) -> None:
        """Go on."""
        self._playing = True
        self._rebase()

    def pause(self) -> None:
        """Stand still."""
        self._playing = False
        self._wake.set()

    def toggle(self) -> None:
        """Play or pause."""
        if self._playing:
            self.pause()
        else:
            self.play()

    def set_speed(self, speed: float) -> None:
        """Play at another speed, within the limits of `SPEEDS`."""
        self._speed = min(max(speed, SPEEDS[0]), SPEEDS[-1])
        self._rebase()

    def faster(self) -> None:
        """The next speed up."""
        self.set_speed(next((s for s in SPEEDS if s > self._speed), SPEEDS[-1]))

    def slower(self) -> None:
        """The next speed down."""
        self.set_speed(next((s for s in reversed(SPEEDS) if s < self._speed), SPEEDS[0]))

    def seek(self, tick: int) -> None:
        """Show a tick; the nearest when there is none of that number."""
        self.reader.refresh()
        self._wanted = min(max(tick, self.reader.first_tick), self.reader.last_tick)
        self._wake.set()

    def step(self, ticks: int) -> None:
        """Pause, and go some ticks on (or back when negative)."""
        self._playing = False
        self.seek((self._tick if self._wanted is None else self._wanted) + ticks)

    def seek_time(self, time_s: float) -> None:
        """Show a moment."""
        self.seek(self.reader.tick_at(time_s))

    def seek_text(self, text: str) -> None:
        """Show a typed moment, see `session.units.parse_moment`.

        Raises:
            UsageError: It is none.
        """
        span = Span(self.reader.first_s, self.reader.last_s)
        self.seek_time(parse_moment(text, span))

    def seek_percent(self, percent: float) -> None:
        """Show the moment at a share of the session's time, 0-100."""
        self.seek(self.reader.tick_at_percent(percent))

    def seek_event(self, kind: str | None = None, direction: int = 1) -> Event | None:
        """Show the next (or the last, when negative) event.

        Args:
            kind: Only events of this kind. None: any.
            direction: 1 or -1.

        Returns:
            The event, or None when there is none.
        """
        now = self._tick if self._wanted is None else self._wanted
        events = [event for event in self.events() if kind is None or event.kind == kind]
        if direction > 0:
            found = next((event for event in events if event.tick > now), None)
        else:
            found = next((event for event in reversed(events) if event.tick < now), None)
        if found is not None:
            self.seek(found.tick)
        return found

    def events(self) -> list[Event]:
        """The timeline's events; read again when the file has grown."""
        if self._events is None or self._events_at != self.reader.last_tick:
            self._events = timeline(self.reader)
            self._events_at = self.reader.last_tick
        return self._events

    def position(self) -> Position:
        """Where the player is."""
        reader = self.reader
        return Position(
            tick=self._tick,
            time_s=reader.time_of(self._tick),
            first_tick=reader.first_tick,
            last_tick=reader.last_tick,
            first_s=reader.first_s,
            last_s=reader.last_s,
            playing=self._playing,
            speed=self._speed,
            at_end=self._tick >= reader.last_tick,
            growing=not reader.closed(),
        )

    def snapshot_at(self, time_s: float) -> Snapshot:
        """What was true at a moment, without moving the player."""
        return self.reader.snapshot_at(time_s)

    def before(self, seconds: float) -> list[Snapshot]:
        """The snapshots of the last seconds up to the one shown, without block columns.

        For charts and detectors, which look back: call it after a jump.
        """
        reader = self.reader
        first = reader.tick_at(reader.time_of(self._tick) - seconds)
        return list(reader.snapshots(first, self._tick - 1, columns=False))

    def set_interval(self, seconds: float) -> None:
        """The interval is the recording's own; nothing changes."""

    def set_visible(self, stacks: bool, pids: Sequence[int] = ()) -> None:
        """What was recorded costs nothing to show; nothing changes."""

    async def request_detail(self, engine: Engine, request_id: str) -> Detail:
        """The last block table of a request that was recorded by then."""
        return self.reader.detail(engine.pid, request_id, self._tick)

    async def close(self) -> None:
        """Stop, and close the file."""
        self._closed = True
        self._wake.set()
        self.reader.close()
