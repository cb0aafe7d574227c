"""`kvtop once`: one snapshot as text or JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import replace

from kvtop.commands.common import add_watch_arguments, options_from
from kvtop.config import Options
from kvtop.draw.plain import plain
from kvtop.errors import ExitCode
from kvtop.model.codec import once_json
from kvtop.model.snapshot import Snapshot, SourceState
from kvtop.stream.live import Live
from kvtop.stream.target import Target, check_target

PATIENCE_S = 3.0
"""Longest wait for sources that have not answered yet."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvtop once`."""
    add_watch_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--rates", action="store_true", help="look twice, one interval apart, so rates are known"
    )


def run(parsed: argparse.Namespace) -> int:
    """Print one snapshot.

    Returns:
        NOT_FOUND when there is no vLLM server.
    """
    options = replace(options_from(parsed), stacks=False)
    check_target(options)
    snapshot = asyncio.run(take(options, Target(), rates=parsed.rates))
    if parsed.json:
        print(json.dumps(once_json(snapshot), ensure_ascii=True, allow_nan=False))
    else:
        print("\n".join(plain(snapshot)))
    found = any(e.metrics or (e.pid is not None and e.alive) for e in snapshot.engines)
    return ExitCode.OK if found else ExitCode.NOT_FOUND


async def take(options: Options, target: Target, *, rates: bool = False) -> Snapshot:
    """One snapshot in which every source has answered or failed, or patience is over.

    Args:
        options: What to look at.
        target: Where.
        rates: Take the snapshot one interval after the first one that is complete.
    """
    live = Live(replace(options, interval_s=min(options.interval_s, 0.25)), target)
    deadline = time.monotonic() + PATIENCE_S
    complete_at: float | None = None
    try:
        async for snapshot in live.snapshots():
            now = time.monotonic()
            if complete_at is None and (settled(snapshot) or now >= deadline):
                complete_at = now
            if complete_at is not None and (not rates or now - complete_at >= options.interval_s):
                return snapshot
    finally:
        await live.close()
    raise AssertionError("the live stream does not end")


def settled(snapshot: Snapshot) -> bool:
    """Whether no source is still waiting for its first answer."""
    return bool(snapshot.sources) and all(
        source.state is not SourceState.STARTING for source in snapshot.sources
    )
