"""One run of py-spy as a child process with a deadline, and what its failures mean."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import sys
from pathlib import Path

from kvtop.sources.base import SourceError, one_line

NO_PTRACE_REMEDY = (
    "run kvtop as root, give its container the capability SYS_PTRACE, "
    "or set kernel.yama.ptrace_scope to 0"
)
"""What lets py-spy read another process."""


class TransientError(Exception):
    """This dump failed, the next may well work: the process ran on while it was read."""


class GoneError(Exception):
    """The process is no more."""


def find_py_spy() -> str | None:
    """Path of py-spy: beside this Python first, then on PATH. None: not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    if os.access(beside, os.X_OK):
        return str(beside)
    return shutil.which("py-spy")


def children_cpu_s() -> float:
    """CPU time of all ended and collected child processes of this one so far, seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


async def dump(py_spy: str, pid: int, deadline_s: float) -> bytes:
    """Output of `py-spy dump --json --nonblocking`; the process is never stopped for it.

    The child is killed and waited for when the deadline is over, and when this call is
    cancelled. Killing it leaves the process as it was: without blocking py-spy only
    reads its memory and is never attached to it.

    Args:
        py_spy: Path of py-spy.
        pid: The process, as seen from here.
        deadline_s: Seconds for the whole run.

    Raises:
        SourceError: py-spy cannot do this here; asking again does not help.
        GoneError: The process is no more.
        TransientError: This run failed.
    """
    try:
        child = await asyncio.create_subprocess_exec(
            *(py_spy, "dump", "--json", "--nonblocking", "--pid", str(pid)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "RUST_BACKTRACE": "0"},
        )
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SourceError(f"{py_spy} cannot be started: {reason}", "reinstall py-spy") from error
    talk = asyncio.ensure_future(child.communicate())
    try:
        done, _ = await asyncio.wait({talk}, timeout=deadline_s)
        if not done:
            raise TransientError(f"py-spy did not finish within {deadline_s:g} s")
        out, err = talk.result()
    finally:
        if not talk.done():
            talk.cancel()
        await _reap(child)
    if child.returncode == 0:
        return out
    exists = os.path.isdir(f"/proc/{pid}")  # noqa: ASYNC240 - no disk behind /proc
    raise explain(err.decode("utf-8", "replace"), pid, exists=exists)


async def _reap(child: asyncio.subprocess.Process) -> None:
    """Ends the child and collects it, also while this task is being cancelled."""
    if child.returncode is None:
        signal_child(child, signal.SIGKILL)
        # After SIGKILL this takes no time; the loop's watcher collects it in any case.
        await asyncio.wait({asyncio.ensure_future(child.wait())}, timeout=1.0)
    release(child)


def signal_child(child: asyncio.subprocess.Process, number: int) -> None:
    """Signal a child that has not been collected yet.

    Not by asyncio's own methods: those collect a child that has just ended behind the back
    of asyncio, which then reports it on stderr and loses its exit status.
    """
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, number)


def release(child: asyncio.subprocess.Process) -> None:
    """Close what asyncio holds for a child, as soon as the child has been collected.

    Before that, closing would let `subprocess` collect it behind asyncio's back, which
    asyncio reports on stderr.
    """
    transport = getattr(child, "_transport", None)
    if transport is None:
        return
    if child.returncode is not None:
        transport.close()
        return
    waiting = asyncio.ensure_future(child.wait())
    waiting.add_done_callback(lambda _: transport.close())


def explain(err: str, pid: int, *, exists: bool) -> Exception:
    """What a failed run of py-spy means.

    Args:
        err: Its standard error.
        pid: The process it was asked for.
        exists: Whether that process exists.
    """
    if not exists or "os error 3)" in err or "No such process" in err:
        return GoneError(f"process {pid} is gone")
    if (
        "Permission Denied: Try running" in err
        or "os error 1)" in err
        or "os error 13)" in err
        or "ermission denied" in err
    ):
        return SourceError(f"py-spy may not read process {pid}", NO_PTRACE_REMEDY)
    if "python version" in err or "python interpreter" in err or "libpython" in err:
        return SourceError(
            f"py-spy does not know the Python of process {pid}", "a newer py-spy may know it"
        )
    first = next((line for line in err.splitlines() if line.strip()), "it gave no reason")
    return TransientError(f"py-spy failed on process {pid}: {one_line(first, 120)}")
