"""A run of py-spy that is waited for in a thread, with its exact CPU time.

asyncio's own child processes are collected without saying what they have cost. Output goes
into files in memory: nothing has to be read while the child runs, and it can never wait
for us.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass

OUTPUT = "{output}"
"""A word of a command line that stands for the file that a child is to write."""
MAX_BYTES = 16 * 1024 * 1024
"""Most output that is read."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child has ended."""

    code: int
    """Exit code; negative: the signal that killed it."""
    written: bytes
    """The file named `OUTPUT`; without one, what came on standard output."""
    said: str
    """What came on standard error; with a file `OUTPUT`, standard output too."""
    cpu_s: float
    """CPU time of the child, of all its threads."""
    timed_out: bool = False
    """True: it was killed because its time was over."""


class _Child:
    """One child process; can be signalled without ever hitting another process."""

    def __init__(self, words: Sequence[str], files: tuple[int, int]) -> None:
        written, said = files
        named = OUTPUT in words
        self._process = subprocess.Popen(
            [f"/proc/self/fd/{written}" if word == OUTPUT else word for word in words],
            stdin=subprocess.DEVNULL,
            stdout=said if named else written,
            stderr=said,
            pass_fds=(written,) if named else (),
            env={**os.environ, "RUST_BACKTRACE": "0"},
            # A Ctrl-C in the terminal is for kvtop alone.
            start_new_session=True,
        )
        self._lock = threading.Lock()
        self._collected = False
        self.code = 0
        self.cpu_s = 0.0

    def wait(self) -> None:
        """Until it has ended; collects it. Blocking."""
        pid = self._process.pid
        # Its number stays taken until it is collected, which is under the lock.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            _, status, usage = os.wait4(pid, 0)
            self._collected = True
        self.code = os.waitstatus_to_exitcode(status)
        self.cpu_s = usage.ru_utime + usage.ru_stime
        # `subprocess` need not look for it any more.
        self._process.returncode = self.code

    def kill(self) -> None:
        """Kill it, unless it has been collected."""
        with self._lock:
            if not self._collected:
                os.kill(self._process.pid, signal.SIGKILL)


async def run(words: Sequence[str], deadline_s: float) -> Ended:
    """Run a command to its end.

    The child is killed and collected when the deadline is over, and when this call is
    cancelled.

    Args:
        words: The command; a word `OUTPUT` becomes the name of a file to write.
        deadline_s: Seconds for the whole run.

    Raises:
        OSError: It cannot be started.
    """
    files = os.memfd_create("kvtop-out"), os.memfd_create("kvtop-err")
    try:
        return await _run(words, files, deadline_s)
    finally:
        for file in files:
            os.close(file)


async def _run(words: Sequence[str], files: tuple[int, int], deadline_s: float) -> Ended:
    child = _Child(words, files)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def wait() -> None:
        child.wait()
        # The loop may be gone by then.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=wait, name="kvtop py-spy", daemon=True).start()
    waiting = asyncio.ensure_future(ended.wait())
    try:
        done, _ = await asyncio.wait({waiting}, timeout=deadline_s)
    finally:
        if not ended.is_set():
            child.kill()
            # After SIGKILL this takes no time; the thread collects it in any case.
            await asyncio.wait({waiting}, timeout=1.0)
        waiting.cancel()
    said = _read(files[1]).decode("utf-8", "replace")
    return Ended(child.code, _read(files[0]), said, child.cpu_s, timed_out=not done)


def _read(file: int) -> bytes:
    return os.pread(file, MAX_BYTES, 0)
