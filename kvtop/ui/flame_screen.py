"""Flame graphs of the live screen: captures in the background, and their viewer.

The app gives keys, clicks and a size, and gets lines; what takes long runs in tasks and
threads, so that the screen stays live.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from kvtop.draw.icicle import IcicleView, icicle
from kvtop.draw.view import Line
from kvtop.errors import KvtopError
from kvtop.flame import files
from kvtop.flame.auto import AutoCapture
from kvtop.flame.capture import CancelledCaptureError, Capture, Plan, Recording
from kvtop.flame.difference import diff
from kvtop.flame.folded import Folded
from kvtop.flame.record import failed, recorded
from kvtop.flame.tree import build, keep, threads
from kvtop.model.capture import StackCapture
from kvtop.model.snapshot import Finding
from kvtop.ui import flame_keys
from kvtop.ui.flame_keys import Shape, Viewer

SECONDS = 30.0
"""Length of a capture that a key starts."""
RATE_HZ = 200
"""Its samples a second."""
_TICK_S = 0.5
_BAR = 20


class Owner(Protocol):
    """What the app gives."""

    def flame_says(self, text: str) -> None:
        """Show a message in the footer."""

    def flame_changed(self) -> None:
        """Draw again."""

    def flame_taken(self, capture: StackCapture) -> None:
        """A capture is over, with or without stacks."""

    def flame_closed(self) -> None:
        """The viewer was closed, and there is nothing else to show."""

    def flame_failed(self, error: BaseException) -> None:
        """A fault of kvtop's own."""


@dataclass(frozen=True, slots=True)
class _Source:
    """What is being looked at."""

    new: Folded
    """The capture."""
    old: Folded | None
    """The one before. None: there is none."""


