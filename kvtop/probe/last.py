"""Leaves a last snapshot on disk when the engine core dies of an exception.

vLLM catches that exception itself, logs it and tells the front end with
`EngineCoreProc._send_engine_dead` (vllm/v1/engine/core.py, `run_engine_core`, 0.32), so
`sys.excepthook` sees nothing of it; `shutdown`, which is called while the exception is on its
way out, is the second chance (a Ray actor's `run` has no other). Both are watched, and an end
without an exception writes nothing. SIGKILL leaves nothing, of course.

The file holds what `/v1/snapshot` answers, and `last`: the type of the exception and the
frames it came through. Its message may quote a prompt and is left to vLLM's log.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvtop.probe import rundir
from kvtop.probe.answer import fewer_rows, rows_json

if TYPE_CHECKING:
    from kvtop.probe.cut import Raw
    from kvtop.probe.engine import EngineRole

FILE_NAME = re.compile(r"last-([0-9]{1,10})-[0-9]{8}T[0-9]{6}Z\.json")
"""Process id and UTC time in the name."""
WAIT_S = 2.0
"""Longest that the dying engine is held up; it takes milliseconds."""
LOCK_S = 0.5
"""Of these, for a cut that the probe's own thread is in."""
KEPT = 8
"""Files in the directory; older ones are removed."""
HALF_S = 60.0
"""A half-written file is left alone so long: engines of one server die together."""
MAX_ROWS = 5_000
"""Requests in a file; those that hold blocks come first."""
MAX_BYTES = 8 * 2**20
"""Largest file; the block columns are left out before it is given up."""
FRAMES = 12
"""Innermost frames of the exception."""


class Last:
    """The last snapshot of one engine.

    Args:
        role: Takes cuts, and makes the answer of one.
        directory: The probe's own directory, where the file goes.
        wake: Wakes the probe's thread.
    """

    def __init__(self, role: EngineRole, directory: str, wake: Callable[[], None]) -> None:
        self._role = role
        self._directory = directory
        self._wake = wake
        self._begun = False
        self._raw: Raw | None = None
        self._asked = threading.Event()
        self._done = threading.Event()
        self._what: dict[str, Any] = {}
        self.path = ""
        """The file, once it is written."""

    def dying(self) -> None:
        """Called on the engine's thread as a death call begins; waits `WAIT_S` at most."""
        error = sys.exc_info()[1]
        # SystemExit is how a busy loop ends in order, and is no Exception.
        if self._begun or not isinstance(error, Exception):
            return
        self._begun = True
        end = time.monotonic() + WAIT_S
        self._what = {
            "exception": _type_name(error),
            "frames": _frames(error.__traceback__),
            "time_s": time.time(),
        }
        self._raw = self._cut(end)
        # The ledger belongs to the probe's thread.
        self._asked.set()
        self._wake()
        self._done.wait(max(0.0, end - time.monotonic()))

    def _cut(self, end: float) -> Raw | None:
        capture = self._role.capture
        if not capture.lock.acquire(timeout=LOCK_S):
            return None
        try:
            while time.monotonic() < end:
                raw = capture.slice(on_engine=True)
                if raw is not None:
                    return raw
                if self._role.watch.depth:
                    return None
        finally:
            capture.lock.release()
        return None

    def work(self) -> None:
        """Called on the probe's thread: writes the file once the engine is dying."""
        if not self._asked.is_set() or self._done.is_set():
            return
        try:
            body, left_out = _final(self._role, self._raw)
            last = {**self._what, "requests_left_out": left_out}
            self.path = self._write(
                body[:-1] + b',"last":' + json.dumps(last).encode("ascii") + b"}"
            )
        finally:
            self._done.set()

    def _write(self, body: bytes) -> str:
        if len(body) > MAX_BYTES:
            return ""
        rundir.prepare(self._directory)
        name = f"last-{os.getpid()}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.json"
        path = os.path.join(self._directory, name)
        part = f"{path}.part"
        rundir.remove(part)
        fd = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(body)
            os.replace(part, path)
        except OSError:
            rundir.remove(part)
            raise
        prune(self._directory, name)
        return path


def _final(role: EngineRole, raw: Raw | None) -> tuple[bytes, int]:
    """A last body of `/v1/snapshot`, bounded, and how many requests are not in it.

    Args:
        role: The engine's.
        raw: Taken as the engine died. None: the last cut that a client saw is used.
    """
    if role._ready is not None:
        role._take(role._ready)
    if raw is not None:
        role._point = "exception"
        role._take(raw)
    rows = fewer_rows(role._row_list, MAX_ROWS)
    left_out, role._row_list = len(role._row_list) - len(rows), rows
    role._rows_json = rows_json(rows, role._pause)
    body = role.snapshot(columns=True)
    return body if len(body) < MAX_BYTES else role.snapshot(columns=False), left_out


def prune(directory: str, written: str = "") -> None:
    """Removes all but the newest `KEPT` files, and halves that a killed process has left.

    Args:
        directory: The probe's own.
        written: The name of a file that is kept whatever the clock has said to the others.
    """
    found = []
    for name in os.listdir(directory):
        if name.endswith(".part") and FILE_NAME.fullmatch(name[:-5]):
            # Whose process it is says nothing: another engine may be writing it now.
            if _is_old(os.path.join(directory, name)):
                rundir.remove(os.path.join(directory, name))
        elif FILE_NAME.fullmatch(name):
            # The time stands behind the process id.
            found.append((name == written, name.split("-")[2], name))
    for *_, name in sorted(found)[:-KEPT]:
        rundir.remove(os.path.join(directory, name))


def _is_old(path: str) -> bool:
    try:
        return abs(time.time() - os.lstat(path).st_mtime) > HALF_S
    except OSError:
        return False  # It has just been finished.


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")[:200]


def _frames(traceback: TracebackType | None) -> list[str]:
    """`function (file:line)`, the innermost last; no source, no values."""
    out = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        file = "/".join(code.co_filename.split("/")[-4:])
        out.append(f"{code.co_name} ({file}:{traceback.tb_lineno})"[:300])
        # A recursion that went too deep has a thousand of them.
        out = out[-FRAMES:]
        traceback = traceback.tb_next
    return out
