"""`kvtop record`: a session file without a screen."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvtop.commands.common import add_watch_arguments, options_from
from kvtop.commands.record_beside import Beside
from kvtop.config import Options
from kvtop.errors import ExitCode, StorageError, UsageError
from kvtop.flame.auto import parse_kinds
from kvtop.model.detail import Detail
from kvtop.model.snapshot import Engine, Finding, Snapshot
from kvtop.session.anonymize import Anonymizer
from kvtop.session.blackbox import BlackBox, TriggerRules
from kvtop.session.recorder import Recorder, RecorderStatus, default_name
from kvtop.session.units import parse_duration, parse_size, size_text


class Stream(Protocol):
    """Where snapshots come from."""

    def snapshots(self) -> AsyncIterator[Snapshot]:
        """Snapshots as they are taken."""

    async def request_detail(self, engine: Engine, request_id: str) -> Detail:
        """The block table of a request."""

    async def close(self) -> None:
        """Stop."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to write, and for how long."""

    recorder: Recorder | None
    """Writes the session. None: only the black box is asked for."""
    blackbox: BlackBox | None
    """Keeps the last minutes. None: not asked for."""
    judge: Callable[[Snapshot], tuple[Finding, ...]] | None
    """Findings for the black box and for captures. None: none."""
    for_s: float | None
    """How long. None: until stopped."""
    flame_on: frozenset[str] = frozenset()
    """Rules whose findings start a capture of stacks."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvtop record`."""
    add_watch_arguments(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="the new file (kvtop-TIME.kvtop)")
    parser.add_argument("--for", dest="duration", metavar="TIME", help="how long (until stopped)")
    parser.add_argument("--max-size", metavar="SIZE", help="stop at this size, e.g. 2G")
    parser.add_argument(
        "--rotate",
        action="store_true",
        help="at --max-size go on in a new file; the last 4 full ones are kept",
    )
    parser.add_argument(
        "--anonymize",
        action="store_true",
        help="never write request ids, model names, hosts, users, paths",
    )
    parser.add_argument(
        "--no-stacks",
        dest="stacks",
        action="store_false",
        default=None,
        help="do not sample Python frames with py-spy",
    )
    parser.add_argument(
        "--flame-on",
        metavar="WHAT",
        help="record 30 s of whole stacks when one of these begins: stall,leak,preempt-storm",
    )
    parser.add_argument(
        "--blackbox",
        dest="ring",
        metavar="TIME",
        help="keep only the last TIME on disk, and write it out when something happens",
    )
    parser.add_argument(
        "--blackbox-dir", metavar="DIR", default=".", help="where the black box writes (here)"
    )
    parser.add_argument(
        "--trigger",
        choices=("info", "warning", "critical", "none"),
        default="critical",
        help="findings that make the black box write (critical)",
    )
    parser.add_argument("--quiet", action="store_true", help="say nothing but errors")


def run(parsed: argparse.Namespace) -> int:
    """Record until stopped by Ctrl-C, SIGTERM, `--for` or `--max-size`.

    Raises:
        UsageError: A wrong option, or the file is already there.
        StorageError: The file cannot be written.
    """
    options = options_from(parsed)
    job = job_from(parsed, options)
    stream = open_stream(options)
    say: Callable[[str], None] = (lambda _: None) if parsed.quiet else _say
    if job.recorder is not None:
        job.recorder.start()
        say(f"recording to {job.recorder.status.path}; Ctrl-C stops")
    if job.blackbox is not None:
        job.blackbox.start()
        say(f"black box in {parsed.blackbox_dir}; Ctrl-C stops")
    try:
        asyncio.run(record(stream, job, say))
    finally:
        if job.blackbox is not None:
            job.blackbox.stop()
            for message in job.blackbox.messages():
                say(message)
        status = None if job.recorder is None else job.recorder.stop()
    return ExitCode.OK if status is None else _finish(status, say)


