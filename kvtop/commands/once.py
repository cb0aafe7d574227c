"""`kvtop once`: one snapshot as text or JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace

from kvtop.commands.common import add_watch_arguments, options_from
from kvtop.config import Options
from kvtop.detect.judge import Judge
from kvtop.detect.thresholds import apply_overrides
from kvtop.draw.plain import plain
from kvtop.errors import ExitCode
from kvtop.model.codec import once_json
from kvtop.model.snapshot import Finding, Snapshot, SourceState
from kvtop.stream.live import Live
from kvtop.stream.target import Target, check_target

PATIENCE_S = 3.0
"""Longest wait for sources that have not answered yet."""
LOOK_S = 12.0
"""Longest wait for the first look at this machine's processes, where it is that busy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvtop once`."""
    add_watch_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--file",
        metavar="FILE",
        help="the last snapshot that a probe has left as its engine died, instead of looking",
    )
    parser.add_argument(
        "--rates", action="store_true", help="look twice, one interval apart, so rates are known"
    )


def run(parsed: argparse.Namespace) -> int:
    """Print one snapshot.

    Returns:
        NOT_FOUND when there is no vLLM server, UNREACHABLE when a probe does not answer.
    """
    options = replace(options_from(parsed), stacks=False)
    if parsed.file is not None:
        from kvtop.commands.once_file import load

        snapshot = load(parsed.file)
        judged = Judge(apply_overrides(options.findings)).judge(snapshot)
        _print(snapshot, judged, as_json=parsed.json)
        return ExitCode.OK
    check_target(options)
    judge = Judge(apply_overrides(options.findings))
    taken: list[tuple[Snapshot, tuple[Finding, ...]]] = []

    async def look() -> None:
        taken.append(await take(options, Target(), judge.judge, rates=parsed.rates))

    # The result does not go through the task: asyncio.run makes a repr of the task on its
    # way out, which for 200,000 blocks takes longer than everything else.
    asyncio.run(look())
    ((snapshot, findings),) = taken
    _print(snapshot, findings, as_json=parsed.json)
    return outcome(snapshot)


def _print(snapshot: Snapshot, findings: tuple[Finding, ...], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(once_json(snapshot, findings), ensure_ascii=True, allow_nan=False))
    else:
        print("\n".join(plain(snapshot, findings)))


def outcome(snapshot: Snapshot) -> ExitCode:
    """What the shell is told: a server was found, none was, or a probe is there and silent."""
    if not any(e.metrics or (e.pid is not None and e.alive) for e in snapshot.engines):
        # A machine so busy that even /proc was not read in time is no proof of absence.
        return ExitCode.UNREACHABLE if _is_looking(snapshot) else ExitCode.NOT_FOUND
    silent = (SourceState.FAILED, SourceState.STARTING)
    if any(s.kind == "engine" and s.state in silent for s in snapshot.sources):
        return ExitCode.UNREACHABLE
    return ExitCode.OK


def _is_looking(snapshot: Snapshot) -> bool:
    """Whether the first look for servers is not over."""
    return any(s.kind == "discovery" and s.state is SourceState.STARTING for s in snapshot.sources)


async def take(
    options: Options,
    target: Target,
    judge: Callable[[Snapshot], tuple[Finding, ...]],
    *,
    rates: bool = False,
) -> tuple[Snapshot, tuple[Finding, ...]]:
    """One snapshot in which every source has answered or failed, or patience is over.

    Args:
        options: What to look at.
        target: Where.
        judge: Is given every snapshot on the way; what needs history stays silent.
        rates: Take the snapshot one interval after the first one that is complete.

    Returns:
        The snapshot, and what the judge says of it.
    """
    live = Live(replace(options, interval_s=min(options.interval_s, 0.25)), target)
    deadline = time.monotonic() + PATIENCE_S
    complete_at: float | None = None
    try:
        async for snapshot in live.snapshots():
            now = time.monotonic()
            findings = judge(snapshot)
            looked = not _is_looking(snapshot) or now >= deadline + LOOK_S - PATIENCE_S
            if complete_at is None and (settled(snapshot) or (looked and now >= deadline)):
                complete_at = now
            if complete_at is not None and (not rates or now - complete_at >= options.interval_s):
                return snapshot, findings
    finally:
        await live.close()
    raise AssertionError("the live stream does not end")


def settled(snapshot: Snapshot) -> bool:
    """Whether no source is still waiting for its first answer."""
    return bool(snapshot.sources) and all(
        source.state is not SourceState.STARTING for source in snapshot.sources
    )
