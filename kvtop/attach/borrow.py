"""Which threads of a process may be borrowed for a C call. Pure, but for `calls_of`.

Those in epoll_wait, poll, select, a sleep or accept, and those in a futex wait for a
condition variable or a semaphore: glibc and the dynamic loader hold none of their locks
there. A thread that waits for a mutex is never borrowed: it may be inside malloc.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

from kvtop.attach.procfs import Proc

Call = tuple[int, int]
"""System call number and its second argument."""

# Most harmless first: the first are made by event loops and I/O threads.
_WAITS: Mapping[str, tuple[int, ...]] = {
    # epoll_wait, epoll_pwait, epoll_pwait2, poll, ppoll, select, pselect6, nanosleep,
    # clock_nanosleep, accept, accept4, futex
    "x86_64": (232, 281, 441, 7, 271, 23, 270, 35, 230, 43, 288, 202),
    # epoll_pwait, epoll_pwait2, ppoll, pselect6, nanosleep, clock_nanosleep, accept, accept4, futex
    "aarch64": (22, 441, 73, 72, 101, 115, 202, 242, 98),
}
# FUTEX_WAIT_BITSET with FUTEX_CLOCK_REALTIME, private or not: how glibc since 2.34 waits for
# condition variables and semaphores, and never for a mutex (sysdeps/nptl/futex-internal.c).
_FUTEX_WAITS = frozenset({0x189, 0x109})


def parse_syscall(text: str) -> Call | None:
    """Reads /proc/PID/task/TID/syscall; None: the thread runs, or is in no system call."""
    fields = text.split()
    if len(fields) < 3 or not fields[0].isdigit():
        return None
    try:
        return int(fields[0]), int(fields[2], 16)
    except ValueError:
        return None


def may_borrow(call: Call | None, machine: str | None = None) -> bool:
    """Whether a thread in this system call holds no lock of the C library.

    Args:
        call: What it is in. None: nothing.
        machine: As `platform.machine()` says; other numbers mean other calls there.
    """
    waits = _WAITS.get(machine or platform.machine(), ())
    if call is None or call[0] not in waits:
        return False
    return call[0] != waits[-1] or call[1] & 0xFFFFFFFF in _FUTEX_WAITS


def choose_threads(calls: Mapping[int, Call | None], machine: str | None = None) -> list[int]:
    """Threads that may be borrowed, most harmless first."""
    order = _WAITS.get(machine or platform.machine(), ())
    fit = [
        (order.index(call[0]), tid)
        for tid, call in calls.items()
        if call is not None and may_borrow(call, machine)
    ]
    return [tid for _, tid in sorted(fit)]


def calls_of(proc: Proc, pid: int) -> dict[int, Call | None]:
    """What every thread of a process is in; empty when it is gone."""
    try:
        names = os.listdir(f"{proc.root}/{pid}/task")
    except OSError:
        return {}
    return {
        int(name): parse_syscall(proc.text(f"{pid}/task/{name}/syscall"))
        for name in names
        if name.isdigit()
    }
