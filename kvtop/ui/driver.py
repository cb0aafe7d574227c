"""Textual's terminal driver, with what an SSH session and a careful guest need.

It writes to standard output, reports clicks and the wheel but no mouse moves, takes
over the screen that the first frame is already on, and tells the guard what it does.
"""

from __future__ import annotations

import sys
from typing import Any

from textual.app import App
from textual.drivers.linux_driver import LinuxDriver

from kvtop.ui.terminal import ALTERNATE, Guard, size_of

_MOUSE_ON = "\x1b[?1000h\x1b[?1006h"
_KITTY_POP = "\x1b[<u"
_MOUSE_OFF = "\x1b[?1000l\x1b[?1006l"


class TerminalDriver(LinuxDriver):
    """The driver of a real terminal. Made by Textual through `driver_for`."""

    guard: Guard

    def __init__(
        self,
        app: App[Any],
        *,
        debug: bool = False,
        mouse: bool = True,
        size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)
        self._cleared = False
        # Textual draws on stderr; `kvtop 2>log` must not take the screen away.
        if sys.__stdout__ is not None:
            self._file = sys.__stdout__

    def write(self, data: str) -> None:
        """Queue text for the terminal; after it was given back nothing is written."""
        thread = self._writer_thread
        if thread is None or not thread.is_alive():
            return
        if data == ALTERNATE:
            if self.guard.entered:
                # Entering it again would clear the first frame: a flicker.
                return
            self.guard.screen_entered()
            self._cleared = True
        # The Kitty protocol was never switched on: what would be popped is somebody else's.
        if data != _KITTY_POP:
            thread.write(data)

    def cleared(self) -> bool:
        """Whether the screen was cleared since this was last asked."""
        was, self._cleared = self._cleared, False
        return was

    @property
    def backlog(self) -> int:
        """Pieces of text that the terminal has not taken yet."""
        thread = self._writer_thread
        return thread._queue.qsize() if thread is not None else 0

    def stop_application_mode(self) -> None:
        """Give the terminal back, as far as Textual switched something on."""
        thread = self._writer_thread
        if thread is None or not thread.is_alive():
            return
        super().stop_application_mode()
        # All of it must be out before the shell writes, or before we are stopped by Ctrl-Z.
        thread.stop()
        self.guard.screen_left()
        self.guard.restore()

    def _get_terminal_size(self) -> tuple[int, int]:
        # COLUMNS and LINES of the environment are those of the shell's start.
        return size_of(self.fileno)

    def _enable_mouse_support(self) -> None:
        if self._mouse:
            self.write(_MOUSE_ON)

    def _enable_mouse_pixels(self) -> None:
        """Cells are all we need."""

    def _disable_mouse_support(self) -> None:
        if self._mouse:
            self.write(_MOUSE_OFF)


def driver_for(guard: Guard) -> type[TerminalDriver]:
    """A driver class bound to the guard of the terminal that it will take over."""
    return type("BoundTerminalDriver", (TerminalDriver,), {"guard": guard})
