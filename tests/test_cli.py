"""The command line as a shell sees it: output, exit codes, one plain line for bad input."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvtop import __version__
from kvtop.cli import COMMANDS, main
from kvtop.errors import ExitCode


def kvtop(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtop", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_version() -> None:
    done = kvtop("--version")
    assert (done.returncode, done.stdout) == (0, f"kvtop {__version__}\n")


def test_version_imports_nothing_slow() -> None:
    code = (
        "import sys; from kvtop.cli import main; main(['--version']);"
        "slow = ('textual', 'httpx', 'asyncio', 'psutil', 'plotext');"
        "print([name for name in slow if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1] == "[]"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert "--interval" in text


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "usage: kvtop" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "unknown command 'frobnicate'"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["once", "--interval", "soon"], "'soon' is not a time"),
        (["once", "--pid", "x"], "'x' is not a process id"),
        (["once", "--pid", "999999999"], "no process 999999999"),
        (["once", "--url", "ftp://x"], "ftp"),
    ],
)
def test_bad_input_is_one_plain_line(arguments: list[str], message: str) -> None:
    done = kvtop(*arguments)
    assert done.returncode in (ExitCode.USAGE, ExitCode.NOT_FOUND)
    assert done.stdout == ""
    assert done.stderr.startswith("kvtop: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_live_screen_needs_a_terminal() -> None:
    done = kvtop()
    assert done.returncode == ExitCode.USAGE
    assert "kvtop once" in done.stderr


def test_closed_pipe_is_quiet() -> None:
    done = subprocess.run(
        f"{sys.executable} -m kvtop --help | true", shell=True, capture_output=True, check=False
    )
    assert done.stderr == b""


def test_control_characters_in_errors_are_not_passed_on() -> None:
    done = kvtop("\x1b[31mred\nline")
    assert "\x1b" not in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("redirect", "code"),
    [(">&-", 0), ("2>&-", 0), ("<&-", 0), (">/dev/full", ExitCode.IO), ("2>/dev/full", 0)],
)
def test_missing_and_full_streams(redirect: str, code: int) -> None:
    command = f"{sys.executable} -m kvtop --version {redirect}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_an_error_that_cannot_be_said_keeps_its_code() -> None:
    command = f"{sys.executable} -m kvtop frobnicate 2>/dev/full"
    assert subprocess.run(command, shell=True, check=False).returncode == ExitCode.USAGE


def test_a_very_long_error_is_cut() -> None:
    assert len(kvtop("x" * 50_000).stderr) < 1000
