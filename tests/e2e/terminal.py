"""Real terminals for tests: tmux for what a person sees, a bare pty for the raw bytes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 30.0
TMUX = shutil.which("tmux")
NO_TMUX = "tmux is not installed: no real terminal to test in"

TMUX_KEYS = {
    "tab": "Tab",
    "shift+tab": "BTab",
    "up": "Up",
    "down": "Down",
    "pageup": "PageUp",
    "pagedown": "PageDown",
    "home": "Home",
    "end": "End",
    "enter": "Enter",
    "escape": "Escape",
    "space": "Space",
    "ctrl+c": "C-c",
    "ctrl+l": "C-l",
    "ctrl+z": "C-z",
    **{f"f{n}": f"F{n}" for n in range(1, 13)},
}


def command(script: str, *args: str) -> str:
    """A shell command that runs a script of the tests with this Python."""
    words = [sys.executable, str(ROOT / script), *args]
    return f"PYTHONPATH={shlex.quote(str(ROOT))} " + " ".join(shlex.quote(word) for word in words)


def kvtop(*args: str) -> str:
    """A shell command that runs kvtop itself with this Python."""
    words = [sys.executable, "-m", "kvtop", *args]
    return f"PYTHONPATH={shlex.quote(str(ROOT))} " + " ".join(shlex.quote(word) for word in words)


def wait_for(what: str, ready: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    """Wait until something is so; fails with its name when it never is."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise AssertionError(f"never happened: {what}")
        time.sleep(0.05)


