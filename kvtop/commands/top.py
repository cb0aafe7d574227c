"""`kvtop`: the live screen."""

from __future__ import annotations

import argparse
import sys

from kvtop.commands.common import add_screen_arguments, add_watch_arguments, options_from
from kvtop.config import Options
from kvtop.errors import UsageError
from kvtop.stream.first import first_look
from kvtop.stream.target import Target, check_target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of plain `kvtop`."""
    add_watch_arguments(parser)
    add_screen_arguments(parser)


def run(parsed: argparse.Namespace) -> int:
    """Watch the servers of this machine until the user quits.

    Raises:
        UsageError: A wrong option, or no terminal to draw on.
        NotFoundError: `--pid` names no process.
    """
    options = options_from(parsed)
    check_target(options)
    return run_on(Target(), options)


def run_on(target: Target, options: Options) -> int:
    """The live screen on one target.

    Raises:
        UsageError: Standard output is not a terminal.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("the live screen needs a terminal", "use `kvtop once` in scripts")
    first = first_look(options, target)
    from kvtop.ui.start import run as run_ui

    return run_ui(target=target, options=options, first=first)
