"""Runs a tool that works on a target, in a process of its own.

It is never killed: a debugger that dies while a thread of the target is borrowed would
leave that thread where it must not be. After the deadline it is left to finish by itself.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from kvtop.attach.ability import AttachError


@dataclass(frozen=True, slots=True)
class Done:
    """How it ended."""

    code: int
    """Exit code."""
    output: str
    """Its output and errors together."""


def run_helper(command: Sequence[str], text: str, deadline_s: float, what: str) -> Done:
    """Runs a command with `text` on its standard input.

    Args:
        command: Program and arguments.
        text: What it reads.
        deadline_s: How long it is waited for.
        what: Its name, for messages.

    Raises:
        AttachError: It cannot be started, or has not ended yet.
    """
    # Files and not pipes: a helper that is left behind must not block on, or die of, ours.
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output:
        given.write(text.encode())
        given.seek(0)
        try:
            child = subprocess.Popen(
                command, stdin=given, stdout=output, stderr=output, start_new_session=True
            )
        except OSError as error:
            raise AttachError(f"{what} cannot be started: {error.strerror}") from error
        try:
            code = child.wait(deadline_s)
        except subprocess.TimeoutExpired as error:
            raise AttachError(
                f"{what} has not finished within {deadline_s:g} s",
                f"it goes on in process {child.pid}; do not kill it, look again later",
            ) from error
        output.seek(0)
        return Done(code, output.read(1 << 16).decode("utf-8", "replace"))


def last_line(output: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it gave no reason"
