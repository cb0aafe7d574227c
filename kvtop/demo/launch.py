"""Starts the demo's engine process, and sees to it that it ends."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvtop.errors import ExitCode, KvtopError, UnreachableError, UsageError

START_DEADLINE_S = 30.0
"""Longest wait for the engine process to be ready."""
STOP_DEADLINE_S = 3.0
"""Longest wait for it to end by itself; then it is killed."""
_LINE_LIMIT = 65_536


@dataclass(frozen=True, slots=True)
class Running:
    """An engine process that can be read."""

    pid: int
    """Its process."""
    metrics_url: str
    """Its /metrics page."""
    socket: Path
    """Its probe's socket."""
    directory: Path
    """The private folder of the socket: `KVTOP_DIR` for a kvtop that shall see it."""

    @property
    def url(self) -> str:
        """The server without a path."""
        return self.metrics_url.removesuffix("/metrics")


@contextlib.contextmanager
def running(
    scenario: str = "healthy",
    *,
    seed: int = 0,
    blocks: int | None = None,
    speed: float = 1.0,
    directory: Path | None = None,
) -> Iterator[Running]:
    """A simulated engine in a process of its own, stopped on leaving.

    Args:
        scenario: Name of a scenario.
        seed: Which run.
        blocks: Size of the pool. None: the scenario's own.
        speed: Simulated seconds a real second.
        directory: Where the probe's socket goes. None: a new private folder.

    Raises:
        UsageError: A value that cannot be simulated.
        KvtopError: It did not start.
    """
    command = [sys.executable, "-m", "kvtop.demo.serve", "--scenario", scenario]
    command += ["--seed", str(seed), "--speed", repr(speed), "--parent", str(os.getpid())]
    if blocks is not None:
        command += ["--blocks", str(blocks)]
    if directory is not None:
        command += ["--directory", str(directory)]
    with tempfile.TemporaryFile() as errors:
        # Its own session: Ctrl-C in the terminal is for kvtop, which then stops it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        found: Running | None = None
        try:
            found = _wait(process, errors)
            yield found
        finally:
            _stop(process)
            if found is not None and directory is None:
                shutil.rmtree(found.directory, ignore_errors=True)


def _wait(process: subprocess.Popen[bytes], errors: IO[bytes]) -> Running:
    line = _first_line(process)
    try:
        data = json.loads(line)
        if "error" in data:
            raise _as_error(str(data["error"]), data.get("code"))
        return Running(
            int(data["pid"]),
            str(data["metrics_url"]),
            Path(data["socket"]),
            Path(data["directory"]),
        )
    except (ValueError, KeyError, TypeError):
        errors.seek(0)
        said = errors.read(_LINE_LIMIT).decode(errors="replace").strip().splitlines()
        why = f": {said[-1]}" if said else ""
        raise KvtopError(f"the simulated engine did not start{why}") from None


def _as_error(what: str, code: object) -> KvtopError:
    if code == ExitCode.USAGE:
        return UsageError(what)
    return KvtopError(what)


def _first_line(process: subprocess.Popen[bytes]) -> bytes:
    stream = process.stdout
    if stream is None:
        return b""
    line = b""
    end_s = time.monotonic() + START_DEADLINE_S
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while not line.endswith(b"\n") and len(line) < _LINE_LIMIT:
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not selector.select(left_s):
                raise UnreachableError(
                    f"the simulated engine was not ready after {START_DEADLINE_S:g} s",
                    "try again when the machine is less busy",
                )
            part = os.read(stream.fileno(), 4096)
            if not part:
                break
            line += part
    return line


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
