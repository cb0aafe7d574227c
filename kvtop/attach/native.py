"""Back end without any dependency: one new thread in the target, by ptrace.

A thread of the target that waits in a system call is borrowed for about a millisecond
to call mmap, mprotect and pthread_create; no other thread is stopped. Python runs only
on the new thread, under PyGILState_Ensure, as on any thread that a C library makes.
`kvtop.attach.borrow` says which threads may be borrowed.
"""

from __future__ import annotations

import os
import platform
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kvtop.attach.ability import Ability, AttachError, Injectee
from kvtop.attach.borrow import calls_of, choose_threads, may_borrow
from kvtop.attach.elf import functions_of, no_trace, open_memory
from kvtop.attach.procfs import Proc
from kvtop.attach.ptrace import Traced, TraceError
from kvtop.attach.stub import C_FUNCTIONS, PYTHON_FUNCTIONS, x86_64

_PAGE = 4096
_READ, _WRITE, _EXEC, _PRIVATE, _ANONYMOUS = 1, 2, 4, 2, 0x20
_MINUS_ONE = 0xFFFFFFFFFFFFFFFF
PATIENCE_S = 3.0
"""How long a thread that may be borrowed is waited for."""


class NativeBackend:
    """See the module."""

    name = "ptrace"

    def __init__(self, proc: Proc | None = None) -> None:
        self._proc = proc or Proc()

    def available(self, target: Injectee) -> Ability:
        """Whether this machine and this process allow it."""
        if platform.machine() != "x86_64":
            return Ability(False, f"built for x86-64 only, this machine is {platform.machine()}")
        try:
            self._functions(target.pid)
        except AttachError as error:
            return Ability(False, error.what)
        return Ability(True, "")

    def _functions(self, pid: int) -> dict[str, int]:
        return functions_of(self._proc, pid, PYTHON_FUNCTIONS, C_FUNCTIONS)

    def run(self, target: Injectee, code: str) -> None:
        """Starts a thread in the target that runs `code`.

        Raises:
            AttachError: It was not started, and the target is as it was.
        """
        pid = target.pid
        functions = self._functions(pid)
        end = time.monotonic() + PATIENCE_S
        while True:
            for tid in choose_threads(calls_of(self._proc, pid)):
                if _borrow(pid, tid, functions, code):
                    return
            if time.monotonic() > end:
                raise AttachError(
                    f"no thread of process {pid} waits at a place where it can safely be borrowed",
                    "try again, or install frida: pip install 'vllm-kvtop[attach]'",
                )
            time.sleep(0.02)


def _borrow(pid: int, tid: int, functions: dict[str, int], code: str) -> bool:
    """Starts the thread from `tid`; False where that is no longer where it was.

    Raises:
        AttachError: The target refused.
    """
    try:
        with _uninterrupted(), Traced(tid) as thread:
            now = thread.registers
            if not may_borrow((_signed(now["orig_rax"]), now["rsi"])):
                return False
            if not thread.call(functions["Py_IsInitialized"]) & 0xFFFFFFFF:
                raise AttachError(f"Python in process {pid} is not up yet", "try again")
            _start(thread, functions, code)
    except ProcessLookupError:
        return False
    except PermissionError as error:
        raise no_trace(pid) from error
    except (TraceError, OSError) as error:
        raise AttachError(f"process {pid} could not be attached: {error}") from error
    return True


def _start(thread: Traced, functions: dict[str, int], code: str) -> None:
    """Maps code and text, and starts a thread on them."""
    text = code.encode() + b"\0"
    length = (_PAGE + len(text) + _PAGE - 1) // _PAGE * _PAGE
    region = thread.call(
        functions["mmap"], 0, length, _READ | _WRITE, _PRIVATE | _ANONYMOUS, _MINUS_ONE, 0
    )
    if region >= _MINUS_ONE - _PAGE:
        raise TraceError("it has no memory for the code")
    try:
        handle = open_memory(thread.tid, write=True)
        try:
            os.pwrite(handle, x86_64(functions, region + _PAGE, region, length), region)
            os.pwrite(handle, text, region + _PAGE)
        finally:
            os.close(handle)
        if thread.call(functions["mprotect"], region, length, _READ | _EXEC) & 0xFFFFFFFF:
            raise TraceError("it may not map executable memory")
        made = thread.call(functions["pthread_create"], thread.scratch, 0, region, region)
        if made & 0xFFFFFFFF:
            raise TraceError(f"it could not make a thread: {os.strerror(made & 0x7FFFFFFF)}")
    except BaseException:
        with suppress(TraceError, OSError):
            thread.call(functions["munmap"], region, length)
        raise


def _signed(value: int) -> int:
    number: int = struct.unpack("<q", struct.pack("<Q", value))[0]
    return number


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Keeps Ctrl-C and SIGTERM waiting: to die here would leave the thread where it must not be."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
