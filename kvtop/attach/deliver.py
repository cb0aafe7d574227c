"""Runs code in a process by the first way that works, and waits for what it is to do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from kvtop.attach.ability import Ability, AttachError, Backend, Injectee, Waiting
from kvtop.attach.elf import no_trace, open_memory, python_version
from kvtop.attach.procfs import Proc
from kvtop.attach.servers import FoundProcess
from kvtop.errors import ExitCode

DEADLINE_S = 30.0
"""From the code's start in the target until what it is to do must be done."""
WAKE_S = 3.0
"""How long a main thread is waited for where another way can still be tried."""
_LOOK_S = 0.05

Effect = TypeVar("Effect")


def _no_effect(pid: int, *, begun: bool) -> AttachError:
    """The failure where the code was started, and nothing was seen of it within the deadline."""
    if begun:
        return AttachError(
            f"process {pid} was given the code and has done nothing in {DEADLINE_S:g} s",
            "it may be stuck, or too busy to answer; try again",
        )
    return AttachError(
        f"the main thread of process {pid} has run no Python in {DEADLINE_S:g} s",
        "an engine without work takes the code at its next request: send it one",
    )


class Delivery(Generic[Effect]):
    """One piece of code for one process.

    Args:
        process: The process.
        code: What it is to run; see `Backend.run`.
        effect: Looks whether it has done what it is to do; None: not yet.
        failed: Looks whether it has left word that it failed; None: it has not.
    """

    def __init__(
        self,
        process: FoundProcess,
        code: str,
        effect: Callable[[], Effect | None],
        failed: Callable[[], AttachError | None],
    ) -> None:
        self._process = process
        self._code = code
        self._effect = effect
        self._failed = failed

    def run(self, among: Sequence[Backend]) -> tuple[Effect, str]:
        """Tries one way after the other. Blocking, seconds.

        Returns:
            What the code has done, and the name of the way.

        Raises:
            AttachError: It was not done.
        """
        target = ready(self._process)
        usable = able(target, among)
        failure: AttachError | None = None
        for at, backend in enumerate(usable):
            self._failed()  # What an earlier try has left says nothing of this one.
            try:
                waiting = backend.run(target, self._code)
            except AttachError as error:
                failure = error
                continue
            last = at + 1 == len(usable)
            effect = self._await(waiting, last=last)
            if effect is not None:
                return effect, backend.name
        assert failure is not None  # noqa: S101 - the last way gives an effect or raises
        raise failure

    def _await(self, waiting: Waiting | None, *, last: bool) -> Effect | None:
        """What the code has done; None: it has not begun, and the next way is to be tried.

        Raises:
            AttachError: It failed, or took too long.
        """
        pid = self._process.pid
        start = time.monotonic()
        while (spent := time.monotonic() - start) < DEADLINE_S:
            effect = self._effect()
            if effect is not None:
                return effect
            failed = self._failed()
            if failed is not None:
                raise failed
            now = Proc().stat(pid)
            if now is None or now.state in "ZX":
                raise AttachError(f"process {pid} has ended", code=ExitCode.NOT_FOUND)
            if waiting is not None and not last and spent > WAKE_S and not waiting.begun():
                waiting.withdraw()
                return None
            time.sleep(_LOOK_S)
        begun = waiting is None or waiting.begun()
        if waiting is not None and not begun:
            waiting.withdraw()
        raise _no_effect(pid, begun=begun)


def injectee(process: FoundProcess, proc: Proc | None = None) -> Injectee:
    """What the back ends need to know of a process."""
    proc = proc or Proc()
    return Injectee(
        pid=process.pid,
        start_ticks=process.start_ticks,
        uid=process.uid,
        python=python_version(proc, process.pid),
        executable=proc.link(f"{process.pid}/exe"),
        container=process.container,
    )


def abilities(target: Injectee, among: Sequence[Backend]) -> list[tuple[Backend, Ability]]:
    """Which back ends can reach a process, and why the others cannot."""
    return [(backend, backend.available(target)) for backend in among]


def ready(process: FoundProcess) -> Injectee:
    """The target, if it is still that process and can run code at all.

    Raises:
        AttachError: It cannot.
    """
    now = Proc().stat(process.pid)
    if now is None or now.start_ticks != process.start_ticks or now.state in "ZX":
        raise AttachError(f"process {process.pid} is gone", code=ExitCode.NOT_FOUND)
    if now.state in "Tt":
        raise AttachError(
            f"process {process.pid} is stopped and can run no code",
            f"kill -CONT {process.pid} lets it go on; a debugger may hold it",
        )
    may_look(process)
    return injectee(process)


def may_look(process: FoundProcess) -> None:
    """Whether this user may look into a process at all.

    Every way in needs what the kernel asks of a debugger (ptrace(2), "Ptrace access mode
    checking"): the same user, no more rights than ours, and Yama's consent, or SYS_PTRACE.

    Raises:
        AttachError: No.
    """
    if process.uid not in {-1, os.geteuid()} and os.geteuid() != 0:
        raise AttachError(
            f"process {process.pid} belongs to user {process.uid}",
            "run kvtop as that user or as root",
            ExitCode.DENIED,
        )
    try:
        os.close(open_memory(process.pid))
    except PermissionError as error:
        raise no_trace(process.pid) from error
    except OSError:
        return  # It has just ended; whoever works on it will find that.


def able(target: Injectee, among: Sequence[Backend]) -> list[Backend]:
    """The back ends that can reach the target, in order; never empty.

    Raises:
        AttachError: None can; says why for each.
    """
    found = abilities(target, among)
    usable = [backend for backend, ability in found if ability.ok]
    if not usable:
        reasons = ", ".join(f"{backend.name}: {ability.reason}" for backend, ability in found)
        raise AttachError(
            f"process {target.pid} cannot be reached ({reasons})", code=ExitCode.DENIED
        )
    return usable
