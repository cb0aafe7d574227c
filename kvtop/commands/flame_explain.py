"""`kvtop flame --explain`: leak findings beside what the code was doing."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvtop.config import Options, load
from kvtop.detect.judge import Judge
from kvtop.detect.thresholds import apply_overrides
from kvtop.draw.text import safe
from kvtop.errors import ExitCode
from kvtop.flame import explain, files
from kvtop.flame.capture import warnings_of
from kvtop.flame.folded import Folded
from kvtop.model.capture import OK
from kvtop.model.snapshot import Counters, Finding, Snapshot

_MOST_LEAKS = 50
"""Leaks kept; of more, the newest."""
_RATES = ("allocated", "freed", "touched", "evicted")


@dataclass(slots=True)
class _Seen:
    """What a stretch of snapshots has shown."""

    judge: Judge
    leaks: dict[str, tuple[Finding, float]] = field(default_factory=dict)
    """Leaks that held at some time as they were last told, and when that was, Unix time."""
    last: Snapshot | None = None
    watched_s: float | None = None
    """How long a live engine was looked at. None: a session."""
    counted: dict[int | None, tuple[float, Counters, float, Counters]] = field(default_factory=dict)
    """First and last counters of each engine by pid, and their monotonic times."""

    def take(self, snapshot: Snapshot) -> None:
        """One snapshot more."""
        for finding in explain.wanted(self.judge.judge(snapshot)):
            key = explain.key_of(finding)
            self.leaks.pop(key, None)
            self.leaks[key] = finding, snapshot.time_s
            while len(self.leaks) > _MOST_LEAKS:
                del self.leaks[next(iter(self.leaks))]
        self.last = snapshot
        for engine in snapshot.engines:
            now = engine.counters
            if now is None:
                continue
            since, first, _, before = self.counted.get(
                engine.pid, (snapshot.mono_s, now, snapshot.mono_s, now)
            )
            if any((getattr(now, n) or 0) < (getattr(before, n) or 0) for n in _RATES):
                # It was started again, or its probe was.
                since, first = snapshot.mono_s, now
            self.counted[engine.pid] = (since, first, snapshot.mono_s, now)

    def rates(self, pid: int | None) -> dict[str, float | None]:
        """Mean rates of an engine over the stretch; None where not known."""
        out: dict[str, float | None] = dict.fromkeys(_RATES)
        pids = [e.pid for e in (self.last.engines if self.last else ()) if pid in (None, e.pid)]
        if len(pids) != 1 or pids[0] not in self.counted:
            return out
        since, first, until, last = self.counted[pids[0]]
        for name in _RATES:
            old, new = getattr(first, name), getattr(last, name)
            if old is not None and new is not None and until > since:
                out[name] = (new - old) / (until - since)
        return out


def run(parsed: argparse.Namespace) -> int:
    """Print the table.

    Raises:
        NotFoundError: No engine, or no such file.
        KvtopError: The capture failed, or a file cannot be read.
    """
    options = load({})
    seen = _Seen(Judge(apply_overrides(options.findings)))
    folded = files.load(Path(parsed.view)) if parsed.view else None
    pid: int | None = None
    if parsed.session:
        pid = int(parsed.pid) if parsed.pid and parsed.pid.isdecimal() else None
        recorded = _replay(parsed.session, seen, pid)
        folded = folded or recorded
    else:
        from kvtop.commands.flame import plan_of

        plan = plan_of(parsed)
        pid = plan.pid
        if folded is None:
            for warning in warnings_of(plan):
                print(f"kvtop: {warning}", file=sys.stderr)
        folded = asyncio.run(_watch(parsed, options, seen, folded))
        seen.watched_s = plan.seconds
    print("\n".join(safe(line) for line in lines_of(seen, folded, pid)))
    return ExitCode.OK


def lines_of(seen: _Seen, folded: Folded | None, pid: int | None) -> list[str]:
    """The table from what was seen."""
    now_s = seen.last.time_s if seen.last else 0.0
    leaks = [
        (finding, until)
        for finding, until in seen.leaks.values()
        if pid is None or finding.engine_pid in (None, pid)
    ]
    # Those that hold still come first.
    leaks.sort(key=lambda leak: -leak[1])
    findings = [finding for finding, _ in leaks]
    over = {explain.key_of(finding): until for finding, until in leaks if until < now_s}
    if folded is not None:
        shares, samples = explain.split(folded), folded.total
        found: list[explain.Site] | None = explain.sites(folded)
    else:
        shares, samples = _recorded(seen.last, pid)
        found = None
    rates = seen.rates(pid)
    return explain.table(findings, shares, found, rates, samples, now_s, seen.watched_s, over)


def _recorded(last: Snapshot | None, pid: int | None) -> tuple[dict[str, float], int]:
    """Shares and samples of a session's top frames; without whole stacks, so no sites."""
    for stacks in last.stacks if last else ():
        if pid in (None, stacks.pid) and stacks.split:
            return dict(stacks.split), stacks.samples
    return {}, 0


def _replay(name: str, seen: _Seen, pid: int | None) -> Folded | None:
    """Take every snapshot of a session; the last stacks that were captured meanwhile."""
    from kvtop.commands.files import opened
    from kvtop.flame.record import folded_of

    with opened(name) as reader:
        for snapshot in reader.snapshots():
            seen.take(snapshot)
        kept = [c for c in reader.captures() if c.outcome == OK and pid in (None, c.pid)]
        return folded_of(reader.stacks_of(kept[-1]), name) if kept else None


async def _watch(
    parsed: argparse.Namespace, options: Options, seen: _Seen, folded: Folded | None
) -> Folded:
    """Snapshots for as long as the capture takes; the capture, or the one given."""
    from kvtop.commands.flame import plan_of, record
    from kvtop.stream.live import Live
    from kvtop.stream.target import Target

    plan = plan_of(parsed)
    live = Live(replace(options, pid=plan.pid, url=None, stacks=False, gpus=False), Target())

    async def follow() -> None:
        async for snapshot in live.snapshots():
            seen.take(snapshot)

    following = asyncio.ensure_future(follow())
    try:
        if folded is None:
            return (await record(plan)).folded
        await asyncio.wait({following}, timeout=plan.seconds)
        return folded
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
        await live.close()
