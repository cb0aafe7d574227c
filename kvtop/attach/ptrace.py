"""One thread of another process under ptrace(2), for a moment. Linux, x86-64.

All calls on a `Traced` must come from the thread that made it: the kernel knows the
tracer by thread.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import time
from types import TracebackType

_SEIZE, _INTERRUPT, _CONT, _DETACH = 0x4206, 0x4207, 7, 17
_GETREGSET, _SETREGSET = 0x4204, 0x4205
_GETSIGMASK, _SETSIGMASK = 0x420A, 0x420B
_NT_PRSTATUS, _NT_XSTATE = 1, 0x202
_WALL = 0x40000000
_EVENT_STOP = 128
_XSTATE_BYTES = 1 << 15

REGISTERS = (
    *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx"),
    *("rsi", "rdi", "orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base"),
    *("ds", "es", "fs", "gs"),
)
"""`struct user_regs_struct` of x86-64, in order; 64 bits each."""

_RED_ZONE = 128
_SCRATCH = 64
_FORMAT = f"<{len(REGISTERS)}Q"
# Left open while a call runs: a fault in it must reach the tracer and not be forced on the process.
_SYNCHRONOUS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGTRAP, signal.SIGFPE)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class TraceError(Exception):
    """The thread could not be traced, or did not do what was asked."""


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _ptrace(request: int, tid: int, address: int, data: int) -> None:
    if _libc.ptrace(request, tid, address, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Traced:
    """A thread that is stopped inside `with`, and exactly as it was afterwards.

    Args:
        tid: The thread.
        deadline_s: Longest wait for it to stop, and for each call made on it.

    Raises:
        OSError: Not permitted, or it is gone.
        TraceError: It did not stop in time.
    """

    def __init__(self, tid: int, deadline_s: float = 5.0) -> None:
        self.tid = tid
        self._deadline_s = deadline_s
        self._held_back: list[int] = []
        self._running = True
        self._touched = False
        _ptrace(_SEIZE, tid, 0, 0)
        try:
            _ptrace(_INTERRUPT, tid, 0, 0)
            status = self._wait()
        except BaseException:
            self._let_go()
            raise
        if os.WIFSTOPPED(status) and status >> 16 != _EVENT_STOP:
            self._held_back.append(os.WSTOPSIG(status))
        self._general = self._get(_NT_PRSTATUS, 8 * len(REGISTERS))
        self._extended = self._get(_NT_XSTATE, _XSTATE_BYTES)
        self._mask = ctypes.c_uint64()
        _ptrace(_GETSIGMASK, tid, 8, ctypes.addressof(self._mask))

    def __enter__(self) -> Traced:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._running:
                _ptrace(_INTERRUPT, self.tid, 0, 0)
                self._wait()
            if self._touched:
                self._set(_NT_PRSTATUS, self._general)
                self._set(_NT_XSTATE, self._extended)
                _ptrace(_SETSIGMASK, self.tid, 8, ctypes.addressof(self._mask))
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Detaches; a signal that arrived meanwhile is delivered as it would have been."""
        first = self._held_back.pop(0) if self._held_back else 0
        try:
            _ptrace(_DETACH, self.tid, 0, first)
            for number in self._held_back:
                os.kill(self.tid, number)
        except OSError as error:
            if error.errno != errno.ESRCH:
                raise

    def _wait(self) -> int:
        """Status of the next stop.

        Raises:
            TraceError: None within the deadline, or the thread has ended.
        """
        end = time.monotonic() + self._deadline_s
        pause = 0.0001
        while True:
            pid, status = os.waitpid(self.tid, os.WNOHANG | _WALL)
            if pid == self.tid:
                self._running = False
                if os.WIFSTOPPED(status):
                    return status
                raise TraceError("the thread has ended")
            if time.monotonic() > end:
                raise TraceError(f"the thread did not stop within {self._deadline_s:g} s")
            time.sleep(pause)
            pause = min(pause * 2, 0.01)

    def _get(self, kind: int, size: int) -> bytes:
        buffer = ctypes.create_string_buffer(size)
        vector = _Iovec(ctypes.addressof(buffer), size)
        _ptrace(_GETREGSET, self.tid, kind, ctypes.addressof(vector))
        return buffer.raw[: vector.length]

    def _set(self, kind: int, data: bytes) -> None:
        buffer = ctypes.create_string_buffer(data, len(data))
        vector = _Iovec(ctypes.addressof(buffer), len(data))
        _ptrace(_SETREGSET, self.tid, kind, ctypes.addressof(vector))

    @property
    def registers(self) -> dict[str, int]:
        """General registers as they were when the thread stopped."""
        return dict(zip(REGISTERS, struct.unpack(_FORMAT, self._general), strict=True))

    @property
    def scratch(self) -> int:
        """Address of 64 bytes on the thread's stack that calls may write to."""
        return (self.registers["rsp"] - _RED_ZONE - _SCRATCH) // 16 * 16

    def call(self, function: int, *arguments: int) -> int:
        """Calls a C function on the thread and gives its result, unsigned 64 bits.

        The stack below the red zone is used. The return address is 0: returning there
        stops the thread with SIGSEGV, which the tracer sees and the process does not.

        Raises:
            TraceError: It did not return in time, or it crashed; the thread is then put
                back to where it was.
        """
        values = self.registers
        top = self.scratch - _SCRATCH - 8
        handle = os.open(f"/proc/{self.tid}/mem", os.O_RDWR | os.O_CLOEXEC)
        try:
            os.pwrite(handle, struct.pack("<Q", 0), top)
        finally:
            os.close(handle)
        for name, value in zip(("rdi", "rsi", "rdx", "rcx", "r8", "r9"), arguments, strict=False):
            values[name] = value & 0xFFFFFFFFFFFFFFFF
        # orig_rax -1: the kernel must not restart the interrupted system call at our address.
        values |= {"rip": function, "rsp": top, "rax": 0, "orig_rax": 0xFFFFFFFFFFFFFFFF}
        self._touched = True
        every = ctypes.c_uint64(0xFFFFFFFFFFFFFFFF & ~sum(1 << (s - 1) for s in _SYNCHRONOUS))
        _ptrace(_SETSIGMASK, self.tid, 8, ctypes.addressof(every))
        self._set(_NT_PRSTATUS, struct.pack(_FORMAT, *(values[name] for name in REGISTERS)))
        while True:
            self._running = True
            _ptrace(_CONT, self.tid, 0, 0)
            status = self._wait()
            stopped_by = os.WSTOPSIG(status)
            if status >> 16 == _EVENT_STOP:
                continue
            now = struct.unpack(_FORMAT, self._get(_NT_PRSTATUS, 8 * len(REGISTERS)))
            after = dict(zip(REGISTERS, now, strict=True))
            if stopped_by == signal.SIGSEGV and after["rip"] == 0:
                return int(after["rax"])
            if stopped_by in _SYNCHRONOUS:
                raise TraceError(f"the call stopped with signal {stopped_by}")
            self._held_back.append(stopped_by)