class Flames:
    """Captures and viewer of one screen.

    Args:
        owner: The app.
        ascii_only: Draw with ASCII characters only.
        folder: Where captures are written. None: the working directory, or, where that is
            not writable, the one for temporary files.
        plan: Length and rate of captures; its pid is replaced.
    """

    def __init__(
        self,
        owner: Owner,
        ascii_only: bool = False,
        folder: Path | None = None,
        plan: Plan | None = None,
    ) -> None:
        self._owner = owner
        self._ascii = ascii_only
        self._folder = folder
        self._plan = plan or Plan(0, SECONDS, RATE_HZ)
        self._recording: Recording | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._captures: list[Folded] = []
        self._source: _Source | None = None
        self._viewer: Viewer | None = None
        self._building = 0
        self._only = False
        self.auto: AutoCapture | None = None
        """When captures start by themselves. None: never."""

    def at_start(self, stacks: tuple[Folded, Folded | None] | None, rules: frozenset[str]) -> None:
        """What to do from the start on; called before there is an event loop.

        Args:
            stacks: Open the viewer on these, and end the app when it is closed.
            rules: Findings that start a capture.
        """
        if rules:
            self.auto = AutoCapture(rules)
        if stacks is not None:
            self._only = True
            self._source = _Source(*stacks)
            view = IcicleView(title=stacks[0].title, ascii=self._ascii)
            self._viewer = make_viewer(
                stacks[0], stacks[1], Shape(difference=stacks[1] is not None), view
            )

    # Captures.

    @property
    def capturing(self) -> bool:
        """Whether a capture runs now."""
        return self._recording is not None

    def toggle(self, pid: int | None) -> None:
        """Start a capture of a process and all below it, or cancel the one that runs."""
        if self._recording is not None:
            self._recording.cancel()
        elif pid is None:
            self._owner.flame_says("no engine process here to look into")
        else:
            self._begin(pid, "")

    def judged(self, findings: tuple[Finding, ...], mono_s: float) -> None:
        """Start a capture if one of the findings asks for it.

        Args:
            findings: What holds now.
            mono_s: Monotonic time of the snapshot.
        """
        if self.auto is None:
            return
        finding = self.auto.wanted(findings, mono_s)
        if finding is not None and finding.engine_pid is not None and self._recording is None:
            self._begin(finding.engine_pid, finding.rule)

    def _begin(self, pid: int, why: str) -> None:
        # Threads that wait are what a stall is about.
        plan = replace(self._plan, pid=pid, idle=why.startswith("health."))
        self._recording = Recording(plan)
        self._start(self._capture(self._recording, why))

    async def _capture(self, recording: Recording, why: str) -> None:
        running = asyncio.ensure_future(recording.run())
        began = time.time()
        try:
            while not running.done():
                self._owner.flame_says(_progress(recording, why, self._ascii))
                await asyncio.wait({running}, timeout=_TICK_S)
            capture = running.result()
            # First into the recording: the folder for pictures may not be writable.
            self._owner.flame_taken(await asyncio.to_thread(recorded, capture, why))
            self._captures = [*self._captures[-1:], capture.folded]
            path = await asyncio.to_thread(self._write, capture)
            text = f"flame graph written: {path}; F shows it"
            self._owner.flame_says("; ".join([text, *capture.warnings]))
        except KvtopError as error:
            if running.done() and running.exception() is error:
                self._owner.flame_taken(failed(recording.plan, began, error, why))
            cancelled = isinstance(error, CancelledCaptureError)
            self._owner.flame_says(("" if cancelled else "no flame graph: ") + error.line())
        finally:
            self._recording = None
            if not running.done():
                running.cancel()
                await asyncio.wait({running}, timeout=7.0)

    def _write(self, capture: Capture) -> Path:
        """The picture and the folded stacks of a capture; returns the picture's path."""
        folder = self._folder or _writable()
        paths = {}
        for form in ("folded", "svg"):
            name = files.default_name(capture.plan.pid, capture.started_s, form)
            paths[form] = folder / name
            files.write_capture(capture, paths[form], form)
        return paths["svg"]

    # The viewer.

    @property
    def is_open(self) -> bool:
        """Whether the viewer has the screen."""
        return self._viewer is not None

    def open(self) -> None:
        """Show the last capture: of this screen, else the newest in the folder."""
        if self._captures:
            old = self._captures[-2] if len(self._captures) > 1 else None
            self._open(_Source(self._captures[-1], old))
        else:
            self._start(self._open_newest())

    def show(self, new: Folded, old: Folded | None = None) -> None:
        """Open the viewer on stacks from elsewhere."""
        self._open(_Source(new, old))

    async def _open_newest(self) -> None:
        found = files.newest(self._folder or _writable())
        if not found:
            self._owner.flame_says("no flame graph yet; f captures one")
            return
        self._owner.flame_says(f"opening {found[-1].name}")
        try:
            new = await asyncio.to_thread(files.load, found[-1])
            old = await asyncio.to_thread(files.load, found[-2]) if len(found) > 1 else None
        except KvtopError as error:
            self._owner.flame_says(error.line())
            return
        self._owner.flame_says("")
        self._open(_Source(new, old))

    def _open(self, source: _Source) -> None:
        self._source = source
        view = IcicleView(title=source.new.title, ascii=self._ascii)
        self._start(self._build(source, Shape(), view))

    async def _build(self, source: _Source, shape: Shape, view: IcicleView) -> None:
        self._building += 1
        number = self._building
        viewer = await asyncio.to_thread(make_viewer, source.new, source.old, shape, view)
        # Only the newest wish counts; and the viewer may have been closed meanwhile.
        if number == self._building and self._source is source:
            self._viewer = viewer
            self._owner.flame_changed()

    def press(self, key: str, character: str | None, size: tuple[int, int]) -> None:
        """A key, while the viewer is open."""
        viewer, source = self._viewer, self._source
        if viewer is None or source is None:
            return
        names = threads(source.new) if key == "t" else []
        self._take(viewer, flame_keys.press(viewer, key, size, character, names))

    def click(self, at: tuple[int, int], size: tuple[int, int]) -> None:
        """A click, while the viewer is open."""
        if self._viewer is not None:
            self._viewer = flame_keys.click(self._viewer, at, size)

    def wheel(self, rows: int, size: tuple[int, int]) -> None:
        """The wheel, while the viewer is open."""
        if self._viewer is not None:
            self._viewer = flame_keys.wheel(self._viewer, 3 * rows, size)

    def _take(self, before: Viewer, after: Viewer | None) -> None:
        if after is None:
            if self._only:
                self._owner.flame_closed()
                return
            self._viewer = self._source = None
            return
        self._viewer = after
        if after.shape == before.shape or self._source is None:
            return
        if after.shape.difference and self._source.old is None:
            text = "there is no other capture to compare with"
            shape = replace(after.shape, difference=False)
            self._viewer = replace(after, shape=shape, view=replace(after.view, message=text))
            return
        self._viewer = replace(after, view=replace(after.view, message="reading"))
        self._start(self._build(self._source, after.shape, after.view))

    def lines(self, width: int, height: int) -> list[Line]:
        """The viewer: `height` lines of `width` cells."""
        viewer = self._viewer
        if viewer is None:
            return [()] * height
        return icicle(viewer.tree, viewer.view, width, height)

    # The end.

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._owner.flame_failed(error)

    async def close(self, seconds: float = 1.0) -> None:
        """End what runs; py-spy is told to end at once, and killed if it does not."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)


def make_viewer(new: Folded, old: Folded | None, shape: Shape, view: IcicleView) -> Viewer:
    """The viewer on stacks, filtered and turned as the shape says; takes as long as opening."""
    by_name = shape.difference
    kept = keep(new, shape.thread, shape.category, any_pid=by_name)
    change = None
    if shape.difference and old is not None:
        before = keep(old, shape.thread, shape.category, any_pid=True)
        found = diff(before, kept, inverted=shape.inverted)
        tree, change = found.tree, found.change
    else:
        tree = build(kept, inverted=shape.inverted)
    # Looks at every node once; later drawings then need not.
    tree.split()
    hits = tree.found(view.search)
    view = replace(
        view,
        zoom=0,
        cursor=0,
        top=0,
        hits=hits,
        hit_total=tree.hits(hits),
        thread=shape.thread,
        category=shape.category,
        change=change,
        message="",
    )
    return Viewer(tree, view, shape)


def _progress(recording: Recording, why: str, ascii_only: bool) -> str:
    done = round(recording.progress * _BAR)
    full, empty = ("#", ".") if ascii_only else ("█", "░")
    left = max(recording.plan.seconds * (1 - recording.progress), 0.0)
    what = f"flame graph for {why}" if why else "flame graph"
    end = "writing" if recording.progress >= 1 else f"{left:.0f} s left"
    return f"{what} {full * done}{empty * (_BAR - done)} {end}; f cancels"


def _writable() -> Path:
    here = Path.cwd() if _has_cwd() else Path(tempfile.gettempdir())
    return here if os.access(here, os.W_OK) else Path(tempfile.gettempdir())


def _has_cwd() -> bool:
    with contextlib.suppress(OSError):
        return bool(os.getcwd())
    return False
