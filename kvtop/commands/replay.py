"""`kvtop replay`: the live screen on a session file."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from kvtop.commands.common import options_from
from kvtop.commands.files import opened
from kvtop.config import load
from kvtop.errors import ExitCode, UsageError
from kvtop.model.codec import once_json
from kvtop.model.snapshot import Finding
from kvtop.session.reader import SessionReader
from kvtop.session.replay import SPEEDS, Replay
from kvtop.session.units import Span, parse_moment_within
from kvtop.session.walk import Walk


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvtop replay`."""
    parser.add_argument("file", metavar="FILE", help="a session file; - is standard input")
    parser.add_argument("--at", metavar="MOMENT", help="begin at 12:04:51, 50%%, +90s or -30s")
    parser.add_argument(
        "--speed", default="1", metavar="X", help=f"{SPEEDS[0]:g} to {SPEEDS[-1]:g} (1)"
    )
    parser.add_argument("--paused", action="store_true", help="begin paused")
    parser.add_argument("--text", action="store_true", help="print that moment as text and exit")
    parser.add_argument("--json", action="store_true", help="print that moment as JSON and exit")
    parser.add_argument(
        "--ascii", action="store_true", default=None, help="draw with ASCII characters only"
    )


def run(parsed: argparse.Namespace) -> int:
    """Show a session file, or print one moment of it.

    Raises:
        UsageError: A wrong option, or no terminal.
        NotFoundError, DeniedError, BadDataError: The file cannot be read.
    """
    speed = _speed(parsed.speed)
    with opened(parsed.file) as reader:
        tick = _tick(reader, parsed.at, last=parsed.text or parsed.json)
        if parsed.json or parsed.text:
            snapshot, findings = reader.load(tick), _judged(reader.path, tick)
            if parsed.json:
                print(json.dumps(once_json(snapshot, findings), allow_nan=False))
            else:
                from kvtop.draw.plain import plain

                print("\n".join(plain(snapshot, findings)))
            return ExitCode.OK
        return _show(reader, tick, speed, parsed)


def _show(reader: SessionReader, tick: int, speed: float, parsed: argparse.Namespace) -> int:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("replaying needs a terminal", "use --text or --json in scripts")
    from kvtop.sources.base import SystemClock
    from kvtop.ui.start import run as run_ui

    options = replace(options_from(parsed), interval_s=reader.info.interval_s or 1.0)
    player = Replay(reader, SystemClock(), speed=speed, playing=not parsed.paused)
    player.seek(tick)
    return run_ui(options=options, first=reader.load(tick), replay=player)


def _judged(path: Path, tick: int) -> tuple[Finding, ...]:
    """What held at a tick, judged from the minutes before it."""
    from kvtop.detect.judge import Judge
    from kvtop.detect.thresholds import apply_overrides

    limits = apply_overrides(load({}).findings)
    walk = Walk(path, lambda: Judge(limits).judge)
    try:
        for _ in walk.to(tick):
            pass
        return walk.findings
    finally:
        walk.close()


def _tick(reader: SessionReader, moment: str | None, last: bool) -> int:
    if moment is None:
        return reader.last_tick if last else reader.first_tick
    return reader.tick_at(parse_moment_within(moment, Span(reader.first_s, reader.last_s)))


def _speed(text: str) -> float:
    try:
        speed = float(text.removesuffix("x"))
    except ValueError:
        speed = 0.0
    if not SPEEDS[0] <= speed <= SPEEDS[-1]:
        raise UsageError(f"--speed: {text!r}", f"from {SPEEDS[0]:g} to {SPEEDS[-1]:g}")
    return speed
