from __future__ import annotations

import os
import pty
import re
import termios

import pytest

from kvtop.ui.terminal import GIVE_BACK, Guard, can_draw, size_of, wants_ascii


@pytest.mark.parametrize(
    ("environ", "encoding", "ascii_only"),
    [
        ({"LANG": "en_US.UTF-8"}, "utf-8", False),
        ({"LANG": "C.UTF-8"}, "utf-8", False),
        ({}, "utf-8", False),
        ({"LC_CTYPE": "C.UTF-8"}, "utf-8", False),
        ({"LANG": "C"}, "utf-8", True),
        # PEP 538: Python has set LC_CTYPE itself.
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, "utf-8", True),
        ({"LC_ALL": "POSIX", "LANG": "en_US.UTF-8"}, "utf-8", True),
        ({"LC_ALL": "en_US.utf8", "LANG": "C"}, "UTF-8", False),
        ({"LC_CTYPE": "de_DE.ISO-8859-1"}, "utf-8", True),
        ({"LANG": "de_DE.ISO-8859-1"}, "iso8859-1", True),
        ({"LANG": "en_US.UTF-8"}, None, True),
    ],
)
def test_when_only_ascii_may_be_drawn(
    environ: dict[str, str], encoding: str | None, ascii_only: bool
) -> None:
    assert wants_ascii(environ, encoding) is ascii_only


def test_terminals_that_cannot_be_drawn_on() -> None:
    assert not can_draw({"TERM": "dumb"})
    assert can_draw({"TERM": "xterm"})


@pytest.fixture
def terminal():
    master, slave = pty.openpty()
    yield master, slave
    os.close(master)
    os.close(slave)


def test_the_guard_gives_back_once(terminal) -> None:
    master, slave = terminal
    before = termios.tcgetattr(slave)
    guard = Guard(slave, slave)
    guard.enter()
    assert guard.entered
    assert not termios.tcgetattr(slave)[3] & termios.ECHO
    guard.restore()
    guard.restore()
    assert termios.tcgetattr(slave) == before
    written = os.read(master, 65536)
    assert written.count(b"\x1b[?1049h") == 1
    assert written.count(b"\x1b[?1049l") == 1
    assert written.endswith(b"\x1b[?25h")


def test_what_somebody_else_gave_back_is_not_given_back_again(terminal) -> None:
    master, slave = terminal
    guard = Guard(slave, slave)
    guard.enter()
    guard.screen_left()
    guard.restore()
    assert b"\x1b[?1049l" not in os.read(master, 65536)


def test_everything_that_is_switched_on_is_switched_off() -> None:
    off = set(re.findall(r"\x1b\[\?(\d+)l", GIVE_BACK))
    assert {"1000", "1003", "1006", "1004", "2004", "2048", "1049"} <= off
    assert set(re.findall(r"\x1b\[\?(\d+)h", GIVE_BACK)) == {"7", "25"}


def test_a_terminal_that_takes_nothing_does_not_hold_the_guard(terminal) -> None:
    _, slave = terminal
    os.set_blocking(slave, False)
    guard = Guard(slave, slave)
    # Far more than the buffer of a pty that nobody reads.
    guard.write("x" * 1_000_000)


def test_a_size_that_is_not_told(terminal) -> None:
    _, slave = terminal
    assert size_of(slave) == (80, 24)
    assert size_of(-1) == (80, 24)
    termios.tcsetwinsize(slave, (50, 160)) if hasattr(termios, "tcsetwinsize") else None
    if hasattr(termios, "tcsetwinsize"):
        assert size_of(slave) == (160, 50)
