"""The screen on the fake feed in a real terminal: keys, sizes, signals, faults."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from terminal import NO_TMUX, ROOT, TMUX, Pty, Tmux, assert_given_back, command, left_on, wait_for

from kvtop.ui.keys import KEYS

SCRIPT = "tests/e2e/fake_top.py"
ARGV = [sys.executable, str(ROOT / SCRIPT)]
LEAVING = ("quit", "suspend")

needs_tmux = pytest.mark.skipif(TMUX is None, reason=NO_TMUX)


@needs_tmux
@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
def test_every_key_then_quit(size, tmp_path):
    columns, rows = size
    with Tmux(columns, rows) as tmux:
        before = tmux.stty()
        # Some keys write files where kvtop was started.
        tmux.type(f"cd {tmp_path}")
        tmux.type(command(SCRIPT, "--engines", "2") + "; echo code=$?")
        tmux.wait_text("Requests")
        assert tmux.flag("alternate_on") == "1"
        for binding in KEYS:
            if binding.action in LEAVING:
                continue
            for key in binding.keys:
                tmux.press(key)
        for _ in range(4):
            tmux.press("escape")
        tmux.press("z")
        tmux.press("z")
        tmux.wait_text("kvtop")
        assert len(tmux.lines()) == rows
        tmux.press("q")
        tmux.wait_text("code=0")
        assert_given_back(tmux, before)


@needs_tmux
@pytest.mark.parametrize(("key", "text"), [("?", "Keys"), ("s", "Sources"), ("enter", "Request ")])
def test_a_key_opens_and_escape_closes(key, text):
    with Tmux(80, 24) as tmux:
        tmux.type(command(SCRIPT))
        tmux.wait_text("Requests")
        tmux.press(key)
        tmux.wait_text(text)
        tmux.press("escape")
        wait_for("closed", lambda: re.search(rf"[─━] {text}", tmux.screen()) is None)


@needs_tmux
def test_resize():
    with Tmux(80, 24) as tmux:
        tmux.type(command(SCRIPT))
        tmux.wait_text("Requests")
        for columns, rows in ((160, 50), (100, 30), (20, 6), (5, 3), (80, 24)):
            tmux.resize(columns, rows)

            def fits(columns=columns, rows=rows):
                lines = tmux.lines()
                # The diagnosis stands above the panels where there is room for it.
                tops = [line for line in lines[1:3] if len(line) == columns]
                return len(lines) == rows and any(line[-1] == "╮" for line in tops)

            wait_for(f"a screen of {columns}x{rows}", fits)
        tmux.wait_text("Requests")
        tmux.press("q")
        tmux.wait_text("PROMPT>")


@needs_tmux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_gives_the_terminal_back(number):
    with Tmux() as tmux:
        before = tmux.stty()
        tmux.type(command(SCRIPT) + "; echo code=$?")
        tmux.wait_text("Requests")
        subprocess.run(["kill", f"-{int(number)}", str(tmux.child())], check=True)
        tmux.wait_text(f"code={128 + number}")
        assert_given_back(tmux, before)


@needs_tmux
def test_a_fault_is_one_plain_line(tmp_path):
    # The traceback that a fault leaves behind goes where the test cleans up.
    with Tmux(120, 24, {"TMPDIR": str(tmp_path)}) as tmux:
        before = tmux.stty()
        tmux.type(command(SCRIPT, "--fail-after", "2", "--interval", "0.2") + "; echo code=$?")
        tmux.wait_text("code=70")
        screen = tmux.screen()
        assert "kvtop: a fault of kvtop's own: RuntimeError: the fake feed was told" in screen
        assert "Traceback" not in screen
        assert_given_back(tmux, before)
    assert [path.suffix for path in tmp_path.glob("kvtop-fault-*")] == [".txt"]


@needs_tmux
def test_suspend_and_return():
    with Tmux() as tmux:
        before = tmux.stty()
        tmux.type("set -m; " + command(SCRIPT))
        tmux.wait_text("Requests")
        tmux.press("ctrl+z")
        assert_given_back(tmux, before)
        tmux.type("fg")
        tmux.wait_text("Requests")
        tmux.press("q")
        assert_given_back(tmux, before)


@needs_tmux
def test_what_others_write_on_the_screen_can_be_painted_over():
    with Tmux() as tmux:
        tmux.type(command(SCRIPT))
        tmux.wait_text("Requests")
        tmux.press("space")
        tmux.wait_text("PAUSED")
        Path(tmux.flag("pane_tty")).write_text("\x1b[12;5HGARBAGE")
        tmux.wait_text("GARBAGE")
        tmux.press("ctrl+l")
        tmux.wait_gone("GARBAGE")
        tmux.press("q")


@needs_tmux
def test_ascii_where_the_locale_has_no_utf8():
    with Tmux(environ={"LC_ALL": "C"}) as tmux:
        tmux.type(command(SCRIPT))
        tmux.wait_text("Requests")
        assert tmux.screen().isascii()
        tmux.press("q")


@needs_tmux
def test_no_colour():
    with Tmux(environ={"NO_COLOR": "1"}) as tmux:
        tmux.type(command(SCRIPT))
        tmux.wait_text("Requests")
        tmux.press("down")
        assert re.search(r"\x1b\[[0-9;]*(3[0-7]|38;|48;|4[0-7]|9[0-7])m", tmux.screen(True)) is None
        tmux.press("q")


def test_sixteen_colours():
    with Pty(ARGV, environ={"TERM": "xterm", "COLORTERM": None}) as program:
        program.wait_bytes(b"Requests")
        program.read(2.5)
        assert b"38;5;" not in program.output
        assert b"38;2;" not in program.output
        assert re.search(rb"\x1b\[[0-9;]*3[0-7]m", program.output)


@pytest.mark.parametrize("how", ["q", "\x1b[21~", "\x03", signal.SIGTERM, signal.SIGHUP])
def test_every_mode_is_switched_off(how):
    with Pty(ARGV) as program:
        program.wait_bytes(b"\x1b[?1000h")
        program.wait_bytes(b"Requests")
        program.read(1.0)
        if isinstance(how, str):
            program.write(how.encode())
        else:
            program.kill(how)
        code = program.wait()
        assert code == (0 if isinstance(how, str) else 128 + how)
        assert left_on(bytes(program.output)) == set()
        # Entered once and left once: a second time would move the shell's cursor.
        assert program.output.count(b"\x1b[?1049h") == 1
        assert program.output.count(b"\x1b[?1049l") == 1


def test_a_signal_before_textual_is_there():
    with Pty(ARGV) as program:
        program.wait_bytes(b"kvtop")
        program.kill(signal.SIGTERM)
        assert program.wait() == 128 + signal.SIGTERM
        assert left_on(bytes(program.output)) == set()


def test_the_first_frame_is_not_cleared():
    with Pty(ARGV) as program:
        program.wait_bytes(b"\x1b[?1000h")
        program.read(1.5)
        program.write(b"q")
        program.wait()
    first = program.output.index(b"kvtop 0")
    assert b"\x1b[2J" not in program.output[first:]
    assert b"\x1b[J" not in program.output[first:]
    assert program.output.index(b"Requests") < program.output.index(b"\x1b[?1000h")


def test_quit_does_not_wait_for_a_source_that_hangs():
    with Pty([*ARGV, "--hang"]) as program:
        program.wait_bytes(b"\x1b[?1000h")
        program.read(1.0)
        program.write(b"q")
        # The fake feed's close never returns: the program ends nevertheless.
        assert program.wait() == 0


def test_without_a_terminal():
    done = subprocess.run(
        ARGV, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "kvtop: the live screen needs a terminal; use `kvtop once` in scripts\n"


def test_a_terminal_that_cannot_be_drawn_on():
    with Pty(ARGV, environ={"TERM": "dumb"}) as program:
        assert program.wait() == 2
    assert b"\x1b" not in program.output
    assert b"'dumb' cannot be drawn on" in program.output