class Tmux:
    """A shell in a tmux server of its own.

    Args:
        columns: Width of the window.
        rows: Height of the window.
        environ: Variables set for the shell on top of a small fixed set.
    """

    def __init__(
        self, columns: int = 80, rows: int = 24, environ: Mapping[str, str] | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvtop-tmux-")
        self._socket = str(Path(self._folder.name) / "s")
        keep = {"PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR"}
        env = {name: value for name, value in os.environ.items() if name in keep}
        env.setdefault("LANG", "C.UTF-8")
        env.update(TERM="xterm-256color", **dict(environ or {}))
        self._env = env
        sets = [item for name, value in env.items() for item in ("-e", f"{name}={value}")]
        try:
            # -u: tmux itself speaks UTF-8, whatever locale the shell inside is given.
            self.run("new-session", "-d", "-x", str(columns), "-y", str(rows), *sets, "sh")
            self.run("set-option", "-g", "escape-time", "10")
            # Written in two parts, so that only the prompt itself is found on the screen.
            self.type("""PS1='PROM''PT> '""")
            self.wait_text("PROMPT>")
        except BaseException:
            self.close()
            raise

    def run(self, *args: str) -> str:
        """Run a tmux command and give what it prints."""
        words = [TMUX or "tmux", "-u", "-f", "/dev/null", "-S", self._socket, *args]
        done = subprocess.run(
            words, check=False, capture_output=True, text=True, timeout=20, env=self._env
        )
        if done.returncode:
            raise AssertionError(f"tmux {args[0]}: {done.stderr.strip()}")
        return done.stdout

    def type(self, text: str) -> None:
        """Type a line and Enter."""
        self.run("send-keys", "-l", text)
        self.run("send-keys", "Enter")

    def press(self, key: str) -> None:
        """Press one key by its name in `kvtop.ui.keys`."""
        if key in TMUX_KEYS:
            self.run("send-keys", TMUX_KEYS[key])
        else:
            self.run("send-keys", "-l", key)

    def screen(self, colours: bool = False) -> str:
        """What is on the screen now."""
        return self.run("capture-pane", "-p", *(["-e"] if colours else []))

    def lines(self) -> list[str]:
        """The rows of the screen, as far as something is on them."""
        return self.screen().rstrip("\n").split("\n")

    def wait_text(self, text: str, seconds: float = PATIENCE_S) -> None:
        """Wait until a text is on the screen."""
        try:
            wait_for(text, lambda: text in self.screen(), seconds)
        except AssertionError:
            raise AssertionError(f"never on screen: {text!r}\n{self.screen()}") from None

    def wait_gone(self, text: str, seconds: float = PATIENCE_S) -> None:
        """Wait until a text is no longer on the screen."""
        wait_for(f"{text!r} gone", lambda: text not in self.screen(), seconds)

    def resize(self, columns: int, rows: int) -> None:
        """Change the size of the window."""
        self.run("resize-window", "-x", str(columns), "-y", str(rows))

    def flag(self, name: str) -> str:
        """A format variable of tmux, for example `cursor_flag`."""
        return self.run("display-message", "-p", f"#{{{name}}}").strip()

    def modes(self) -> dict[str, str]:
        """What a program may leave switched on."""
        names = ("alternate_on", "cursor_flag", "mouse_any_flag", "mouse_sgr_flag", "wrap_flag")
        return {name: self.flag(name) for name in names}

    def stty(self) -> str:
        """The line settings of the terminal, asked in the shell."""
        path = Path(self._folder.name) / f"stty-{time.monotonic_ns()}"
        self.type(f"stty -a >{path}.new; mv {path}.new {path}")
        wait_for("stty", path.exists)
        return path.read_text()

    def child(self) -> int:
        """The process that the shell runs in the foreground."""
        shell = self.flag("pane_pid")
        found: list[int] = []

        def look() -> bool:
            children = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
            found[:] = [int(pid) for pid in children]
            return bool(found)

        wait_for("a child of the shell", look)
        return found[-1]

    def close(self) -> None:
        """End the server and everything in it."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("kill-server")
        self._folder.cleanup()

    def __enter__(self) -> Tmux:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def assert_given_back(tmux: Tmux, stty_before: str) -> None:
    """The shell has its terminal back as it was."""
    tmux.wait_text("PROMPT>")
    wait_for("the alternate screen left", lambda: tmux.flag("alternate_on") == "0")
    assert tmux.modes() == {
        "alternate_on": "0",
        "cursor_flag": "1",
        "mouse_any_flag": "0",
        "mouse_sgr_flag": "0",
        "wrap_flag": "1",
    }
    assert tmux.stty() == stty_before


class Pty:
    """A program on a bare pseudo terminal, with every byte it writes.

    Args:
        argv: The program.
        columns: Width.
        rows: Height.
        environ: Variables on top of this process's own; None removes one.
    """

    def __init__(
        self,
        argv: Sequence[str],
        columns: int = 80,
        rows: int = 24,
        environ: Mapping[str, str | None] | None = None,
    ) -> None:
        env = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
        env.pop("NO_COLOR", None)
        for name, value in (environ or {}).items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        self.output = bytearray()
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            os.execve(argv[0], list(argv), env)

    def read(self, seconds: float, until: bytes | None = None) -> bytes:
        """Read for a time, or until some bytes are in everything written so far."""
        deadline = time.monotonic() + seconds
        start = len(self.output)
        while (until is None or until not in self.output) and (
            left := deadline - time.monotonic()
        ) > 0:
            if select.select([self._master], [], [], left)[0]:
                try:
                    data = os.read(self._master, 65536)
                except OSError:
                    break
                if not data:
                    break
                self.output += data
        return bytes(self.output[start:])

    def wait_bytes(self, what: bytes, seconds: float = PATIENCE_S) -> None:
        """Read until some bytes have come."""
        self.read(seconds, what)
        assert what in self.output, f"never written: {what!r}"

    def write(self, data: bytes) -> None:
        """Type."""
        os.write(self._master, data)

    def kill(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait(self, seconds: float = PATIENCE_S) -> int:
        """Read to the end; the exit code, or minus the signal."""
        deadline = time.monotonic() + seconds
        while True:
            self.read(0.05)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            assert time.monotonic() < deadline, "the program never ended"

    def close(self) -> None:
        """End the program if it still runs."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
        os.close(self._master)

    def __enter__(self) -> Pty:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def left_on(stream: bytes) -> set[str]:
    """Terminal modes that a byte stream switches on and does not switch off again."""
    on: set[str] = set()
    for match in re.finditer(rb"\x1b\[\?([0-9;]+)([hl])", stream):
        for number in match.group(1).decode().split(";"):
            if match.group(2) == b"h":
                on.add(number)
            else:
                on.discard(number)
    # Shown cursor and line wrap are how a shell wants it.
    usual = {"25", "7"}
    hidden = {
        f"no {number}"
        for number in usual
        if stream.rfind(f"\x1b[?{number}l".encode()) > stream.rfind(f"\x1b[?{number}h".encode())
    }
    return (on - usual) | hidden
