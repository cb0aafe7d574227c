"""The command line: one parser, one small module a subcommand.

Every subcommand's module is imported only when it is the one that runs, so that
`kvtop --version` and shell completion cost nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from kvtop import __version__
from kvtop.errors import ExitCode, KvtopError, UsageError

COMMANDS: dict[str, tuple[str, str]] = {
    "top": ("kvtop.commands.top", "the live screen (the default)"),
    "once": ("kvtop.commands.once", "print one snapshot and exit"),
    "demo": ("kvtop.commands.demo", "the live screen on a simulated engine"),
    "attach": ("kvtop.commands.attach", "put the probe into running engines"),
    "detach": ("kvtop.commands.detach", "take the probe out of running engines"),
    "doctor": ("kvtop.commands.doctor", "say what can be seen on this machine, and mend the rest"),
    "record": ("kvtop.commands.record", "record a session to a file, without a screen"),
    "replay": ("kvtop.commands.replay", "the screen on a recorded session"),
    "diff": ("kvtop.commands.diff", "compare two sessions or two moments"),
    "report": ("kvtop.commands.report", "a report of a session, as HTML or Markdown"),
    "export": ("kvtop.commands.export", "a session as CSV, JSON, Parquet or Perfetto trace"),
    "flame": ("kvtop.commands.flame", "a flame graph of an engine, and its viewer"),
    "findings": ("kvtop.commands.findings", "list the rules that kvtop judges by"),
    "explain": ("kvtop.commands.explain", "explain one rule"),
}
"""Name to module and help. `top` is what plain `kvtop` runs."""


class _Parser(argparse.ArgumentParser):
    """Bad usage is an error like any other: one plain line and its exit code."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, f"see `{self.prog} --help`")


def _parser(command: str | None) -> argparse.ArgumentParser:
    """The parser for one subcommand, or for the top level when None."""
    if command is None:
        lines = "\n".join(f"  {name:<10}{text}" for name, (_, text) in COMMANDS.items())
        return _Parser(
            prog="kvtop",
            description="See where every KV-cache block of a running vLLM is.",
            epilog=f"commands:\n{lines}\n\nkvtop COMMAND --help tells the options of each.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage="kvtop [--version] [--help] [COMMAND] [options]",
            add_help=False,
        )
    module_name, text = COMMANDS[command]
    prog = "kvtop" if command == "top" else f"kvtop {command}"
    parser = _Parser(prog=prog, description=text[0].upper() + text[1:] + ".")
    importlib.import_module(module_name).add_arguments(parser)
    return parser


def run(argv: Sequence[str]) -> int:
    """Run one command line.

    Raises:
        KvtopError: It failed in a way that the user can act on.
    """
    words = list(argv)
    if words and words[0] in ("-V", "--version"):
        print(f"kvtop {__version__}")
        return ExitCode.OK
    if words and words[0] in ("-h", "--help", "help"):
        _parser(None).print_help()
        print("\noptions of plain kvtop:")
        print(_parser("top").format_help().split("options:\n", 1)[-1], end="")
        return ExitCode.OK
    command = "top"
    if words and not words[0].startswith("-"):
        command = words.pop(0)
        if command not in COMMANDS:
            raise UsageError(f"unknown command {command!r}", "see `kvtop --help`")
    options = _parser(command).parse_args(words)
    code: int = importlib.import_module(COMMANDS[command][0]).run(options)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and turn failures into one plain line and an exit code."""
    try:
        code = run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except KvtopError as error:
        return _fail(error.line(), error.code)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone (`kvtop once | head`): nothing is left to say,
        # and the interpreter must not say it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.IO
    except OSError as error:
        return _fail(str(error), ExitCode.IO)
    except Exception as error:
        where = _keep_traceback()
        what = f"a fault of kvtop's own: {type(error).__name__}: {error}"
        return _fail(f"{what}; please report it{where}", ExitCode.INTERNAL)


def _fail(line: str, code: ExitCode) -> ExitCode:
    """Say why, as far as anybody can hear it; never raises."""
    with contextlib.suppress(OSError, ValueError):
        print(f"kvtop: {_plain(line)}", file=sys.stderr, flush=True)
    return code


def _keep_traceback() -> str:
    """Write the traceback being handled to a file; says where, or nothing when it cannot."""
    # Imported here: nobody pays for them unless something broke.
    import tempfile
    import traceback

    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="kvtop-fault-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            traceback.print_exc(file=file)
    except OSError:
        return ""
    return f" with {file.name}"


def _plain(text: str, most: int = 600) -> str:
    """One line without control characters, whatever a file name or a server put in."""
    line = "".join(c if c.isprintable() else "?" for c in text[: most + 1].replace("\n", " "))
    return line if len(line) <= most else line[:most] + "..."


def entry() -> NoReturn:
    """Run the process's own command line, and leave without waiting for hung threads."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        # A stream that was closed by the caller (`>&-`) is None.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for good
    try:
        code = main()
    except SystemExit as done:  # --help of a subcommand
        code = done.code if isinstance(done.code, int) else ExitCode.OK
    try:
        sys.stdout.flush()
    except OSError as error:
        code = _fail(str(error), ExitCode.IO)
    os._exit(code)
