"""What a pid that NVML reports is, as far as this machine's /proc tells."""

from __future__ import annotations

import os
from pathlib import Path

from kvtop.sources.base import one_line

MAX_COMMAND = 120
"""Characters of a command line that are kept."""
_INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""Inode of the host's pid namespace: PROC_PID_INIT_INO in the kernel's proc_ns.h."""


def in_host_pids(proc: Path = Path("/proc")) -> bool:
    """Whether this process counts pids as the host does, and so as NVML does."""
    try:
        return (proc / "self/ns/pid").stat().st_ino == _INITIAL_PID_NAMESPACE
    except OSError:
        return False


def command(pid: int, *, host_pids: bool, proc: Path = Path("/proc")) -> str | None:
    """Command line of a process that uses a GPU, shortened.

    In a container NVML may report the pid of another namespace, where the same number here
    is another process: then it is named only if it has the NVIDIA device open.

    Args:
        pid: As NVML reports it.
        host_pids: From `in_host_pids`.
        proc: Where procfs is.

    Returns:
        None: not visible, or not certain to be that process.
    """
    base = proc / str(pid)
    try:
        raw = (base / "cmdline").read_bytes()[: MAX_COMMAND * 8]
        if not raw.strip(b"\0"):
            raw = (base / "comm").read_bytes()
    except OSError:
        return None
    if not host_pids and not _has_gpu_open(base):
        return None
    text = one_line(raw.replace(b"\0", b" ").decode("utf-8", "replace"), MAX_COMMAND)
    return text or None


def _has_gpu_open(base: Path) -> bool:
    try:
        for entry in os.scandir(base / "fd"):
            try:
                if os.readlink(entry.path).startswith("/dev/nvidia"):
                    return True
            except OSError:
                continue
    except OSError:
        pass
    return False


def system_memory(proc: Path = Path("/proc")) -> tuple[int, int] | None:
    """Total and available memory of this machine in bytes. None: not readable."""
    values: dict[str, int] = {}
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            key, _, rest = line.partition(":")
            if key in ("MemTotal", "MemAvailable"):
                values[key] = int(rest.split()[0]) * 1024
        return values["MemTotal"], values["MemAvailable"]
    except (OSError, ValueError, IndexError, KeyError):
        return None
