"""The machine code that a new thread of the target starts with. Pure."""

from __future__ import annotations

import struct
from collections.abc import Mapping

PYTHON_FUNCTIONS = (
    "Py_IsInitialized",
    "PyGILState_Ensure",
    "PyRun_SimpleString",
    "PyGILState_Release",
)
"""Exported by every CPython."""
C_FUNCTIONS = ("mmap", "munmap", "mprotect", "pthread_create", "pthread_detach", "pthread_self")
"""Exported by glibc; before 2.34 the last three are in libpthread."""


def x86_64(functions: Mapping[str, int], code: int, region: int, length: int) -> bytes:
    """Code of `void *start(void *)` for the System V ABI of x86-64.

    It is, in C:

        pthread_detach(pthread_self());
        PyGILState_STATE state = PyGILState_Ensure();
        PyRun_SimpleString(code);
        PyGILState_Release(state);
        return munmap(region, length);   // as a jump: this code is in that region

    Args:
        functions: Address of each function.
        code: Address of the zero-terminated source text.
        region: Address of the mapping that holds this code and the text.
        length: Its length in bytes.
    """

    def call(name: str) -> bytes:
        return b"\x48\xb8" + struct.pack("<Q", functions[name]) + b"\xff\xd0"

    return b"".join(
        (
            b"\x53",  # push rbx
            call("pthread_self"),
            b"\x48\x89\xc7",  # mov rdi, rax
            call("pthread_detach"),
            call("PyGILState_Ensure"),
            b"\x89\xc3",  # mov ebx, eax
            b"\x48\xbf" + struct.pack("<Q", code),  # mov rdi, code
            call("PyRun_SimpleString"),
            b"\x89\xdf",  # mov edi, ebx
            call("PyGILState_Release"),
            b"\x5b",  # pop rbx
            b"\x48\xbf" + struct.pack("<Q", region),  # mov rdi, region
            b"\x48\xbe" + struct.pack("<Q", length),  # mov rsi, length
            b"\x48\xb8" + struct.pack("<Q", functions["munmap"]),  # mov rax, munmap
            b"\xff\xe0",  # jmp rax
        )
    )
