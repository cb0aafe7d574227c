"""The processes a capture looks at, as the kernel sees them: children, threads, stopped or not."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_MOST = 512


def tree_of(pid: int) -> tuple[int, ...]:
    """A process and all below it, the process first; empty when it is gone."""
    if not Path(f"/proc/{pid}").is_dir():
        return ()
    found = [pid]
    for parent in found:
        for child in _children(parent):
            if child not in found and len(found) < _MOST:
                found.append(child)
    return tuple(found)


def _children(pid: int) -> list[int]:
    out: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{task}/children").read_text("ascii")
            out += [int(word) for word in text.split()]
    except (OSError, ValueError):
        pass
    return out


def thread_count(pids: Iterable[int]) -> int:
    """Threads of some processes together; those that are gone have none."""
    total = 0
    for pid in pids:
        try:
            total += len(os.listdir(f"/proc/{pid}/task"))
        except OSError:
            continue
    return total


def state_of(pid: int) -> str | None:
    """The kernel's letter for a process (`T`: stopped). None: it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    # The command name may hold anything, parentheses too.
    return stat.rpartition(")")[2].split()[0]


def stopped(pids: Iterable[int]) -> tuple[int, ...]:
    """Those of some processes that stand still: `T` by a signal, `t` by a tracer."""
    return tuple(pid for pid in pids if state_of(pid) in ("T", "t"))


def start_of(pid: int) -> str | None:
    """When a process started, in the kernel's ticks; tells it from a later one of its number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
        return stat.rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def command_of(pid: int) -> str:
    """The command line of a process, shortened; text from outside. Empty: it is gone."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()[:400]
    except OSError:
        return ""
    return data.replace(b"\0", b" ").decode("utf-8", "replace").strip()
