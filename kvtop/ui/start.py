"""From a snapshot to a running screen: the first frame in plain ANSI, then Textual.

On a saturated machine importing Textual takes long. A true frame stands on the screen
before that, and Textual takes it over without clearing it.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

from kvtop.config import Options
from kvtop.draw.ansi import Colours, colours_of, frame
from kvtop.draw.screen import screen
from kvtop.draw.view import View
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
    from kvtop.model.snapshot import Snapshot
    from kvtop.stream.target import Target
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
) -> int:
    """Show the live screen until the user quits.

    Args:
        target: Where to look. None: this machine.
        options: What the user asked for.
        first: A snapshot for the first frame. None: a frame that says it is reading.
        feed: Where snapshots come from. None: the live stream of `target`.

    Returns:
        0 when the user quit, 128 + the number of the signal that ended it.

    Raises:
        UsageError: No terminal, or one that cannot be drawn on.
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
    colours = colours_of(os.environ)
    view = View(
        interval_s=options.interval_s,
        stacks_on=options.stacks,
        ascii=options.ascii or wants_ascii(os.environ, sys.stdout.encoding),
        mono=colours is Colours.NONE,
        now_s=first.time_s if first is not None else 0.0,
    )
    guard = Guard(sys.stdin.fileno(), sys.stdout.fileno())
    before = {number: signal.signal(number, _raise) for number in SIGNALS}
    try:
        guard.enter()
        width, height = size_of(sys.stdout.fileno())
        lines = screen(first, view, width, height, footer_keys(view))
        guard.write(frame(lines, colours))
        prepare_textual()
        # Imported after the first frame: all of this takes most of the start.
        from kvtop.ui.app import KvtopApp
        from kvtop.ui.driver import driver_for
        from kvtop.ui.loop import run_app

        feed = feed or _feed(target, options)
        app = KvtopApp(feed, view, first, colours, driver_for(guard), lines)
        return run_app(app, guard, SIGNALS)
    except _Ended as ended:
        return 128 + ended.number
    finally:
        guard.restore()
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(number: int, _frame: FrameType | None) -> None:
    raise _Ended(number)


def _feed(target: Target | None, options: Options) -> Feed:
    from kvtop.stream.live import Live

    return Live(options, target)
