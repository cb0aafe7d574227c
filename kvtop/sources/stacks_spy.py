"""The two ways in which py-spy is asked, and what its failures mean."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from kvtop.sources.base import SourceError, one_line
from kvtop.sources.stacks_child import OUTPUT, Ended, run

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


async def dump(py_spy: str, pid: int, deadline_s: float) -> Ended:
    """`py-spy dump --json --nonblocking`; the process is never stopped for it.

    Killing it leaves the process as it was: without blocking py-spy only reads its memory
    and is never attached to it.

    Args:
        py_spy: Path of py-spy.
        pid: The process, as seen from here.
        deadline_s: Seconds for the whole run.

    Raises:
        SourceError: py-spy cannot do this here; asking again does not help.
        GoneError: The process is no more.
        TransientError: This run failed.
    """
    words = (py_spy, "dump", "--json", "--nonblocking", "--pid", str(pid))
    return await _run(words, pid, deadline_s)


async def record(py_spy: str, pid: int, rate_hz: int, seconds: int) -> Ended:
    """`py-spy record --format raw --nonblocking --threads`: only threads that run.

    Facts about py-spy 0.4.3: it takes `rate x seconds - 1` samples, at times that vary by
    chance, and then ends; when its process ends it writes what it has; threads that wait
    are read and left out.

    Args:
        py_spy: Path of py-spy.
        pid: The process, as seen from here.
        rate_hz: Samples a second.
        seconds: For how long.

    Raises:
        SourceError: py-spy cannot do this here; asking again does not help.
        GoneError: The process is no more.
        TransientError: This run failed.
    """
    words = (
        *(py_spy, "record", "--format", "raw", "--nonblocking", "--threads"),
        *("--rate", str(rate_hz), "--duration", str(seconds)),
        *("--output", OUTPUT, "--pid", str(pid)),
    )
    ended = await _run(words, pid, 3.0 * seconds + 10.0)
    if not _exists(pid):
        raise GoneError(f"process {pid} is gone")
    return ended


async def _run(words: Sequence[str], pid: int, deadline_s: float) -> Ended:
    try:
        ended = await run(words, deadline_s)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise SourceError(f"{words[0]} cannot be started: {reason}", "reinstall py-spy") from error
    if ended.timed_out:
        raise TransientError(f"py-spy did not finish within {deadline_s:g} s")
    if ended.code == 0:
        return ended
    raise explain(ended.said, pid, exists=_exists(pid))


def _exists(pid: int) -> bool:
    return os.path.isdir(f"/proc/{pid}")


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
