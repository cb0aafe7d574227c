"""The live screen: snapshots and keys in, lines out. All drawing is in `draw`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from textual import events
from textual.app import App, ComposeResult
from textual.driver import Driver
from textual.screen import Screen

from kvtop.draw.ansi import Colours
from kvtop.draw.pick import engine_of
from kvtop.draw.screen import screen as draw_screen
from kvtop.draw.stacks import processes_of
from kvtop.draw.text import visible
from kvtop.draw.view import Dialog, Line, View
from kvtop.errors import ExitCode
from kvtop.model.capture import StackCapture
from kvtop.model.history import History
from kvtop.model.snapshot import Engine, Finding, Snapshot
from kvtop.ui import effects
from kvtop.ui.acting import Acting
from kvtop.ui.attaching import Attaching
from kvtop.ui.canvas import Canvas
from kvtop.ui.controller import press
from kvtop.ui.desk import Desk
from kvtop.ui.driver import TerminalDriver
from kvtop.ui.feed import Feed, just_begun, numbers_only
from kvtop.ui.flame_screen import Flames
from kvtop.ui.keys import footer_keys, name_of
from kvtop.ui.mouse import click, wheel
from kvtop.ui.moves import Here, rects, settle
from kvtop.ui.session_keys import NO_STACKS

if TYPE_CHECKING:
    # Only a replay has one: the live screen need not wait for its modules.
    from kvtop.ui.deck import Deck

_MOST_MISSED = 3600
"""Snapshots kept for the charts during a pause; older ones are dropped."""
_MOST_NOTE = 300
_BUSY_PAUSE_S = 0.05
"""Pause before a terminal that has not taken the last frame is looked at again."""


class _Main(Screen[None], inherit_bindings=False):
    """Textual's screen, without keys of its own."""

    ALLOW_SELECT = False


