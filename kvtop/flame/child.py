"""py-spy as a child process: what it says, how it is ended, and what its failures mean."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from kvtop.errors import BadDataError, DeniedError, KvtopError, NotFoundError, UnreachableError
from kvtop.sources.base import SourceError
from kvtop.sources.stacks_spy import (
    NO_PTRACE_REMEDY,
    GoneError,
    TransientError,
    dump,
    explain,
)

_KEPT = 16384
_SAMPLING = b"Sampling process"


class Talk:
    """What a child says; all of it is read, so that it never waits for us.

    Args:
        child: Its standard output is read, from now on.
    """

    def __init__(self, child: asyncio.subprocess.Process) -> None:
        self.sampling = asyncio.Event()
        """Set when it has begun to sample."""
        self._data = b""
        self._reading = asyncio.ensure_future(self._read(child.stdout))

    @property
    def text(self) -> str:
        """The end of what it has said."""
        return self._data.decode("utf-8", "replace")

    async def _read(self, stream: asyncio.StreamReader | None) -> None:
        while stream is not None and (chunk := await stream.read(65536)):
            self._data = (self._data + chunk)[-_KEPT:]
            if _SAMPLING in self._data:
                self.sampling.set()

    async def close(self) -> None:
        """Read the rest, for half a second at most."""
        try:
            await asyncio.wait({self._reading}, timeout=0.5)
        finally:
            self._reading.cancel()


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


async def end_child(child: asyncio.subprocess.Process, seconds: float) -> bool:
    """End a running child in order, so that it lets go of what it holds.

    Returns:
        True when it did not, and was killed.
    """
    ended = asyncio.ensure_future(child.wait())
    signal_child(child, signal.SIGINT)
    try:
        await asyncio.wait({ended}, timeout=seconds)
    finally:
        # Even if nobody waits any more.
        signal_child(child, signal.SIGKILL)
    if ended.done():
        return False
    await asyncio.wait({ended}, timeout=1.0)
    return True


async def failure_of(py_spy: str, text: str, pid: int, exists: bool) -> KvtopError:
    """What a failed run means.

    Args:
        py_spy: Path of py-spy.
        text: What it said.
        pid: The process it was asked for.
        exists: Whether that process exists.
    """
    error = explain(text, pid, exists=exists)
    if exists and "No python processes found" in text:
        # With subprocesses py-spy does not say why it could read none; about one it does.
        try:
            await dump(py_spy, pid, 3.0)
        except (SourceError, GoneError, TransientError) as reason:
            error = reason
    if isinstance(error, GoneError):
        return NotFoundError(str(error))
    if isinstance(error, SourceError):
        if error.remedy == NO_PTRACE_REMEDY:
            return DeniedError(error.reason, error.remedy)
        return BadDataError(error.reason, error.remedy)
    return UnreachableError(str(error))
