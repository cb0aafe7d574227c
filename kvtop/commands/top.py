"""`kvtop`: the live screen."""

from __future__ import annotations

import argparse
import sys

from kvtop.commands.common import add_screen_arguments, add_watch_arguments, options_from
from kvtop.config import Options
from kvtop.errors import UsageError
from kvtop.flame.auto import parse_kinds
from kvtop.stream.first import first_look
from kvtop.stream.target import Target, check_target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of plain `kvtop`."""
    add_watch_arguments(parser)
    add_screen_arguments(parser)
    parser.add_argument(
        "--flame-on",
        metavar="WHAT",
        help="a flame graph when one of these begins: stall,leak,preempt-storm",
    )
    parser.add_argument(
        "--attach",
        action="store_true",
        default=None,
        help="put the probe into engines that have none, without a question",
    )
    parser.add_argument(
        "--allow-actions",
        action="store_true",
        default=None,
        help="let keys X and C abort a request and reset the prefix cache, after a question",
    )


def run(parsed: argparse.Namespace) -> int:
    """Watch the servers of this machine until the user quits.

    Raises:
        UsageError: A wrong option, or no terminal to draw on.
        NotFoundError: `--pid` names no process.
    """
    options = options_from(parsed)
    check_target(options)
    flame_on = parse_kinds(parsed.flame_on) if parsed.flame_on is not None else frozenset()
    return run_on(Target(), options, flame_on)


def run_on(target: Target, options: Options, flame_on: frozenset[str] = frozenset()) -> int:
    """The live screen on one target.

    Raises:
        UsageError: Standard output is not a terminal.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("the live screen needs a terminal", "use `kvtop once` in scripts")
    first = first_look(options, target)
    from kvtop.ui.start import run as run_ui

    return run_ui(target=target, options=options, first=first, flame_on=flame_on)
