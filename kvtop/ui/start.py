"""From a snapshot to a running screen: the first frame in plain ANSI, then Textual.

On a saturated machine importing Textual takes long. A true frame stands on the screen
before that, and Textual takes it over without clearing it.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from kvtop.config import Options
from kvtop.draw.ansi import Colours, colours_of, frame
from kvtop.draw.screen import screen
from kvtop.draw.text import visible
from kvtop.draw.view import Player, View
from kvtop.errors import UsageError
from kvtop.ui.keys import footer_keys
from kvtop.ui.terminal import (
    Guard,
    can_draw,
    prepare_textual,
    size_of,
    wants_ascii,
)

if TYPE_CHECKING:
    from kvtop.flame.folded import Folded
    from kvtop.model.snapshot import Snapshot
    from kvtop.session.blackbox import BlackBox
    from kvtop.session.replay import Replay
    from kvtop.session.walk import Judge
    from kvtop.stream.target import Target
    from kvtop.ui.app import KvtopApp
    from kvtop.ui.deck import Deck
    from kvtop.ui.feed import Feed

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
"""Signals that end the screen and give the terminal back."""


class _Ended(BaseException):
    """A signal before the event loop runs."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run(
    *,
    target: Target | None = None,
    options: Options | None = None,
    first: Snapshot | None = None,
    feed: Feed | None = None,
    replay: Replay | None = None,
    flame: tuple[Folded, Folded | None] | None = None,
    flame_on: frozenset[str] = frozenset(),
) -> int:
    """Show the live screen until the user quits.

    Args:
        target: Where to look. None: this machine.
        options: What the user asked for.
        first: A snapshot for the first frame. None: a frame that says it is reading.
        feed: Where snapshots come from. None: the live stream of `target`, or `replay`.
        replay: The player of a session file. None: this is live.
        flame: Stacks to open the flame-graph viewer on, and older ones to compare with.
        flame_on: Rules whose findings start a capture.

    Returns:
        0 when the user quit, 128 + the number of the signal that ended it.

    Raises:
        UsageError: No terminal, one that cannot be drawn on, or a wrong threshold in the
            configuration.
        StorageError, DeniedError, NotFoundError: The black box cannot be made.
        Exception: A fault of kvtop's own; the terminal is given back before.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("the live screen needs a terminal", "use `kvtop once` in scripts")
    if not can_draw(os.environ):
        raise UsageError(
            f"the terminal {os.environ.get('TERM')!r} cannot be drawn on",
            "set TERM, or use `kvtop once`",
        )
    options = options or Options()
    if options.findings:
        # Refused before the screen is taken; without any there is nothing to import yet.
        judge_maker(options)
    colours = colours_of(os.environ)
    view = View(
        interval_s=options.interval_s,
        stacks_on=options.stacks,
        ascii=options.ascii or wants_ascii(os.environ, sys.stdout.encoding),
        mono=colours is Colours.NONE,
        now_s=first.time_s if first is not None else 0.0,
        allow_actions=options.allow_actions and replay is None,
    )
    if replay is not None:
        view = dataclasses.replace(view, player=_player(replay))
    guard = Guard(sys.stdin.fileno(), sys.stdout.fileno())
    blackbox = _blackbox(options) if replay is None else None
    before = {number: signal.signal(number, _raise) for number in SIGNALS}
    app: KvtopApp | None = None
    try:
        guard.enter()
        width, height = size_of(sys.stdout.fileno())
        lines = screen(first, view, width, height, footer_keys(view))
        guard.write(frame(lines, colours))
        prepare_textual()
        # Imported after the first frame: all of this takes most of the start.
        from kvtop.ui.app import KvtopApp
        from kvtop.ui.desk import Desk
        from kvtop.ui.driver import driver_for
        from kvtop.ui.loop import run_app

        feed = feed or replay or _feed(target, options)
        make_judge = judge_maker(options)
        app = KvtopApp(
            feed,
            view,
            first,
            colours,
            driver_for(guard),
            lines,
            desk=Desk(make_judge() if replay is None else None, blackbox),
            deck=None if replay is None else _deck(replay, make_judge),
            attach_first=options.attach and replay is None,
        )
        app.flames.at_start(flame, flame_on if replay is None else frozenset())
        return run_app(app, guard, SIGNALS)
    except _Ended as ended:
        return 128 + ended.number
    finally:
        guard.restore()
        for number, handler in before.items():
            signal.signal(number, handler)
        if blackbox is not None:
            blackbox.stop(0.5)
        for note in app.notes if app is not None else ():
            sys.stderr.write(f"kvtop: {visible(note)}\n")


def _raise(number: int, _frame: FrameType | None) -> None:
    raise _Ended(number)


def judge_maker(options: Options) -> Callable[[], Judge]:
    """Makes judges by the thresholds in force, each of which has seen nothing.

    Raises:
        UsageError: A threshold in the configuration is wrong.
    """
    from kvtop.detect.judge import Judge as Rules
    from kvtop.detect.thresholds import apply_overrides

    limits = apply_overrides(options.findings)
    return lambda: Rules(limits).judge


def _player(replay: Replay) -> Player:
    """Where a replay begins, for the first frame."""
    at = replay.position()
    return Player(at.time_s, at.first_s, at.last_s, at.playing, at.speed, growing=at.growing)


def _deck(replay: Replay, make_judge: Callable[[], Judge]) -> Deck:
    from kvtop.ui.deck import Deck

    return Deck(replay, make_judge)


def _blackbox(options: Options) -> BlackBox | None:
    """The black box that was asked for, already running."""
    if options.blackbox_s is None:
        return None
    from kvtop.session.blackbox import BlackBox

    blackbox = BlackBox(Path(), options.blackbox_s, interval_s=options.interval_s)
    blackbox.start()
    return blackbox


def _feed(target: Target | None, options: Options) -> Feed:
    from kvtop.stream.live import Live

    return Live(options, target)
