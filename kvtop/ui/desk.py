"""What goes on beside the live screen: judging, recording, the black box.

Nothing here waits: the disk is somebody else's thread, and what went wrong is one plain
message.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvtop.draw.numbers import size
from kvtop.errors import KvtopError
from kvtop.model.capture import StackCapture
from kvtop.model.detail import Detail
from kvtop.model.snapshot import Finding, Snapshot
from kvtop.stream.threads import Worker

if TYPE_CHECKING:
    from kvtop.model.snapshot import Engine
    from kvtop.session.blackbox import BlackBox
    from kvtop.session.chosen import Chooser
    from kvtop.session.recorder import Recorder, RecorderStatus

Judge = Callable[[Snapshot], tuple[Finding, ...]]
"""Takes the snapshots in their order; gives the findings that hold at each."""

NOT_RECORDING = "nothing is recorded; R starts a recording"
"""Said when a marker is set and there is no recording."""
NO_BLACKBOX = "no black box runs; start kvtop with --blackbox 10m"
"""Said when the black box is asked to write and there is none."""


class Desk:
    """Takes every snapshot of the live stream once.

    Args:
        judge: Says what holds. None: nothing is judged.
        blackbox: Already started. None: there is none.
        folder: Where recordings go.
    """

    def __init__(
        self,
        judge: Judge | None = None,
        blackbox: BlackBox | None = None,
        folder: Path = Path(),
    ) -> None:
        self._judge = judge
        self._blackbox = blackbox
        self._folder = folder
        self._recorder: Recorder | None = None
        self._worker = Worker("kvtop recordings")
        self._busy = False
        self._messages: list[str] = []
        self._chooser: Chooser | None = None
        self._due: list[tuple[Engine, str]] = []
        self._asking = False
        self.findings: tuple[Finding, ...] = ()
        """What holds at the newest snapshot."""

    def take(self, snapshot: Snapshot) -> Snapshot:
        """Judge and record a snapshot; returns at once.

        Returns:
            The snapshot with the number of those that the recorder dropped so far.
        """
        recorder = self._recorder
        if recorder is not None:
            snapshot = replace(snapshot, dropped=recorder.status.dropped)
            recorder.offer(snapshot)
            if recorder.status.state != "recording":
                self._recorder = None
                self._messages.append(_ended(recorder.status))
        if self._judge is not None:
            try:
                self.findings = self._judge(snapshot)
            except Exception as error:
                # The screen is needed most when something unheard-of happens.
                self._judge, self.findings = None, ()
                self._messages.append(
                    f"judging has stopped, a fault of kvtop's own: {type(error).__name__}: {error}"
                )
        if self._blackbox is not None:
            self._blackbox.offer(snapshot, self.findings)
        self._choose(snapshot)
        return snapshot

    def _choose(self, snapshot: Snapshot) -> None:
        if not self.writes:
            self._chooser = None
            return
        if self._chooser is None:
            from kvtop.session.chosen import Chooser

            self._chooser = Chooser()
        self._due = self._chooser.wanted(snapshot, self.findings)

    def tables_due(self) -> list[tuple[Engine, str]]:
        """Engines and requests whose block tables the recording keeps now; most often none."""
        due, self._due = self._due, []
        return [] if self._asking else due

    async def keep_tables(
        self,
        due: list[tuple[Engine, str]],
        ask: Callable[[Engine, str], Awaitable[Detail]],
    ) -> None:
        """Ask for these tables, one after the other, and keep them for the replay.

        Args:
            due: From `tables_due`.
            ask: Asks the probe.
        """
        self._asking = True
        try:
            for engine, name in due:
                self.detail(engine.pid, await ask(engine, name))
        finally:
            self._asking = False

    @property
    def writes(self) -> bool:
        """Whether snapshots are kept somewhere, on screen or not."""
        return self._recorder is not None or self._blackbox is not None

    @property
    def recording(self) -> str:
        """For the header: `REC 1.2 MiB`. Empty: nothing is recorded."""
        if self._recorder is None:
            return ""
        return f"REC {size(self._recorder.status.size_bytes)}"

    def messages(self) -> list[str]:
        """What happened by itself since the last call, one plain line each."""
        found, self._messages = self._messages, []
        if self._blackbox is not None:
            found += self._blackbox.messages()
        return found

    async def toggle(self, now_s: float, interval_s: float) -> str:
        """Start a recording, or end the one that runs; says how it went.

        Args:
            now_s: Gives the file its name, Unix seconds.
            interval_s: How often a snapshot is meant to come.
        """
        if self._busy:
            return "the disk is busy with the recording"
        self._busy = True
        try:
            if self._recorder is not None:
                recorder, self._recorder = self._recorder, None
                return _ended(await self._worker.call(recorder.stop))
            # Imported at the first recording: the screen starts without a database.
            from kvtop.session.recorder import Recorder, default_name

            recorder = Recorder(self._folder / default_name(now_s), interval_s=interval_s)
            try:
                await self._worker.call(recorder.start)
            except (KvtopError, OSError) as error:
                what = error.line() if isinstance(error, KvtopError) else str(error)
                return f"cannot record: {what}"
            self._recorder = recorder
            return f"recording to {recorder.status.path}; R stops, m sets a marker"
        finally:
            self._busy = False

    def mark(self, time_s: float, note: str) -> str:
        """Set a marker in the recording; says how it went."""
        if self._recorder is None:
            return NOT_RECORDING
        if not self._recorder.marker(time_s, note):
            return "the marker is lost: the disk does not keep up"
        return f"marker set: {note}" if note else "marker set"

    def write_blackbox(self) -> str:
        """Write the black box out now; says where."""
        if self._blackbox is None:
            return NO_BLACKBOX
        return f"writing {self._blackbox.write('key B')}"

    def detail(self, engine_pid: int | None, detail: Detail) -> None:
        """Keep a block table, for the replay."""
        if self._recorder is not None:
            self._recorder.detail(engine_pid, detail)
        if self._blackbox is not None:
            self._blackbox.detail(engine_pid, detail)

    def capture(self, capture: StackCapture) -> None:
        """Keep captured stacks, for the replay."""
        if self._recorder is not None and not self._recorder.capture(capture):
            self._messages.append("the stacks are not recorded: the disk does not keep up")
        if self._blackbox is not None:
            self._blackbox.capture(capture)

    def close(self, seconds: float) -> list[str]:
        """End everything; waits so long at most.

        Returns:
            What was written, one plain line a file.
        """
        said = []
        if self._recorder is not None:
            said.append(_ended(self._recorder.stop(timeout_s=seconds)))
            self._recorder = None
        if self._blackbox is not None:
            self._blackbox.stop(seconds)
            said += self.messages()
        self._worker.close()
        return said


def _ended(status: RecorderStatus) -> str:
    text = f"{status.ticks} snapshots, {size(status.size_bytes)}"
    if status.dropped:
        text += f", {status.dropped} dropped because the disk did not keep up"
    if status.state == "failed":
        return f"recording failed: {status.reason}; what was recorded is safe in {status.path}"
    why = f" ({status.reason})" if status.reason else ""
    return f"recorded {status.path}: {text}{why}"
