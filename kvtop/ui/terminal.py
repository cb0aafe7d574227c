"""The terminal as it was found, and giving it back: normally, on a signal, after a fault.

The guard knows at any moment whether something of ours is still switched on, so that
nothing is undone twice: leaving the alternate screen twice would move the cursor of
the shell.
"""

from __future__ import annotations

import contextlib
import os
import select
import termios
import time
from collections.abc import Mapping
from typing import Any

ALTERNATE = "\x1b[?1049h"
"""Enter the alternate screen, cleared."""
HIDE_CURSOR = "\x1b[?25l"
"""Hide the cursor."""
GIVE_BACK = (
    "\x1b[?1000l\x1b[?1002l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?1016l"  # mouse reporting
    "\x1b[?1004l\x1b[?2004l\x1b[?2048l"  # focus reporting, bracketed paste, resize reports
    "\x1b[?2026l\x1b[?7h\x1b[0m"  # synchronized output, line wrap, colours
    "\x1b[?1049l\x1b[?25h"  # alternate screen, cursor
)
"""Everything that kvtop or Textual switch on, switched off."""

_NO_SCREENS = ("dumb", "unknown")
_WRITE_PATIENCE_S = 0.5


def can_draw(environ: Mapping[str, str]) -> bool:
    """Whether TERM names a terminal whose cursor can be moved."""
    return environ.get("TERM", "").lower() not in _NO_SCREENS


def wants_ascii(environ: Mapping[str, str], encoding: str | None) -> bool:
    """Whether only ASCII may be drawn.

    Python switches itself to UTF-8 in the C locale (PEP 538, PEP 540), so the
    encoding of stdout does not tell; a locale that was chosen on purpose does.

    Args:
        environ: Environment variables.
        encoding: Encoding of standard output.
    """
    if (encoding or "").lower().replace("-", "").replace("_", "") != "utf8":
        return True
    chosen = environ.get("LC_ALL") or ""
    if not chosen:
        # PEP 538 sets LC_CTYPE itself, so LANG=C beside it was the user's word.
        chosen = environ.get("LC_CTYPE") or ""
        if chosen in ("", "C.UTF-8", "C.utf8", "UTF-8"):
            chosen = environ.get("LANG") or ""
    return bool(chosen) and "utf" not in chosen.lower()


def size_of(fd: int) -> tuple[int, int]:
    """Columns and rows of the terminal; 80x24 where it does not tell."""
    try:
        columns, rows = os.get_terminal_size(fd)
    except OSError:
        columns, rows = 0, 0
    return (columns, rows) if columns > 0 and rows > 0 else (80, 24)


class Guard:
    """Remembers a terminal and gives it back as it was.

    Args:
        stdin: Descriptor keys are read from.
        stdout: Descriptor of the same terminal, written to.
    """

    def __init__(self, stdin: int, stdout: int) -> None:
        self._stdin = stdin
        self._stdout = stdout
        self._modes: list[Any] | None = None
        with contextlib.suppress(termios.error, OSError):
            self._modes = termios.tcgetattr(stdin)
        self._screen = False

    @property
    def entered(self) -> bool:
        """Whether the alternate screen is ours now."""
        return self._screen

    def enter(self) -> None:
        """Go to the alternate screen; keys pressed from now on are not echoed.

        Ctrl-C still sends SIGINT here: nobody reads keys yet.
        """
        if self._modes is not None:
            modes = list(self._modes)
            # Enter stays a carriage return, so keys pressed this early are understood later.
            modes[0] = modes[0] & ~(termios.ICRNL | termios.IXON)
            modes[3] = modes[3] & ~(termios.ECHO | termios.ICANON)
            # Ctrl-Z and Ctrl-\\ would leave the shell with our screen; they wait as keys.
            characters = list(modes[6])
            for name in (termios.VSUSP, termios.VQUIT):
                characters[name] = b"\0"
            modes[6] = characters
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(self._stdin, termios.TCSANOW, modes)
        self._screen = True
        self.write(ALTERNATE + HIDE_CURSOR)

    def screen_left(self) -> None:
        """Somebody else has left the alternate screen and switched off the rest."""
        self._screen = False

    def screen_entered(self) -> None:
        """Somebody else has entered the alternate screen."""
        self._screen = True

    def restore(self) -> None:
        """Give the terminal back. Does nothing that was done already; never raises."""
        if self._screen:
            self._screen = False
            self.write(GIVE_BACK)
        if self._modes is not None:
            with contextlib.suppress(termios.error, OSError):
                termios.tcsetattr(self._stdin, termios.TCSANOW, self._modes)

    def write(self, text: str) -> None:
        """Write at once, past Python's buffers. A terminal that takes nothing is given up."""
        data = text.encode("utf-8", "replace")
        deadline = time.monotonic() + _WRITE_PATIENCE_S
        with contextlib.suppress(OSError, ValueError):
            while data:
                ready = select.select([], [self._stdout], [], max(deadline - time.monotonic(), 0))
                if not ready[1]:
                    return
                # One piece at a time: a full terminal must not hold us for ever.
                data = data[os.write(self._stdout, data[:512]) :]
                deadline = time.monotonic() + _WRITE_PATIENCE_S


def prepare_textual() -> None:
    """Settings that Textual reads from the environment when it is imported.

    The Kitty keyboard protocol stays off: our keys need none of it, and a terminal left
    in it by a killed process no longer understands its user.
    """
    os.environ.setdefault("TEXTUAL_DISABLE_KITTY_KEY", "1")
    os.environ.setdefault("TEXTUAL_ANIMATIONS", "none")
