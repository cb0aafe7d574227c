"""Options that every watching command has."""

from __future__ import annotations

import argparse

from kvtop.config import Options, load


def add_watch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `options_from` reads."""
    parser.add_argument("--url", help="only the server at this address, e.g. 127.0.0.1:8000")
    parser.add_argument("--pid", help="only the server that this process belongs to")
    parser.add_argument("-i", "--interval", metavar="TIME", help="time between looks (1s)")
    parser.add_argument(
        "--no-gpus", dest="gpus", action="store_false", default=None, help="do not read NVML"
    )


def add_screen_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that draw the live screen."""
    parser.add_argument(
        "--ascii", action="store_true", default=None, help="draw with ASCII characters only"
    )
    parser.add_argument(
        "--no-stacks",
        dest="stacks",
        action="store_false",
        default=None,
        help="do not sample Python frames with py-spy",
    )
    parser.add_argument(
        "--blackbox",
        metavar="TIME",
        help="keep the last TIME on disk; written out here when something happens, or by key B",
    )


def options_from(parsed: argparse.Namespace) -> Options:
    """The options in force, from flags, environment and file.

    Raises:
        UsageError: One of them is wrong.
    """
    flags = {
        name: getattr(parsed, name, None)
        for name in ("url", "pid", "gpus", "ascii", "stacks", "attach", "allow_actions")
    }
    named = {"interval_s": "interval", "blackbox_s": "blackbox"}
    times = {name: getattr(parsed, option, None) for name, option in named.items()}
    return load({**flags, **times})
