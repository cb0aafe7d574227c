"""The replay's side of the screen: the player's controls, its timeline, its past.

After every move the charts and findings of the moment are walked to from what came
before it, in slices, so that the moment itself is on screen at once and keys are never
late. What is left of the time goes into judging the whole file for the timeline.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from kvtop.draw.numbers import clock
from kvtop.draw.view import Mark, Player
from kvtop.errors import BadDataError, UsageError
from kvtop.flame.folded import Folded
from kvtop.flame.record import folded_of
from kvtop.model.capture import OK
from kvtop.model.history import History
from kvtop.model.snapshot import Finding
from kvtop.session.replay import Position, Replay
from kvtop.session.timeline import Event
from kvtop.session.units import Span, parse_moment
from kvtop.session.walk import Judge, Scan, Walk
from kvtop.ui.effects import Play
from kvtop.ui.session_keys import EVENT_KINDS

_SLICE_S = 0.01
"""Longest piece of work between two looks at keys."""
_PAUSE_S = 0.03
"""Rest between two slices of the scan, so that it takes a part of one core only."""
_SHORT_PAUSE_S = 0.005
"""Such a rest while the file is looked over for the first time."""
_IDLE_S = 0.5
_AT_ONCE = 8
"""Ticks walked before a frame and not after it, when it follows the one before closely."""
_MOST_MARKS = 1000
"""Marks on the timeline; more than a screen has cells."""


class Deck:
    """Plays one session file for the screen.

    Args:
        replay: The player, which is also the feed of the screen.
        make_judge: Makes a judge that has seen nothing.
    """

    def __init__(self, replay: Replay, make_judge: Callable[[], Judge]) -> None:
        self._replay = replay
        self._walk = Walk(replay.reader.path, make_judge)
        self._scan = Scan(replay.reader.path, make_judge)
        self._kind = EVENT_KINDS[0]
        self._moved = asyncio.Event()
        self._findings: tuple[Finding, ...] = ()
        self._event_marks: tuple[Mark, ...] = ()
        self._events_of = -1
        self._marks: tuple[Mark, ...] = ()
        self._marks_of: tuple[int, int] | None = None

    @property
    def history(self) -> History:
        """Numbers up to the moment shown."""
        return self._walk.history

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What holds at the moment shown; empty until that was walked to."""
        return self._findings

    def moved(self) -> None:
        """The player shows another tick: walk there, at once where that is short."""
        tick = self._replay.position().tick
        if not self._walk.follows(tick):
            self._findings = ()
        elif tick - self._walk.tick <= _AT_ONCE:
            for _ in self._walk.to(tick):
                pass
            self._findings = self._walk.findings
        self._moved.set()

    async def work(self, changed: Callable[[], None]) -> None:
        """Walk and scan for ever.

        Args:
            changed: Called when there is something new to draw.
        """
        told: object = None
        while True:
            tick = self._replay.position().tick
            if self._walk.tick != tick:
                await self._walk_to(tick)
                changed()
            elif await self._scan_some():
                now = (self._scan.version, round(100 * self._scan.share))
                if now != told:
                    told = now
                    changed()
                # The first look is short; what is left to do then may take its time.
                await asyncio.sleep(_SHORT_PAUSE_S if self._scan.looking_over else _PAUSE_S)
            else:
                await self._rest()

    async def _walk_to(self, tick: int) -> None:
        began = time.monotonic()
        for _ in self._walk.to(tick):
            if time.monotonic() - began > _SLICE_S:
                await asyncio.sleep(0)
                began = time.monotonic()
                if not self._walk.follows(self._replay.position().tick):
                    # The player has jumped again: what was begun leads nowhere.
                    return
        self._findings = self._walk.findings

    async def _scan_some(self) -> bool:
        """A slice of the scan; False when all there is was judged."""
        began = time.monotonic()
        while time.monotonic() - began < _SLICE_S:
            if not self._scan.step():
                return False
        return True

    async def _rest(self) -> None:
        self._moved.clear()
        waiting = asyncio.ensure_future(self._moved.wait())
        await asyncio.wait({waiting}, timeout=_IDLE_S)
        waiting.cancel()

    def control(self, play: Play) -> str:
        """Do what a key says; a message for the footer, or nothing."""
        replay = self._replay
        match play.what:
            case "toggle":
                replay.toggle()
            case "faster":
                replay.faster()
            case "slower":
                replay.slower()
            case "step":
                replay.step(play.number)
            case "event":
                return self._jump(play.number)
            case "kind":
                place = EVENT_KINDS.index(self._kind)
                self._kind = EVENT_KINDS[(place + 1) % len(EVENT_KINDS)]
                return f"n and N go to: {self._kind}"
            case _:
                pass
        return ""

    def seek(self, text: str) -> str:
        """Go to a typed moment, times of day as the screen shows them; a message or nothing."""
        position = self._replay.position()
        span = Span(position.first_s, position.last_s)
        try:
            moment = parse_moment(text, span, zone=None)
        except UsageError as error:
            return error.line()
        self._replay.seek_time(moment)
        if not span.outside(moment):
            return ""
        # The nearest moment is shown; the times are those of the screen.
        ends = f"{clock(span.first_s)} to {clock(span.last_s)}"
        return f"'{text}' is outside the recording; it holds {ends}"

    def _events(self) -> list[tuple[Event, str]]:
        found = [(event, "") for event in self._replay.events()] + self._scan.events
        return sorted(found, key=lambda pair: pair[0].tick)

    def _jump(self, direction: int) -> str:
        now = self._replay.position().tick
        wanted = [e for e, _ in self._events() if self._kind in ("any", e.kind)]
        if direction > 0:
            event = next((e for e in wanted if e.tick > now), None)
        else:
            event = next((e for e in reversed(wanted) if e.tick < now), None)
        if event is None:
            what = "event" if self._kind == "any" else self._kind
            more = ""
            if self._kind in ("any", "finding") and self._scan.tick < self._replay.reader.last_tick:
                more = "; the file is still being judged"
            return f"no {what} {'after' if direction > 0 else 'before'} this moment{more}"
        self._replay.seek(event.tick)
        return f"{clock(event.time_s)} {event.kind}" + (f": {event.text}" if event.text else "")

    def stacks(self) -> tuple[Folded, Folded | None] | None:
        """The last captured stacks at or before the moment shown, and those before them.

        None: there are none.
        """
        reader = self._replay.reader
        found: list[Folded] = []
        for capture in reversed(reader.captures(self._replay.position().tick)):
            if capture.outcome == OK and len(found) < 2:
                # A damaged one hides none of the others.
                with contextlib.suppress(BadDataError):
                    title = f"{reader.info.host} pid {capture.pid} {clock(capture.time_s)}"
                    found.append(folded_of(reader.stacks_of(capture), title))
        return None if not found else (found[0], found[1] if len(found) > 1 else None)

    def player(self) -> Player:
        """Where it is, for the drawing."""
        position = self._replay.position()
        return Player(
            time_s=position.time_s,
            first_s=position.first_s,
            last_s=position.last_s,
            playing=position.playing,
            speed=position.speed,
            at_end=position.at_end,
            growing=position.growing,
            marks=self._timeline(position),
            kind=self._kind,
            judged=self._scan.share,
        )

    def _timeline(self, position: Position) -> tuple[Mark, ...]:
        """Marks thinned to what a screen can show; kept until there are new ones."""
        # A growing file gets new events with almost every tick: looked at now and then.
        grown = position.last_tick // 16
        if grown != self._events_of:
            self._events_of = grown
            # Hundreds of thousands in a day; findings come and go while they stay.
            self._event_marks = _thinned([(e, "") for e in self._replay.events()], position)
            self._marks_of = None
        if self._scan.version != self._marks_of:
            self._marks_of = self._scan.version
            self._marks = (*self._event_marks, *_thinned(self._scan.events, position))
        return self._marks

    def close(self) -> None:
        """Close the files."""
        self._walk.close()
        self._scan.close()


def _thinned(events: list[tuple[Event, str]], position: Position) -> tuple[Mark, ...]:
    """One mark of a kind and severity for each place on the timeline."""
    length = max(position.last_s - position.first_s, 1e-9)
    kept: dict[tuple[str, str, int], Mark] = {}
    for event, severity in events:
        place = int((event.time_s - position.first_s) / length * _MOST_MARKS)
        key = (event.kind, severity, place)
        if key not in kept:
            kept[key] = Mark(event.time_s, event.kind, severity)
    return tuple(kept.values())
