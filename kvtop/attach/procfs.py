"""What /proc says of a process: pure parsers, and a reader that never raises.

Format: proc(5). A process can vanish between any two reads; every reader answers
None for that, as for a file that this user may not read.
"""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from kvtop.attach.outside import whole

_KERNEL_THREAD = 0x00200000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_S = os.sysconf("SC_CLK_TCK")
_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of /proc/PID/stat that kvtop uses."""

    pid: int
    """As this process sees it."""
    comm: str
    """First 15 bytes of the name; `setproctitle` changes it."""
    state: str
    """The kernel's letter: R, S, D, T, t, Z, X, I."""
    ppid: int
    """Parent, 1 or a subreaper when the real parent is gone."""
    pgrp: int
    """Process group."""
    kernel: bool
    """True for a kernel thread."""
    threads: int
    """Threads of the process."""
    start_ticks: int
    """Clock ticks from boot to its start: with the pid it names a process for good."""
    rss_bytes: int
    """Resident memory."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The fields of /proc/PID/status that kvtop uses."""

    uid: int
    """Effective user id, in the user namespace of the reader."""
    ns_pids: tuple[int, ...]
    """The pid in each nested pid namespace, the reader's first, its own last."""


@dataclass(frozen=True, slots=True)
class Listener:
    """One listening TCP socket."""

    address: str
    """Numeric address, `0.0.0.0` or `::` for all of them."""
    port: int
    """Port."""
    uid: int
    """Owner."""
    inode: str
    """Joins it with `socket:[inode]` in /proc/PID/fd."""


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """How one process is doing now."""

    state: str
    """The kernel's letter (R, S, D, T, Z)."""
    rss_bytes: int
    """Resident memory."""
    threads: int
    """Threads of the process."""
    start_ticks: int
    """Clock ticks from boot to its start."""


def parse_stat(text: bytes) -> Stat | None:
    """Reads one /proc/PID/stat line; None where it is not one.

    The name in brackets may itself hold brackets, spaces and newlines.
    """
    head, bracket, tail = text.rpartition(b")")
    pid, opened, comm = head.partition(b" (")
    fields = tail.split()
    if not bracket or not opened or len(fields) < 22:
        return None
    try:
        return Stat(
            pid=int(pid),
            comm=comm.decode("utf-8", "replace"),
            state=fields[0].decode("ascii", "replace"),
            ppid=int(fields[1]),
            pgrp=int(fields[2]),
            kernel=bool(int(fields[6]) & _KERNEL_THREAD),
            threads=int(fields[17]),
            start_ticks=int(fields[19]),
            rss_bytes=int(fields[21]) * _PAGE_BYTES,
        )
    except ValueError:
        return None


def parse_status(text: str) -> Identity | None:
    """Reads /proc/PID/status; None where user or pid are missing.

    Kernels before 4.1 have no `NSpid`: the plain pid stands in.
    """
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        if colon and name in {"Uid", "NSpid", "Pid"}:
            found[name] = rest.split()
    try:
        uid = int(found["Uid"][1])
        pids = tuple(int(pid) for pid in found.get("NSpid") or found["Pid"])
    except (KeyError, IndexError, ValueError):
        return None
    return Identity(uid, pids) if pids else None


def parse_cmdline(text: bytes) -> tuple[str, ...]:
    """Splits /proc/PID/cmdline; the zero padding left by `setproctitle` is dropped."""
    stripped = text.rstrip(b"\0 ")
    if not stripped:
        return ()
    return tuple(part.decode("utf-8", "surrogateescape") for part in stripped.split(b"\0"))


def parse_environ(text: bytes) -> dict[str, str]:
    """Splits /proc/PID/environ; `setproctitle` may have overwritten it with zeros."""
    found: dict[str, str] = {}
    for part in text.split(b"\0"):
        name, equals, value = part.partition(b"=")
        if equals and name:
            found[os.fsdecode(name)] = os.fsdecode(value)
    return found


def parse_tcp(text: str) -> list[Listener]:
    """Listening sockets of /proc/PID/net/tcp or tcp6; lines that make no sense are passed over."""
    found: list[Listener] = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] != _LISTEN:
            continue
        raw, _, port = fields[1].partition(":")
        try:
            found.append(Listener(_address(raw), int(port, 16), int(fields[7]), fields[9]))
        except (ValueError, OSError):
            continue
    return found


