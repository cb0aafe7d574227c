"""One run of `py-spy record` as a child process: progress, cancel, deadline, and no harm done.

Without blocking, py-spy only reads the memory of its targets and never stops them. With
blocking (and `--native`, which needs it) every thread of every target is stopped for each
sample. Whatever the mode and however the run ends, the state of the targets is looked at
before and after, and one that was left standing still is named.

Facts about py-spy 0.4.3: SIGINT ends a run early and writes what was taken; the last line
of its output is `Samples: 153 Errors: 0`; `--native` refuses `--nonblocking`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtop.errors import (
    BadDataError,
    KvtopError,
    NotFoundError,
    StorageError,
    UnreachableError,
    UsageError,
)
from kvtop.flame import target
from kvtop.flame.child import Talk, end_child, failure_of, release
from kvtop.flame.folded import Folded, parse, read_text
from kvtop.sources.base import one_line
from kvtop.sources.stacks_spy import find_py_spy

MAX_SECONDS = 3600.0
"""Longest capture."""
MAX_RATE = 1000
"""Most samples a second."""
START_S = 30.0
"""How long py-spy may take to look its targets over, before it begins to sample."""
_SLACK_S = 0.5
"""Left to py-spy to end by itself, so that it takes all its samples where it can keep up."""
END_S = 5.0
"""How long a run that was told to end may take, before it is killed."""

_SECRET = re.compile(r'(--[\w-]*(?:key|token|secret|password)[ =])[^\s";]+', re.IGNORECASE)
_COUNTS = re.compile(r"Samples: (\d+) Errors: (\d+)")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is captured, and how."""

    pid: int
    """The process at the top."""
    seconds: float = 30.0
    """How long."""
    rate_hz: int = 200
    """Samples a second."""
    blocking: bool = False
    """Stop every thread for each sample."""
    native: bool = False
    """Frames of C code too; needs blocking."""
    gil: bool = False
    """Only the thread that holds Python's lock."""
    idle: bool = False
    """Waiting threads too."""

    @property
    def stops(self) -> bool:
        """Whether the targets are stopped for each sample."""
        return self.blocking or self.native


@dataclass(frozen=True, slots=True)
class Capture:
    """What a run has brought."""

    plan: Plan
    """What was asked for."""
    folded: Folded
    """The stacks."""
    started_s: float
    """Unix time."""
    seconds: float
    """How long it ran, until it ended or was cancelled."""
    samples: int
    """Stacks taken, as py-spy counts them."""
    errors: int
    """Stacks that could not be read, because the process ran on meanwhile."""
    warnings: tuple[str, ...] = ()
    """Plain lines for the user."""


def check(plan: Plan) -> None:
    """Refuse what cannot be captured.

    Raises:
        UsageError: A number is out of bounds.
        NotFoundError: There is no such process.
    """
    if not 0.1 <= plan.seconds <= MAX_SECONDS:
        raise UsageError(
            f"a capture of {plan.seconds:g} s", f"from 0.1 to {MAX_SECONDS:g} seconds are possible"
        )
    if not 1 <= plan.rate_hz <= MAX_RATE:
        raise UsageError(f"{plan.rate_hz} samples a second", f"from 1 to {MAX_RATE} are possible")
    if target.state_of(plan.pid) is None:
        raise NotFoundError(f"no process {plan.pid}", "see `kvtop once` for what there is")


def warnings_of(plan: Plan) -> tuple[str, ...]:
    """What a plan does to its target, in plain words; empty for the harmless default."""
    pids = target.tree_of(plan.pid)
    threads = target.thread_count(pids)
    where = f"{threads} threads in {len(pids)} processes"
    out = []
    if plan.stops:
        why = "--native" if plan.native and not plan.blocking else "--blocking"
        out.append(
            f"{why} stops all {where} for each of {plan.rate_hz} samples a second:"
            " the server will be slower, with many threads several times slower"
        )
    if plan.gil:
        stop = "as said above" if plan.stops else "nothing is stopped for that"
        out.append(
            f"--gil counts only the one of {where} that holds Python's lock ({stop});"
            " work outside Python is not seen"
        )
    return tuple(out)


