"""Putting the probe into a server from the screen: as a process of its own.

The process outlives the screen: one that was ended while it stands inside an engine could
leave that engine stopped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from kvtop.draw.text import visible, wrap
from kvtop.draw.view import Dialog
from kvtop.model.snapshot import Snapshot, SourceState
from kvtop.stream.threads import Worker

_MOST_TEXT = 4000
_DIALOG_CELLS = 70


class Attaching:
    """Attaches one server after the other, on a thread of its own.

    Args:
        start: Runs a coroutine beside the screen.
        say: Shows a message.
        show: Shows a dialog.
        first: Attach to every engine without a probe, once, without a question.
    """

    def __init__(
        self,
        start: Callable[[Coroutine[Any, Any, None]], None],
        say: Callable[[str], None],
        show: Callable[[Dialog], object],
        *,
        first: bool = False,
    ) -> None:
        self._start = start
        self._say = say
        self._show = show
        self._first = first
        self._worker = Worker("kvtop attach")
        self._now: set[int] = set()
        self._tried: set[int] = set()

    def look(self, snapshot: Snapshot) -> None:
        """Attach to what has no probe, where that was asked for at the start."""
        if not self._first:
            return
        starting = {
            source.target_pid
            for source in snapshot.sources
            if source.kind == "engine" and source.state is SourceState.STARTING
        }
        for engine in snapshot.engines:
            pid = engine.pid
            if engine.probe is not None or not engine.alive or pid is None or pid in starting:
                continue
            if pid not in self._tried:
                self._tried.add(pid)
                self.put(pid)

    def put(self, pid: int) -> None:
        """Put the probe into the server of a process; says how it went when it is done."""
        if pid not in self._now:
            self._now.add(pid)
            self._say(f"attaching the probe to pid {pid}; this takes some seconds")
            self._start(self._put(pid))

    async def _put(self, pid: int) -> None:
        worked, text = await self._worker.call(lambda: attach(pid))
        self._now.discard(pid)
        lines = [visible(line) for line in text.split("\n")]
        if worked:
            self._say("; ".join(lines))
            return
        self._say(f"attaching to pid {pid} failed: {lines[-1]}")
        shown = tuple(((part, ""),) for line in lines for part in wrap(line, _DIALOG_CELLS))
        self._show(Dialog("message", f"Attaching to pid {pid} failed", shown))


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a kvtop that runs in another directory.

    It runs elsewhere, so that no module beside the user's files is picked up.
    """
    env = dict(environ)
    if env.get("PYTHONPATH"):
        parts = env["PYTHONPATH"].split(os.pathsep)
        env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in parts)
    return env


def attach(pid: int) -> tuple[bool, str]:
    """Run `kvtop attach PID`. Blocking, seconds.

    Args:
        pid: Any process of the server.

    Returns:
        Whether it worked, and what was said, one line a process.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvtop", "attach", str(pid)],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            env=child_environment(os.environ),
            start_new_session=True,
        )
    except OSError as error:
        return False, f"kvtop attach did not start: {error}"
    text = (done.stdout + done.stderr)[:_MOST_TEXT].decode("utf-8", "replace").strip()
    if not text:
        text = f"kvtop attach ended with code {done.returncode} and said nothing"
    return done.returncode == 0, text