def open_stream(options: Options) -> Stream:
    """The live stream of this machine.

    Raises:
        UsageError, NotFoundError: There can be nothing to watch.
    """
    from kvtop.stream.live import Live
    from kvtop.stream.target import Target, check_target

    check_target(options)
    return Live(options, Target())


def job_from(parsed: argparse.Namespace, options: Options) -> Job:
    """What the command line asks for.

    Raises:
        UsageError: A wrong option.
    """
    if parsed.rotate and not parsed.max_size:
        raise UsageError("--rotate needs --max-size", "write for example --max-size 500M --rotate")
    max_bytes = parse_size(parsed.max_size) if parsed.max_size else None
    for_s = parse_duration(parsed.duration) if parsed.duration else None
    anonymizer = Anonymizer.of_this_machine() if parsed.anonymize else None
    blackbox = None
    judge = None
    if parsed.ring:
        severity = None if parsed.trigger == "none" else parsed.trigger
        blackbox = BlackBox(
            Path(parsed.blackbox_dir),
            parse_duration(parsed.ring),
            rules=TriggerRules(severity=severity),
            interval_s=options.interval_s,
            anonymizer=anonymizer,
        )
        judge = _judge(options) if severity is not None else None
    flame_on = parse_kinds(parsed.flame_on) if parsed.flame_on is not None else frozenset()
    if flame_on and judge is None:
        judge = _judge(options)
    recorder = None
    if parsed.output or blackbox is None:
        recorder = Recorder(
            Path(parsed.output or default_name(time.time())),
            interval_s=options.interval_s,
            anonymizer=anonymizer,
            max_bytes=max_bytes,
            rotate=parsed.rotate,
        )
    return Job(recorder, blackbox, judge, for_s, flame_on)


def _judge(options: Options) -> Callable[[Snapshot], tuple[Finding, ...]]:
    from kvtop.detect.judge import Judge
    from kvtop.detect.thresholds import apply_overrides

    return Judge(apply_overrides(options.findings)).judge


async def record(stream: Stream, job: Job, say: Callable[[str], None]) -> None:
    """Hand every snapshot to what writes, until it is over."""
    sinks = [sink for sink in (job.recorder, job.blackbox) if sink is not None]
    beside = Beside(sinks, stream, job.flame_on, say)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    feeding = asyncio.ensure_future(_feed(stream, job, beside, say))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait(
            {feeding, stopping}, timeout=job.for_s, return_when=asyncio.FIRST_COMPLETED
        )
        if feeding.done():
            feeding.result()
    finally:
        for task in (feeding, stopping):
            task.cancel()
        await asyncio.gather(feeding, stopping, return_exceptions=True)
        await beside.close()
        await stream.close()
        for number in numbers:
            loop.remove_signal_handler(number)


async def _feed(stream: Stream, job: Job, beside: Beside, say: Callable[[str], None]) -> None:
    async for snapshot in stream.snapshots():
        findings = () if job.judge is None else job.judge(snapshot)
        if job.recorder is not None:
            job.recorder.offer(snapshot)
            if job.recorder.status.state != "recording":
                return
        if job.blackbox is not None:
            job.blackbox.offer(snapshot, findings)
            for message in job.blackbox.messages():
                say(message)
            if job.blackbox.status.state == "failed":
                raise StorageError(f"the black box stopped: {job.blackbox.status.reason}")
        beside.take(snapshot, findings)


def _finish(status: RecorderStatus, say: Callable[[str], None]) -> int:
    text = f"{status.ticks} snapshots, {size_text(status.size_bytes)}"
    if status.dropped:
        text += f", {status.dropped} dropped because the disk did not keep up"
    if status.state == "failed":
        raise StorageError(f"{status.reason}; what was recorded is safe ({text})")
    say(f"wrote {status.path}: {text}" + (f" ({status.reason})" if status.reason else ""))
    return ExitCode.DEGRADED if status.dropped else ExitCode.OK


def _say(text: str) -> None:
    print(f"kvtop: {text}", file=sys.stderr, flush=True)