def _address(raw: str) -> str:
    """Address from the kernel's form: 32-bit words, each in the byte order of the machine."""
    words = [int(raw[at : at + 8], 16) for at in range(0, len(raw), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)


def parse_local_addresses(fib_trie: str) -> list[str]:
    """IPv4 addresses of a network namespace's own interfaces, loopback left out.

    Source: /proc/PID/net/fib_trie, where each own address is a leaf `|-- A.B.C.D`
    followed by `/32 host LOCAL`.
    """
    found: list[str] = []
    leaf = ""
    for line in fib_trie.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == "|--":
            leaf = words[1]
        elif words[:3] == ["/32", "host", "LOCAL"] and leaf and not leaf.startswith("127."):
            if leaf not in found:
                found.append(leaf)
            leaf = ""
    return found


def map_uid(uid_map: str, outside: int) -> int:
    """The user id that a process sees for itself, from its /proc/PID/uid_map.

    Args:
        uid_map: Lines of `inside outside length`.
        outside: The user id in the reader's namespace; given back where no line covers it.
    """
    for line in uid_map.splitlines():
        try:
            inside, start, length = (int(word) for word in line.split())
        except ValueError:
            continue
        if start <= outside < start + length:
            return inside + outside - start
    return outside


class Proc:
    """Reads a /proc tree. Nothing here raises for a process that is gone or not ours.

    Args:
        root: Where the tree is mounted.
    """

    def __init__(self, root: str | Path = "/proc") -> None:
        self.root = str(root)
        self._boot_s: float | None = None

    def pids(self) -> list[int]:
        """Processes that exist now; empty where the tree cannot be listed."""
        try:
            names = os.listdir(self.root)
        except OSError:
            return []
        return [pid for name in names if (pid := whole(name, 10)) is not None]

    def read(self, name: str, limit: int = 1 << 22) -> bytes | None:
        """One file below the root, at most `limit` bytes; None where it cannot be read."""
        try:
            handle = os.open(f"{self.root}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            parts: list[bytes] = []
            while limit > 0 and (part := os.read(handle, min(limit, 1 << 16))):
                parts.append(part)
                limit -= len(part)
            return b"".join(parts)
        except OSError:
            return None
        finally:
            os.close(handle)

    def text(self, name: str) -> str:
        """The same as text; empty where it cannot be read."""
        return (self.read(name) or b"").decode("utf-8", "replace")

    def link(self, name: str) -> str | None:
        """Target of a symbolic link; None where it cannot be read."""
        try:
            return os.readlink(f"{self.root}/{name}")
        except OSError:
            return None

    def stat(self, pid: int) -> Stat | None:
        """See `Stat`; None for a process that is gone."""
        # Read for every process of the machine at each look: one read, no loop.
        try:
            handle = os.open(f"{self.root}/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return parse_stat(os.read(handle, 4096))
        except OSError:
            return None
        finally:
            os.close(handle)

    def identity(self, pid: int) -> Identity | None:
        """See `Identity`; None for a process that is gone."""
        return parse_status(self.text(f"{pid}/status"))

    def cmdline(self, pid: int) -> tuple[str, ...]:
        """Arguments; empty for a kernel thread, a zombie, or a process that is gone."""
        return parse_cmdline(self.read(f"{pid}/cmdline") or b"")

    def environ(self, pid: int) -> dict[str, str]:
        """Environment at its start; empty where it cannot be read."""
        return parse_environ(self.read(f"{pid}/environ") or b"")

    def socket_inodes(self, pid: int) -> set[str] | None:
        """Inodes of its open sockets; None where its descriptors cannot be read."""
        folder = f"{self.root}/{pid}/fd"
        try:
            names = os.listdir(folder)
        except OSError:
            return None
        inodes: set[str] = set()
        for name in names:
            target = self.link(f"{pid}/fd/{name}")
            if target and target.startswith("socket:["):
                inodes.add(target[8:-1])
        return inodes

    def listeners(self, pid: int | str) -> list[Listener]:
        """Listening TCP sockets in the network namespace of `pid`, IPv4 before IPv6."""
        return parse_tcp(self.text(f"{pid}/net/tcp")) + parse_tcp(self.text(f"{pid}/net/tcp6"))

    def start_time_s(self, start_ticks: int) -> float | None:
        """Unix time of a process start; None where the boot time cannot be read."""
        if self._boot_s is None:
            for line in self.text("stat").splitlines():
                if line.startswith("btime "):
                    self._boot_s = float(line.split()[1])
        return None if self._boot_s is None else self._boot_s + start_ticks / _TICKS_S


_PROC = Proc()


def process_facts(pid: int, proc_root: str | Path = "/proc") -> ProcessFacts | None:
    """State letter and memory of a process; None when it is gone.

    Source: /proc/PID/stat fields 3, 20, 22 and 24.
    """
    proc = _PROC if str(proc_root) == "/proc" else Proc(proc_root)
    stat = proc.stat(pid)
    if stat is None:
        return None
    return ProcessFacts(stat.state, stat.rss_bytes, stat.threads, stat.start_ticks)