class KvtopApp(App[int], inherit_bindings=False):
    """The live screen.

    Args:
        feed: Where snapshots come from.
        view: What is chosen at the start.
        first: A snapshot to start with. None: the first one of the feed is awaited.
        colours: What the terminal can show.
        driver_class: The terminal. None: Textual's own (tests).
        there: Lines that the terminal shows already, painted before Textual was there.
        desk: Judges and records what comes. None: nothing does.
        deck: The player, when `feed` is a replay. None: this is live.
        attach_first: Put the probe into every engine that has none, once, without a question.
    """

    ENABLE_COMMAND_PALETTE = False
    ENABLE_SELECT_AUTO_SCROLL = False
    ALLOW_SELECT = False
    CLOSE_TIMEOUT = 1.0

    def __init__(
        self,
        feed: Feed,
        view: View,
        first: Snapshot | None = None,
        colours: Colours = Colours.FULL,
        driver_class: type[Driver] | None = None,
        there: Sequence[Line] = (),
        *,
        desk: Desk | None = None,
        deck: Deck | None = None,
        attach_first: bool = False,
    ) -> None:
        super().__init__(driver_class=driver_class, ansi_color=True)
        self.desk = desk or Desk()
        """What goes on beside the screen."""
        self.flames = Flames(self, view.ascii)
        """Flame graphs and their viewer."""
        self._deck = deck
        self._attaching = Attaching(self._start, self._say, self._show_dialog, first=attach_first)
        self._acting = Acting(
            self._start,
            self._say,
            self._show_dialog,
            self._tell_action,
            lambda: bool(self.desk.recording),
        )
        self._feed = feed
        self._history = History() if view.history is None else view.history
        self.view = replace(view, history=self._history)
        """What the user chose."""
        self._sampling: tuple[bool, tuple[int, ...]] = (view.stacks_on, ())
        self.notes: list[str] = []
        """What to say in the shell after the screen, one plain line each."""
        self.fault: BaseException | None = None
        """What ended the app, when it was not the user."""
        self._newest = first
        self._shown = first
        self._missed: deque[Snapshot] = deque(maxlen=_MOST_MISSED)
        self.canvas = Canvas(colours, self._draw, there)
        """The widget that shows everything."""
        self._wake = asyncio.Event()
        self._detail_task: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._findings: tuple[Finding, ...] = ()
        if first is not None and deck is None:
            self._history.append(first)

    # Textual's side.

    def get_default_screen(self) -> Screen[None]:
        """The only screen there is."""
        return _Main(id="_default")

    def compose(self) -> ComposeResult:
        """One widget that fills the terminal."""
        self.canvas.styles.width = "100%"
        self.canvas.styles.height = "100%"
        yield self.canvas

    def on_mount(self) -> None:
        """Draw, and begin to follow the feed."""
        self.canvas.focus()
        self.app_resume_signal.subscribe(self, self._on_resumed)
        self._draw()
        # What the start made lives to the end: the collector need not look at it again.
        gc.freeze()
        self._start(self._follow())
        self._start(self._draw_when_new())
        if self._deck is not None:
            self._start(self._deck.work(self._draw))

    def on_key(self, event: events.Key) -> None:
        """Do what the key says."""
        event.stop()
        event.prevent_default()
        key = name_of(event.key, event.character)
        size = self._cells()
        if self.flames.is_open and key not in ("ctrl+c", "f10", "ctrl+l", "ctrl+z"):
            self.flames.press(key, event.character, size)
            self._draw()
            return
        self._apply(press(self.view, key, self._shown, size, event.character))

    def on_mouse_down(self, event: events.MouseDown) -> None:
        """Focus and select."""
        at = (event.screen_x, event.screen_y)
        if self.flames.is_open:
            self.flames.click(at, self._cells())
            self._draw()
            return
        self._apply(click(self.view, at, self._shown, self._cells()))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scroll the panel under the mouse."""
        self._wheel(event, 1)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Scroll the panel under the mouse."""
        self._wheel(event, -1)

    def on_unmount(self) -> None:
        """Nothing of ours goes on after the screen."""
        for task in (*self._tasks, self._detail_task):
            if task is not None:
                task.cancel()
        if self._deck is not None:
            self._deck.close()

    def _wheel(self, event: events.MouseEvent, rows: int) -> None:
        at = (event.screen_x, event.screen_y)
        if self.flames.is_open:
            self.flames.wheel(rows, self._cells())
            self._draw()
            return
        self._apply(wheel(self.view, at, rows, self._shown, self._cells()))

    def _cells(self) -> tuple[int, int]:
        size = self.canvas.size or self.size
        return size.width, size.height

    def _on_resumed(self, _nothing: object) -> None:
        """The shell had the terminal in between."""
        self.canvas.forget()
        self._draw()

    def _display(self, screen: Screen[Any], renderable: Any) -> None:
        # A real terminal is written to by the canvas alone.
        if self._terminal is None:
            super()._display(screen, renderable)

    def _handle_exception(self, error: Exception) -> None:
        # Textual would print its own traceback over the shell.
        self.fail(error)

    def panic(self, *_renderables: Any) -> None:
        """Textual's input thread has ended: the terminal is gone."""
        self.fail(OSError("the terminal is gone"))

    def fail(self, error: BaseException) -> None:
        """End the app because of an error; the first one counts."""
        if self.fault is None:
            self.fault = error
        self._return_code = int(ExitCode.INTERNAL)
        self._close_messages_no_wait()

    # The feed.

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def _follow(self) -> None:
        """Take every snapshot into the history, and keep only the newest to draw."""
        async for snapshot in self._feed.snapshots():
            if self._deck is not None:
                self._newest = snapshot
                self._deck.moved()
            elif self._shown is not None and just_begun(snapshot):
                # The first frame knows more than a stream that has not looked yet.
                continue
            else:
                self._take(snapshot)
                self.flames.judged(self._findings, snapshot.mono_s)
                if self.view.paused:
                    # The charts are frozen with the rest of the screen.
                    self._missed.append(numbers_only(snapshot))
                else:
                    self._history.append(snapshot)
                self._attaching.look(snapshot)
                self._acting.look(snapshot)
            self._wake.set()

    def _take(self, snapshot: Snapshot) -> None:
        """Judge and record a live snapshot, shown or not."""
        self._newest = self.desk.take(snapshot)
        self._findings = self.desk.findings
        if wanted := self.desk.tables_due():
            self._start(self.desk.keep_tables(wanted, self._feed.request_detail))

    async def _draw_when_new(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._terminal_ready()
            for message in self.desk.messages():
                self._say(message)
            if self.view.paused:
                continue
            self._show_newest()
            self._draw()
            self._refresh_detail()

    def _show_newest(self) -> None:
        before, self._shown = self._shown, self._newest
        self.view = settle(self.view, before, Here(self._shown, self._cells()))
        self.view = replace(self.view, findings=self._findings)

    def _go_on(self) -> None:
        """After a pause: what was missed goes into the charts, the newest on the screen."""
        for snapshot in self._missed:
            self._history.append(snapshot)
        self._missed.clear()
        self._show_newest()

    async def _terminal_ready(self) -> None:
        """Wait while the terminal is behind: older snapshots are dropped meanwhile."""
        terminal = self._terminal
        while terminal is not None and terminal.backlog:  # noqa: ASYNC110 - a thread's queue
            await asyncio.sleep(_BUSY_PAUSE_S)

    # Drawing.

    @property
    def _terminal(self) -> TerminalDriver | None:
        driver = self._driver
        return driver if isinstance(driver, TerminalDriver) else None

    def _draw(self) -> None:
        width, height = self._cells()
        self._sample_what_is_seen()
        if self._shown is not None:
            self.view = replace(self.view, now_s=self._shown.time_s, recording=self.desk.recording)
        if self._deck is not None:
            self.view = replace(
                self.view,
                player=self._deck.player(),
                history=self._deck.history,
                findings=self._deck.findings,
            )
        if self.flames.is_open:
            self.canvas.show(self.flames.lines(width, height), self._terminal)
            return
        lines = draw_screen(self._shown, self.view, width, height, footer_keys(self.view))
        self.canvas.show(lines, self._terminal)

    def _sample_what_is_seen(self) -> None:
        """Frames are sampled only while they are on screen, or written down."""
        there = "stacks" in rects(self.view, Here(self._shown, self._cells()))
        seen = self.desk.writes or (there and not self.flames.is_open)
        wanted = self.view.stacks_on and seen
        pids: tuple[int, ...] = ()
        if wanted and not self.desk.writes and self._shown is not None:
            pids = tuple(processes_of(engine_of(self._shown, self.view), self.view.stacks_role))
        if (wanted, pids) != self._sampling:
            self._sampling = wanted, pids
            self._feed.set_visible(wanted, pids)

    # Keys.

    def _apply(self, result: effects.Result) -> None:
        was_paused = self.view.paused
        self.view, effect = result
        if was_paused and not self.view.paused:
            self._go_on()
        self._do(effect)
        self._draw()

    def _do(self, effect: effects.Effect | None) -> None:
        match effect:
            case effects.Quit():
                self.exit(0)
            case effects.Suspend():
                self.call_later(self.action_suspend_process)
            case effects.Redraw():
                self.canvas.forget()
            case effects.SetInterval(seconds):
                self._feed.set_interval(seconds)
            case effects.SetStacks():
                # The next drawing looks at what is on screen then.
                pass
            case effects.FetchDetail(engine, request_id):
                self._fetch(engine, request_id)
            case effects.Record():
                now = self._newest.time_s if self._newest is not None else 0.0
                self._start(self._tell(self.desk.toggle(now, self.view.interval_s)))
            case effects.WriteBlackBox():
                self._message(self.desk.write_blackbox())
            case effects.Flame("capture"):
                self.flames.toggle(self._engine_pid())
            case effects.Flame():
                if self._deck is None:
                    self.flames.open()
                elif (stacks := self._deck.stacks()) is None:
                    self._message(NO_STACKS)
                else:
                    self.flames.show(*stacks)
            case effects.Play():
                self._message(self._deck.control(effect) if self._deck else "")
            case effects.Answer("marker", note):
                now = self._newest.time_s if self._newest is not None else 0.0
                self._message(self.desk.mark(now, note))
            case effects.Answer("seek", text):
                self._message(self._deck.seek(text) if self._deck else "")
            case effects.Act():
                self._acting.ask(effect)
            case effects.Answer(action, _) if action.startswith("act "):
                self._acting.do(action.removeprefix("act "))
            case effects.Answer(action, _) if action.startswith("attach "):
                self._attaching.put(int(action.removeprefix("attach ")))
            case _:
                pass

    def _message(self, text: str) -> None:
        self.view = replace(self.view, message=text)

    def _say(self, text: str) -> None:
        """Show a message that comes by itself."""
        self._message(text)
        self._draw()

    def _tell_action(self, text: str) -> None:
        """What was done to an engine, in the recording and at the end in the shell."""
        time_s = self._newest.time_s if self._newest is not None else 0.0
        if self.desk.recording:
            self.desk.mark(time_s, text)
        shown = visible(text[:_MOST_NOTE])
        self.notes.append(f"{time.strftime('%H:%M:%S', time.localtime(time_s))} {shown}")

    async def _tell(self, work: Awaitable[str]) -> None:
        """Show what something says that takes its time."""
        self._say(await work)

    def _show_dialog(self, dialog: Dialog) -> bool:
        """Show a dialog that comes by itself; False: not while the user types or reads another."""
        if self.view.dialog is not None or self.view.search_open:
            return False
        self.view = replace(self.view, dialog=dialog, scroll={**self.view.scroll, "dialog": 0})
        self._draw()
        return True

    # Flame graphs: what `Flames` asks of its owner.

    def _engine_pid(self) -> int | None:
        engine = engine_of(self._shown, self.view) if self._shown is not None else None
        return engine.pid if engine is not None and engine.alive else None

    def flame_says(self, text: str) -> None:
        """Show a message in the footer."""
        self._say(text)

    def flame_changed(self) -> None:
        """The viewer has something new to show."""
        self._draw()

    def flame_taken(self, capture: StackCapture) -> None:
        """What is recorded now keeps the stacks too."""
        self.desk.capture(capture)

    def flame_closed(self) -> None:
        """There was only a flame graph to look at."""
        self.exit(0)

    def flame_failed(self, error: BaseException) -> None:
        """A fault of kvtop's own."""
        self.fail(error)

    def _refresh_detail(self) -> None:
        """Keep an open request's block table as fresh as the rest of the screen."""
        if self.view.detail is None or self._shown is None:
            return
        engine = engine_of(self._shown, self.view)
        if engine is not None and (self._detail_task is None or self._detail_task.done()):
            self._fetch(engine, self.view.detail.request_id)

    def _fetch(self, engine: Engine, request_id: str) -> None:
        if self._detail_task is not None:
            self._detail_task.cancel()
        work = self._take_detail(engine, request_id)
        self._detail_task = asyncio.get_running_loop().create_task(work)
        self._detail_task.add_done_callback(self._ended)

    async def _take_detail(self, engine: Engine, request_id: str) -> None:
        detail = await self._feed.request_detail(engine, request_id)
        open_now = self.view.detail
        if open_now is None or open_now.request_id != request_id or self.view.paused:
            return
        self.desk.detail(engine.pid, detail)
        live = self._deck is None
        if live and detail.error and open_now.tables and not self._is_known(request_id):
            # Its last table stays on screen, which says that the request is gone. A replay
            # may have gone back to before there was one.
            detail = open_now
            lit: frozenset[int] = frozenset()
        else:
            lit = frozenset(block for _, _, blocks in detail.tables for block in blocks)
        self.view = replace(self.view, detail=detail, lit_blocks=lit)
        self._draw()

    def _is_known(self, request_id: str) -> bool:
        engine = engine_of(self._shown, self.view) if self._shown is not None else None
        return any(row.id == request_id for row in (engine.requests if engine else None) or ())

    async def close_feed(self, seconds: float) -> None:
        """Close the feed, and end a capture; a source that hangs is left behind."""
        await self.flames.close()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._feed.close(), seconds)
