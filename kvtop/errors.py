"""The error tree and the exit codes: every way kvtop can fail, in one table.

A user sees one plain line: what went wrong, where, and what to do. Commands raise
`KvtopError` and `kvtop.cli.main` turns it into that line and the exit code.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the shell sees. Documented in the README; the numbers are a contract."""

    OK = 0
    """It worked."""
    DEGRADED = 1
    """It worked, and something that should be visible is not (`kvtop doctor`)."""
    USAGE = 2
    """The command line or the configuration is wrong."""
    NOT_FOUND = 3
    """No vLLM server, process or file of that description."""
    DENIED = 4
    """The operating system does not let this user do it."""
    UNREACHABLE = 5
    """It is there and does not answer in time."""
    BAD_DATA = 6
    """What it answers, or the file, is not what kvtop can read."""
    IO = 7
    """Reading or writing failed: disk full, pipe closed, no such directory."""
    INTERNAL = 70
    """A fault of kvtop's own."""
    INTERRUPTED = 130
    """Ctrl-C."""


class KvtopError(Exception):
    """A failure that the user can act on.

    Args:
        what: What went wrong and where, one plain sentence without a full stop.
        remedy: What to do about it; may be empty.
    """

    code = ExitCode.INTERNAL

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy

    def line(self) -> str:
        """The one line that is shown: what, then what to do."""
        return f"{self.what}; {self.remedy}" if self.remedy else self.what


class UsageError(KvtopError):
    """The command line or the configuration is wrong."""

    code = ExitCode.USAGE


class NotFoundError(KvtopError):
    """No such server, process or file."""

    code = ExitCode.NOT_FOUND


class DeniedError(KvtopError):
    """The operating system refused."""

    code = ExitCode.DENIED


class UnreachableError(KvtopError):
    """No answer in time."""

    code = ExitCode.UNREACHABLE


class BadDataError(KvtopError):
    """The answer or the file is not readable as what it should be."""

    code = ExitCode.BAD_DATA


class StorageError(KvtopError):
    """Reading or writing a file failed."""

    code = ExitCode.IO
