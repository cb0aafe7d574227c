"""`kvtop flame`: a flame graph of an engine, its viewer, and the root-cause table."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from pathlib import Path

from kvtop.config import seconds
from kvtop.draw.text import safe
from kvtop.errors import ExitCode, NotFoundError, UsageError
from kvtop.flame import files
from kvtop.flame.capture import Capture, Plan, Recording, check, warnings_of

_BAR = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `kvtop flame`."""
    parser.add_argument(
        "pid", nargs="?", help="the process, and all below it (the engine of this machine)"
    )
    parser.add_argument(
        "--url", help="the engine of the server at this address, e.g. 127.0.0.1:8000"
    )
    parser.add_argument("--for", dest="duration", default="30s", metavar="TIME", help="(30s)")
    parser.add_argument("--rate", default="200", metavar="N", help="samples a second (200)")
    parser.add_argument(
        "--format", choices=tuple(files.FORMATS), help="(by the name of the file, else svg)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="the file; - is standard output")
    parser.add_argument(
        "--blocking", action="store_true", help="stop every thread for each sample: exact, harmful"
    )
    parser.add_argument(
        "--native", action="store_true", help="frames of C code too; stops every thread"
    )
    parser.add_argument(
        "--gil", action="store_true", help="only the thread that holds Python's lock"
    )
    parser.add_argument("--idle", action="store_true", help="threads that wait, too")
    parser.add_argument(
        "--view", metavar="FILE", help="look at a .folded, speedscope or session file"
    )
    parser.add_argument(
        "--against", metavar="FILE", help="with --view: an older capture to compare with"
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="the leak findings, and beside them what the code is doing",
    )
    parser.add_argument(
        "--session", metavar="FILE", help="with --explain: findings of a recorded session"
    )
    parser.add_argument(
        "--ascii", action="store_true", default=None, help="draw with ASCII characters only"
    )


def run(parsed: argparse.Namespace) -> int:
    """Capture a flame graph, look at one, or explain.

    Raises:
        UsageError: A wrong option.
        NotFoundError: No such process or file.
        DeniedError: The operating system does not let py-spy read the process.
        KvtopError: The capture failed.
    """
    if parsed.session and not parsed.explain:
        raise UsageError("--session needs --explain")
    if parsed.against and not parsed.view:
        raise UsageError("--against needs --view")
    only_files = parsed.session or (parsed.view and not parsed.explain)
    if parsed.url and (parsed.pid or only_files):
        raise UsageError("--url says what to capture", "give no process id and no file with it")
    if parsed.explain:
        from kvtop.commands.flame_explain import run as run_explain

        return run_explain(parsed)
    if parsed.view:
        from kvtop.commands.flame_view import run as run_view

        return run_view(parsed)
    plan = plan_of(parsed)
    form, path = _where(parsed, plan.pid)
    for warning in warnings_of(plan):
        _say(warning)
    capture = asyncio.run(record(plan))
    for warning in capture.warnings:
        _say(warning)
    if parsed.output == "-":
        hz = float(plan.rate_hz)
        sys.stdout.write(files.render(capture.folded, form, files.note_of(capture), hz))
        return ExitCode.OK
    if path is None:
        path = Path(files.default_name(plan.pid, capture.started_s, form))
    files.write_capture(capture, path, form)
    _say(f"wrote {path}: {files.note_of(capture)}")
    return ExitCode.OK


def plan_of(parsed: argparse.Namespace) -> Plan:
    """What the command line asks to capture.

    Raises:
        UsageError: A wrong option.
        NotFoundError: No such process.
    """
    rate = str(parsed.rate)
    if not rate.isdecimal():
        raise UsageError(f"--rate {rate!r} is not a whole number", "write for example --rate 100")
    plan = Plan(
        pid=pid_of(parsed.pid, parsed.url),
        seconds=seconds(parsed.duration, "--for"),
        rate_hz=int(rate[:9]),
        blocking=parsed.blocking,
        native=parsed.native,
        gil=parsed.gil,
        idle=parsed.idle,
    )
    check(plan)
    return plan


def pid_of(text: str | None, url: str | None = None) -> int:
    """The process named, or the only engine of this machine, or of the server at `url`.

    Raises:
        UsageError: Not a process id, not an address, or several engines to choose from.
        NotFoundError: No engine was found.
    """
    if text is not None:
        if not (text.isascii() and text.isdecimal() and 0 < int(text[:10]) < 1 << 31):
            raise UsageError(f"{text!r} is not a process id", "a whole number from 1 on")
        return int(text)
    from kvtop.config import Options
    from kvtop.stream.target import Discovery, Target

    found = Discovery(Options(url=url), Target()).look()
    pids = [engine.pid for server in found.servers for engine in server.engines]
    if not pids:
        where = f"at {url} and on this machine" if url else "on this machine"
        raise NotFoundError(f"no vLLM engine was found {where}", "name a process id")
    if len(pids) > 1:
        listed = ", ".join(str(pid) for pid in pids)
        raise UsageError(f"there are {len(pids)} engines: {listed}", "name one of them")
    return pids[0]


def _where(parsed: argparse.Namespace, pid: int) -> tuple[str, Path | None]:
    """Format and file; None for the default name, which needs the time of the capture."""
    if not parsed.output or parsed.output == "-":
        return parsed.format or "svg", None
    path = Path(parsed.output)
    if path.is_dir():
        form = parsed.format or "svg"
        return form, path / files.default_name(pid, time.time(), form)
    form = parsed.format or files.format_of(path) or "svg"
    if not path.parent.is_dir():
        # Known before half a minute is spent on a capture.
        raise NotFoundError(f"there is no folder {path.parent}")
    return form, path


async def record(plan: Plan) -> Capture:
    """Capture with a progress bar; Ctrl-C ends it early and keeps what was taken, twice cancels.

    Raises:
        KvtopError: It failed, or was cancelled.
    """
    recording = Recording(plan)
    loop = asyncio.get_running_loop()
    presses: list[int] = []

    def interrupt() -> None:
        presses.append(1)
        if len(presses) > 1:
            recording.cancel()
        else:
            recording.finish()

    handlers = {signal.SIGINT: interrupt, signal.SIGTERM: recording.cancel}
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    task = asyncio.ensure_future(recording.run())
    shown = sys.stderr.isatty()
    try:
        while not task.done():
            if shown:
                done = round(recording.progress * _BAR)
                bar = "#" * done + "." * (_BAR - done)
                text = f"\r{bar} {recording.progress:4.0%} of {plan.seconds:g} s; Ctrl-C ends it"
                print(text, end="", file=sys.stderr, flush=True)
            await asyncio.wait({task}, timeout=0.25)
        return task.result()
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        for number in handlers:
            loop.remove_signal_handler(number)


def _say(text: str) -> None:
    print(f"kvtop: {safe(text)}", file=sys.stderr, flush=True)