def command(py_spy: str, plan: Plan, output: Path) -> list[str]:
    """The command line of a run."""
    words = [py_spy, "record", "--pid", str(plan.pid), "--format", "raw", "--output", str(output)]
    words += ["--duration", str(math.ceil(plan.seconds)), "--rate", str(plan.rate_hz)]
    words += ["--subprocesses", "--threads"]
    if not plan.stops:
        words.append("--nonblocking")
    for wanted, word in ((plan.native, "--native"), (plan.gil, "--gil"), (plan.idle, "--idle")):
        if wanted:
            words.append(word)
    return words


class Recording:
    """A run of py-spy that can be cancelled.

    Args:
        plan: What to capture.
        locate: Finds py-spy.
    """

    def __init__(self, plan: Plan, locate: Callable[[], str | None] = find_py_spy) -> None:
        self.plan = plan
        self._locate = locate
        self._began: float | None = None
        self._end = asyncio.Event()
        self._throw_away = False

    @property
    def progress(self) -> float:
        """Share of the time that has passed, 0 to 1."""
        if self._began is None:
            return 0.0
        return min((time.monotonic() - self._began) / self.plan.seconds, 1.0)

    def finish(self) -> None:
        """End it now and keep what was taken."""
        self._end.set()

    def cancel(self) -> None:
        """End it now; `run` raises `CancelledCaptureError`."""
        self._throw_away = True
        self._end.set()

    async def run(self) -> Capture:
        """Capture, until the time is over or it is ended.

        When the task is cancelled the child is ended and collected before this returns.

        Raises:
            CancelledCaptureError: `cancel` was called.
            DeniedError: The operating system does not let py-spy read the process.
            NotFoundError: The process, or py-spy, is not there.
            UnreachableError: py-spy failed, or did not end in time.
            BadDataError: No stack was seen, or py-spy does not know this Python.
        """
        check(self.plan)
        py_spy = self._locate()
        if py_spy is None:
            raise NotFoundError("py-spy is not installed", "pip install py-spy beside kvtop")
        try:
            folder = Path(tempfile.mkdtemp(prefix="kvtop-flame-"))
        except OSError as error:
            raise StorageError(f"no temporary folder: {error.strerror or error}") from None
        try:
            return await self._run(py_spy, folder / "stacks")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _run(self, py_spy: str, output: Path) -> Capture:
        pid = self.plan.pid
        before = target.tree_of(pid)
        stood = target.stopped(before)
        started = target.start_of(pid)
        wall = time.time()
        try:
            child = await asyncio.create_subprocess_exec(
                *command(py_spy, self.plan, output),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, "RUST_BACKTRACE": "0"},
                # A Ctrl-C in the terminal is for kvtop; it then ends the child in order.
                start_new_session=True,
            )
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise NotFoundError(
                f"{py_spy} cannot be started: {reason}", "reinstall py-spy"
            ) from None
        talk = Talk(child)
        killed = False
        try:
            await self._wait(child, talk)
        finally:
            # Also on the way out of a cancelled task.
            if child.returncode is None:
                killed = await end_child(child, END_S)
            await talk.close()
            release(child)
            left = self._left_standing(pid, started, before, stood, killed)
        if stood:
            names = ", ".join(map(str, stood))
            left.append(f"process {names} was stopped (state T) before the capture began")
        seconds = time.monotonic() - self._began if self._began is not None else 0.0
        text = talk.text
        if self._throw_away:
            raise CancelledCaptureError("the capture was cancelled", "; ".join(left))
        if killed:
            raise _with(
                UnreachableError(
                    f"py-spy did not end within {END_S:g} s after its time and was killed",
                    "try a lower --rate",
                ),
                left,
            )
        if child.returncode != 0:
            failure = await failure_of(py_spy, text, pid, target.start_of(pid) == started)
            raise _with(failure, left)
        gone = target.start_of(pid) != started or target.state_of(pid) in ("Z", "X")
        return self._result(output, text, wall, seconds, left, gone=gone)

    async def _wait(self, child: asyncio.subprocess.Process, talk: Talk) -> None:
        """Until the child has ended, or its time is over, or it is to be ended.

        py-spy itself counts samples and not seconds: on a busy machine, where it falls
        behind, it would run for many times as long as it was asked to.
        """
        ended = asyncio.ensure_future(child.wait())
        wished = asyncio.ensure_future(self._end.wait())
        sampling = asyncio.ensure_future(talk.sampling.wait())
        try:
            first = {ended, wished, sampling}
            await asyncio.wait(first, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
            if sampling.done() and not (ended.done() or wished.done()):
                self._began = time.monotonic()
                await asyncio.wait(
                    {ended, wished},
                    timeout=self.plan.seconds + _SLACK_S,
                    return_when=asyncio.FIRST_COMPLETED,
                )
        finally:
            for task in (wished, sampling, ended):
                task.cancel()

    def _left_standing(
        self,
        pid: int,
        started: str | None,
        before: tuple[int, ...],
        stood: tuple[int, ...],
        killed: bool,
    ) -> list[str]:
        """Says which processes stand still now and did not before, and lets ours go on."""
        if target.start_of(pid) != started:
            return []
        now = target.tree_of(pid)
        still = [one for one in target.stopped({*before, *now}) if one not in stood]
        if still:
            # A look through the eyes of somebody else's tracer is over in a moment.
            time.sleep(0.05)
            still = [one for one in target.stopped(still) if one not in stood]
        if not still:
            return []
        names = ", ".join(str(one) for one in sorted(still))
        if self.plan.stops and killed:
            # Only this run can have stopped them: it was killed with them in its hands.
            for one in still:
                with contextlib.suppress(OSError):
                    os.kill(one, signal.SIGCONT)
            return [f"the run left process {names} stopped (state T); it was told to go on"]
        words = " ".join(str(one) for one in sorted(still))
        return [f"process {names} is stopped (state T) now; `kill -CONT {words}` lets it go on"]

    def _result(
        self,
        output: Path,
        text: str,
        wall: float,
        seconds: float,
        left: list[str],
        *,
        gone: bool,
    ) -> Capture:
        plan = self.plan
        counts = _COUNTS.search(text)
        samples, errors = (int(counts[1]), int(counts[2])) if counts else (0, 0)
        try:
            folded = parse(without_secrets(read_text(output)), title_of(plan, wall))
        except NotFoundError:
            raise _with(UnreachableError("py-spy ended without writing anything"), left) from None
        except BadDataError:
            if gone:
                what = f"process {plan.pid} ended before a stack of it was seen"
                raise _with(NotFoundError(what), left) from None
            hint = (
                "py-spy could not read one stack; a blocking run may"
                if errors
                else "it waited all the time; --idle shows where"
            )
            what = f"no stack of process {plan.pid} was seen in {seconds:.0f} s"
            raise _with(BadDataError(what, hint), left) from None
        warnings = list(left)
        if gone:
            warnings.append(f"process {plan.pid} ended meanwhile, {seconds:.0f} s after it began")
        if errors > max(samples, 1) * 0.2:
            warnings.append(f"{errors} of {samples + errors} stacks could not be read")
        wanted = plan.seconds * plan.rate_hz
        if "behind in sampling" in text:
            warnings.append(f"this machine is too busy for {plan.rate_hz} samples a second")
        if samples == 0 and wanted:
            samples = folded.total
        return Capture(plan, folded, wall, seconds, samples, errors, tuple(warnings))


class CancelledCaptureError(KvtopError):
    """The user ended a capture and wants nothing of it."""


def title_of(plan: Plan, time_s: float) -> str:
    """A heading: what was captured, where and when."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_s))
    name = without_secrets(target.command_of(plan.pid))
    who = counted(idle=plan.idle, gil=plan.gil)
    return one_line(f"{socket.gethostname()} pid {plan.pid} {when}, {who}: {name}", 160)


def counted(*, idle: bool, gil: bool) -> str:
    """Whose samples a capture holds, for headings: what is left out, nobody sees in the graph."""
    if gil:
        return "only the thread with Python's lock"
    return "busy and waiting threads" if idle else "busy threads only"


def shares_note(*, idle: bool, gil: bool) -> str:
    """What the shares of a graph are not; empty where waiting threads are in it."""
    if idle and not gil:
        return ""
    what = "busy samples"
    if gil:
        what = "samples with Python's lock"
    return f"; waiting is left out: shares are of {what}, not of time"


def without_secrets(text: str) -> str:
    """Stacks without the keys and passwords that stand on command lines."""
    return _SECRET.sub(r"\1***", text)


def _with(error: KvtopError, notes: list[str]) -> KvtopError:
    """The error with more to say at its end."""
    if notes:
        error.remedy = "; ".join([error.remedy, *notes] if error.remedy else notes)
    return error
