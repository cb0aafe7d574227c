"""The recorder: a thread that writes snapshots, and never makes their source wait."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from kvtop.errors import KvtopError
from kvtop.model.capture import StackCapture
from kvtop.model.detail import Detail
from kvtop.model.snapshot import Snapshot
from kvtop.session.anonymize import Anonymizer
from kvtop.session.writer import SessionWriter

QUEUE = 16
"""Snapshots that may wait for the disk; more are dropped and counted."""
CAPTURES = 4
"""Captured stacks that may wait."""
TRIM_EVERY = 15
"""Ticks between two clean-ups of a ring."""


def default_name(now_s: float) -> str:
    """`kvtop-20250131T120000Z.kvtop` for a moment in Unix seconds."""
    return f"kvtop-{datetime.fromtimestamp(now_s, timezone.utc):%Y%m%dT%H%M%SZ}.kvtop"


@dataclass(frozen=True, slots=True)
class RecorderStatus:
    """How a recording is doing."""

    path: Path
    """File being written."""
    state: str
    """`recording`, `stopped`, or `failed`."""
    reason: str = ""
    """One plain line: why it stopped or failed. Empty while it records."""
    ticks: int = 0
    """Snapshots written, all parts of a rotated recording together."""
    dropped: int = 0
    """Snapshots that the disk could not keep up with."""
    size_bytes: int = 0
    """Size of the file."""
    markers: int = 0
    """Markers set."""
    parts: int = 1
    """Files written so far, when it rotates."""


class Recorder:
    """Records snapshots into a session file, from `start` to `stop`.

    Every method returns at once, except `stop` and `dump`, which wait as long as they are told.

    Args:
        path: The new file.
        interval_s: How often a snapshot is meant to come.
        anonymizer: Applied before anything is written. None: stored as it is.
        max_bytes: Size at which the recording ends, or goes on in the next file.
            None: no limit.
        rotate: True: at `max_bytes` the file is renamed to `NAME.1.kvtop`, `NAME.2.kvtop`, ...
            and the recording goes on under its own name.
        keep: Rotated files kept; the oldest of this recording is deleted beyond that.
        keep_s: Make it a ring that holds the last so many seconds. None: keep all.
    """

    def __init__(
        self,
        path: Path,
        *,
        interval_s: float | None = None,
        anonymizer: Anonymizer | None = None,
        max_bytes: int | None = None,
        rotate: bool = False,
        keep: int = 4,
        keep_s: float | None = None,
    ) -> None:
        self._path = path
        self._interval_s = interval_s
        self._anonymizer = anonymizer
        self._max_bytes = max_bytes
        self._rotate = rotate
        self._keep = keep
        self._keep_s = keep_s
        self._parts: list[Path] = []
        self._earlier_ticks = 0
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUE)
        self._captures: deque[StackCapture] = deque()
        self._lock = threading.Lock()
        self._status = RecorderStatus(path, "stopped")
        self._writer: SessionWriter | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._reason = "stopped"

    def start(self) -> None:
        """Make the file and begin.

        Raises:
            UsageError: The file is already there.
            StorageError, DeniedError, NotFoundError: It cannot be made.
        """
        self._writer = self._open()
        self._set(state="recording", size_bytes=self._writer.size_bytes)
        self._thread = threading.Thread(target=self._run, name="kvtop-recorder", daemon=True)
        self._thread.start()

    def offer(self, snapshot: Snapshot) -> bool:
        """Hand over the next snapshot.

        Returns:
            False when it was dropped: the queue is full, or the recording is over.
        """
        taken = self._put(lambda: self._write(snapshot))
        if not taken and self._status.state == "recording":
            with self._lock:
                self._status = replace(self._status, dropped=self._status.dropped + 1)
        return taken

    def marker(self, time_s: float, note: str = "") -> bool:
        """Set a marker at the newest tick; False when it was dropped."""

        def task() -> None:
            if self._writer is not None:
                text = self._anonymizer.text(note) if self._anonymizer else note
                self._writer.marker(time_s, text)
                self._set(markers=self._status.markers + 1)

        return self._put(task)

    def detail(self, engine_pid: int | None, detail: Detail) -> bool:
        """Keep a block table that was looked at, for the replay; False when it was dropped."""
        if detail.error or detail.step is None:
            return False
        if self._anonymizer is not None:
            detail = self._anonymizer.detail(detail)

        def task() -> None:
            if self._writer is not None:
                self._writer.detail(engine_pid, detail)

        return self._put(task)

    def capture(self, capture: StackCapture) -> bool:
        """Keep captured stacks, for the replay; False when they were dropped.

        Half a minute of sampling is not lost to a queue that is full for a moment: it waits
        beside it.
        """
        if self._status.state != "recording" or len(self._captures) >= CAPTURES:
            return False
        self._captures.append(capture)
        self._put(self._write_captures)
        return True

    def _write_captures(self) -> None:
        while self._captures and self._writer is not None:
            capture = self._captures.popleft()
            # Replacing names in thousands of stacks takes its time: not the caller's.
            hide = self._anonymizer
            self._writer.capture(hide.capture(capture) if hide else capture)

    def dump(self, path: Path, reason: str, timeout_s: float = 5.0) -> str:
        """Write what is recorded so far out as a closed file of its own.

        Args:
            path: The new file.
            reason: Said in the file.
            timeout_s: Longest wait.

        Returns:
            Empty when it worked, else one plain line.
        """
        done = threading.Event()
        problem: list[str] = []

        def report(text: str) -> None:
            problem.append(text)
            done.set()

        self.request_dump(path, reason, report)
        return problem[0] if done.wait(timeout_s) else "the disk did not answer in time"

    def request_dump(self, path: Path, reason: str, report: Callable[[str], None]) -> None:
        """As `dump`, without waiting.

        Args:
            path: The new file.
            reason: Said in the file.
            report: Called in the recorder's thread (at once when the queue is full) with
                what `dump` returns.
        """

        def task() -> None:
            problem = ""
            try:
                if self._writer is None:
                    problem = "the recording is over"
                else:
                    self._writer.dump(path, reason)
            except KvtopError as error:
                problem = error.line()
            report(problem)

        if not self._put(task):
            state = self._status.state
            report("the disk does not keep up" if state == "recording" else "nothing is recorded")

    @property
    def status(self) -> RecorderStatus:
        """How it is doing now."""
        return self._status

    def stop(self, reason: str = "stopped", timeout_s: float = 2.0) -> RecorderStatus:
        """Write what waits, close the file, and end the thread.

        Args:
            reason: Said in the file.
            timeout_s: Longest wait for the disk; after it the thread is left behind, and
                what it committed is safe.
        """
        thread = self._thread
        if thread is None or not thread.is_alive():
            return self._status
        self._reason = reason
        self._stopping.set()
        self._put(None, wait_s=timeout_s)
        thread.join(timeout_s)
        if thread.is_alive():
            self._set(state="failed", reason="the disk did not answer in time")
        return self._status

    def _put(self, task: Callable[[], object] | None, wait_s: float = 0.0) -> bool:
        if self._status.state != "recording":
            return False
        try:
            if wait_s:
                self._tasks.put(task, timeout=wait_s)  # type: ignore[arg-type]
            else:
                self._tasks.put_nowait(task)  # type: ignore[arg-type]
        except queue.Full:
            return False
        return True

    def _set(self, **values: object) -> None:
        with self._lock:
            self._status = replace(self._status, **values)  # type: ignore[arg-type]

    def _open(self) -> SessionWriter:
        return SessionWriter(self._path, self._interval_s, anonymized=self._anonymizer is not None)

    def _run(self) -> None:
        try:
            while True:
                try:
                    task = self._tasks.get(timeout=0.5)
                except queue.Empty:
                    if self._stopping.is_set():
                        break
                    continue
                if task is None:
                    break
                task()
            self._finish("stopped", self._reason, "")
        except KvtopError as error:
            self._fail(error.line())
        except Exception as error:
            self._fail(f"a fault of kvtop's own: {type(error).__name__}: {error}")

    def _fail(self, reason: str) -> None:
        writer, self._writer = self._writer, None
        self._set(state="failed", reason=reason)
        if writer is not None:
            writer.abandon(reason)
            self._set(size_bytes=writer.size_bytes)

    def _finish(self, state: str, reason: str, shown: str) -> None:
        self._write_captures()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close(reason)
            self._set(state=state, reason=shown, size_bytes=writer.size_bytes)

    def _write(self, snapshot: Snapshot) -> None:
        writer = self._writer
        if writer is None:
            return
        if self._anonymizer is not None:
            snapshot = self._anonymizer.snapshot(snapshot)
        writer.write(snapshot)
        self._write_captures()
        if self._keep_s is not None and writer.ticks % TRIM_EVERY == 0:
            writer.trim(snapshot.time_s - self._keep_s)
        self._set(ticks=self._earlier_ticks + writer.ticks, size_bytes=writer.size_bytes)
        if self._max_bytes is not None and writer.size_bytes >= self._max_bytes:
            if self._rotate:
                self._next_part(writer)
            else:
                self._finish("stopped", "size limit", "the size limit is reached")

    def _next_part(self, writer: SessionWriter) -> None:
        self._earlier_ticks += writer.ticks
        self._writer = None
        writer.close("rotated")
        number = self._status.parts
        while (part := self._part(number)).exists():
            number += 1
        try:
            self._path.rename(part)
            self._parts.append(part)
            while len(self._parts) > self._keep:
                self._parts.pop(0).unlink(missing_ok=True)
        except OSError as error:
            self._fail(f"cannot rotate {self._path}: {(error.strerror or str(error)).lower()}")
            return
        self._writer = self._open()
        self._set(parts=number + 1)

    def _part(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.stem}.{number}{self._path.suffix}")
