"""Back end with gdb: the last resort, since it stops every thread for some seconds.

gdb cannot make a thread, so the code runs on a borrowed one: a thread that waits in a
system call (`kvtop.attach.borrow`) and, as PyGILState_Check says there, does not hold
the GIL. The other threads run on during the call, so that the GIL and any lock that the
code needs become free.
"""

from __future__ import annotations

import platform
import shutil
import time

from kvtop.attach.ability import NO_PTRACE, Ability, AttachError, Injectee
from kvtop.attach.borrow import calls_of, choose_threads
from kvtop.attach.elf import functions_of
from kvtop.attach.helper import last_line, run_helper
from kvtop.attach.procfs import Proc
from kvtop.errors import ExitCode

DEADLINE_S = 60.0
"""gdb reads the symbols of the executable and stops the threads one by one."""
PATIENCE_S = 3.0
"""How long a thread that may be borrowed is waited for."""

_PYTHON = (
    "Py_IsInitialized",
    "PyGILState_Check",
    "PyGILState_Ensure",
    "PyRun_SimpleString",
    "PyGILState_Release",
)
_LIBC = ("mmap", "munmap")

# Runs in gdb's own Python, with the target stopped. Every thread that may be borrowed is still
# looked at again: it may have moved on before gdb stopped it.
_SCRIPT = """
import gdb, sys
functions = {functions!r}
code = {code!r}
calls = {calls!r}
pid = {pid!r}

def call(name, result, kinds, *values):
    text = "((%s (*)(%s)) %d)(%s)" % (result, kinds, functions[name], ", ".join(map(str, values)))
    return int(gdb.parse_and_eval(text))

def same_call(tid):
    with open("/proc/%d/task/%d/syscall" % (pid, tid)) as file:
        fields = file.read().split()
    return len(fields) > 2 and (fields[0], int(fields[2], 16) & 0xFFFFFFFF) == calls[tid]

def main():
    for thread in gdb.selected_inferior().threads():
        tid = thread.ptid[1]
        if tid not in calls or not same_call(tid):
            continue
        thread.switch()
        if not call("Py_IsInitialized", "int", "void") or call("PyGILState_Check", "int", "void"):
            continue
        size = len(code) + 1
        region = call("mmap", "long", "long, long, int, int, int, long", 0, size, 3, 0x22, -1, 0)
        if region in (0, -1):
            continue
        gdb.selected_inferior().write_memory(region, code + b"\\0")
        state = call("PyGILState_Ensure", "int", "void")
        try:
            call("PyRun_SimpleString", "int", "long", region)
        finally:
            call("PyGILState_Release", "int", "int", state)
        call("munmap", "int", "long, long", region, size)
        return "kvtop: done"
    return "kvtop: no thread"

try:
    print(main())
except Exception as error:
    print("kvtop: failed: %s" % error)
"""


class GdbBackend:
    """See the module."""

    name = "gdb"

    def __init__(self, proc: Proc | None = None) -> None:
        self._proc = proc or Proc()

    def available(self, target: Injectee) -> Ability:
        """Whether gdb is installed, and the target's functions can be found."""
        if shutil.which("gdb") is None:
            return Ability(False, "gdb is not installed")
        if platform.machine() not in {"x86_64", "aarch64"}:
            return Ability(False, f"not known on {platform.machine()}")
        try:
            functions_of(self._proc, target.pid, _PYTHON, _LIBC)
        except AttachError as error:
            return Ability(False, error.what)
        return Ability(True, "")

    def run(self, target: Injectee, code: str) -> None:
        """Runs `code` on a borrowed thread of the target.

        Raises:
            AttachError: It did not run.
        """
        pid = target.pid
        functions = functions_of(self._proc, pid, _PYTHON, _LIBC)
        end = time.monotonic() + PATIENCE_S
        while True:
            calls = calls_of(self._proc, pid)
            fit = {
                tid: (str(call[0]), call[1] & 0xFFFFFFFF)
                for tid in choose_threads(calls)
                if (call := calls[tid]) is not None
            }
            if fit:
                break
            if time.monotonic() > end:
                raise _no_thread(pid)
            time.sleep(0.05)
        script = _SCRIPT.format(functions=functions, code=code.encode(), calls=fit, pid=pid)
        # Symbols of libraries are not read: with PyTorch loaded that alone takes many seconds.
        options = ("auto-solib-add off", "debuginfod enabled off", "confirm off", "pagination off")
        command = ["gdb", "-nx", "-q", "-batch"]
        for option in options:
            command += ["-iex", f"set {option}"]
        command += ["-p", str(pid), "-x", "/dev/stdin"]
        done = run_helper(command, _block(script), DEADLINE_S, "gdb")
        if "kvtop: done" in done.output:
            return
        if "kvtop: no thread" in done.output:
            raise _no_thread(pid)
        denied = "ptrace: Operation not permitted" in done.output
        failed = next(
            (line for line in done.output.splitlines() if line.startswith("kvtop: failed")),
            last_line(done.output),
        )
        raise AttachError(
            f"gdb on process {pid}: {failed}",
            NO_PTRACE if denied else "",
            ExitCode.DENIED if denied else ExitCode.UNREACHABLE,
        )


def _block(script: str) -> str:
    """As gdb commands."""
    return f"python\n{script}\nend\ndetach\n"


def _no_thread(pid: int) -> AttachError:
    return AttachError(
        f"no thread of process {pid} waits at a place where it can safely be borrowed",
        "try again, or install frida: pip install 'vllm-kvtop[attach]'",
    )
