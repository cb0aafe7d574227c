"""Every vLLM server on this machine: processes, listening ports, probe sockets.

One look at /proc, a few milliseconds on a normal box. A process is named by pid and
start time, so that a recycled pid is never taken for the process that had it before.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

from kvtop.attach.group import Draft, Node, group
from kvtop.attach.paths import SocketFile, kvtop_dir_of, list_sockets, probe_folders
from kvtop.attach.procfs import Proc, ProcessFacts, Stat, process_facts
from kvtop.attach.servers import Found, FoundEngine, FoundProcess, FoundServer
from kvtop.attach.titles import Role, ServerArgs, Title, classify, server_args
from kvtop.attach.where import Address, address_of

__all__ = [
    "Finder",
    "Found",
    "FoundEngine",
    "FoundProcess",
    "FoundServer",
    "ProcessFacts",
    "find_servers",
    "process_facts",
]

LOOKED_FOR = (
    "processes of `vllm serve` and of the vllm.entrypoints API servers",
    "process titles VLLM::EngineCore, VLLM::Worker and VLLM::APIServer",
    "listening ports of the API servers",
    "probe sockets in $KVTOP_DIR and in /tmp/kvtop-<uid>, in containers too",
)
"""What is looked for, for the screen that has found nothing."""

_Key = tuple[int, int, str]


@dataclass(slots=True)
class _Known:
    """What was read of one process; holds as long as pid, start time and name do."""

    argv: tuple[str, ...]
    title: Title | None
    args: ServerArgs
    process: FoundProcess | None = None
    python: str | None = None
    foreign_mnt: bool = False
    foreign_net: bool = False
    kvtop_dir: str | None = None
    address: Address | None = None


class Finder:
    """Looks again and again, and remembers what cannot change. Safe between threads.

    Args:
        proc_root: Where /proc is mounted.
        socket_dir: Only servers with a probe in this directory. None: all servers, with
            the probes in `$KVTOP_DIR` and in the usual directories.
        tmp_dir: Parent of the usual directories.
    """

    def __init__(
        self,
        proc_root: str | Path = "/proc",
        socket_dir: str | Path | None = None,
        tmp_dir: str | Path = "/tmp",  # noqa: S108 - owners are checked by `list_sockets`
    ) -> None:
        self._proc = Proc(proc_root)
        self._only = Path(socket_dir) if socket_dir else None
        self._tmp = Path(tmp_dir)
        self._known: dict[_Key, _Known] = {}
        self._lock = threading.Lock()

    def find(self) -> Found:
        """One look. Never raises: what could not be read is told in `notes`."""
        with self._lock:
            return self._find()

    def _find(self) -> Found:
        notes: list[str] = []
        stats, known = self._processes(notes)
        if not stats:
            return Found((), LOOKED_FOR, (f"{self._proc.root} cannot be listed",))
        mounts, nets = self._proc.link("self/ns/mnt"), self._proc.link("self/ns/net")
        shared = self._shared_sockets()
        nodes: dict[int, Node] = {}
        for pid, entry in known.items():
            try:
                node = self._node(stats[pid], entry, mounts, nets, shared)
            except Exception as error:
                notes.append(_passed_over(pid, error))
                continue
            if node is not None:
                nodes[pid] = node
        grouping = group(nodes, {pid: stat.ppid for pid, stat in stats.items()})
        servers: list[FoundServer] = []
        closed: set[int] = set()
        taken: set[str] = set()
        for draft in grouping.drafts:
            pid = draft.root.process.pid
            try:
                address = self._address(draft, known)
                server = draft.server(address, taken, known[pid].python)
            except Exception as error:
                notes.append(_passed_over(pid, error))
                continue
            closed |= set(address.unreadable)
            if address.note:
                notes.append(address.note)
            taken.add(server.key)
            servers.append(server)
        if closed:
            pids = ", ".join(str(pid) for pid in sorted(closed))
            notes.append(
                f"open files of pid {pids} cannot be read by this user, its address is taken from "
                "its command line; run kvtop as the user of the server or as root"
            )
        if grouping.stray_pids:
            pids = ", ".join(str(pid) for pid in grouping.stray_pids)
            notes.append(f"worker pid {pids} has lost its engine and still runs")
        if self._only:
            servers = [s for s in servers if any(p.probe_socket for p in s.processes)]
        servers.sort(key=lambda server: server.key)
        return Found(tuple(servers), LOOKED_FOR, tuple(notes), grouping.stray_pids)

    def _processes(self, notes: list[str]) -> tuple[dict[int, Stat], dict[int, _Known]]:
        """Living processes, and what they say they are; adds to `notes` what cannot be read."""
        proc = self._proc
        stats: dict[int, Stat] = {}
        known: dict[int, _Known] = {}
        kept: dict[_Key, _Known] = {}
        for pid in proc.pids():
            stat = proc.stat(pid)
            if stat is None or stat.kernel or stat.state in "ZX":
                continue
            key = (pid, stat.start_ticks, stat.comm)
            entry = self._known.get(key)
            # An exec of Python by Python changes the arguments and not the name.
            if entry is None or (entry.title and entry.title.role in {Role.PYTHON, Role.SPAWNED}):
                argv = proc.cmdline(pid)
                if entry is None or argv != entry.argv:
                    try:
                        title = classify(argv)
                        args = ServerArgs() if title is None else server_args(argv)
                        entry = _Known(argv, title, args)
                    except Exception as error:
                        notes.append(_passed_over(pid, error))
                        entry = _Known(argv, None, ServerArgs())
            stats[pid] = stat
            kept[key] = known[pid] = entry
        self._known = kept
        return stats, known

    def _node(
        self,
        stat: Stat,
        entry: _Known,
        mounts: str | None,
        nets: str | None,
        shared: dict[int, list[SocketFile]],
    ) -> Node | None:
        """One process as it stands now; None: it cannot be part of a server."""
        if entry.title is None or entry.title.role is Role.HELPER:
            return None
        if entry.process is None:
            self._describe(stat, entry, mounts, nets)
        if entry.process is None:
            return None
        sockets = self._sockets(entry, entry.process, shared)
        return Node(
            entry.process, stat.ppid, stat.pgrp, entry.title, entry.argv, entry.args, sockets
        )

    def _describe(self, stat: Stat, entry: _Known, mounts: str | None, nets: str | None) -> None:
        """Reads once what stays as it is for the life of a process."""
        proc, pid = self._proc, stat.pid
        identity = proc.identity(pid)
        if identity is None:
            return
        mnt, net = proc.link(f"{pid}/ns/mnt"), proc.link(f"{pid}/ns/net")
        entry.foreign_mnt = None not in (mnt, mounts) and mnt != mounts
        entry.foreign_net = None not in (net, nets) and net != nets
        entry.kvtop_dir = kvtop_dir_of(proc, pid)
        first = entry.argv[0] if entry.argv else ""
        entry.python = first if first.startswith("/") else proc.link(f"{pid}/exe")
        entry.process = FoundProcess(
            pid=pid,
            ns_pid=identity.ns_pids[-1],
            uid=identity.uid,
            start_ticks=stat.start_ticks,
            start_time_s=proc.start_time_s(stat.start_ticks),
            container=entry.foreign_mnt or len(identity.ns_pids) > 1,
        )

    def _shared_sockets(self) -> dict[int, list[SocketFile]]:
        """Probe sockets in the directories of our own mount namespace, by pid."""
        folders = [self._only] if self._only else self._usual_folders()
        found: dict[int, list[SocketFile]] = {}
        for folder in folders:
            for file in list_sockets(folder):
                found.setdefault(file.ns_pid, []).append(file)
        return found

    def _usual_folders(self) -> list[Path]:
        own = os.environ.get("KVTOP_DIR")
        try:
            names = sorted(os.listdir(self._tmp))
        except OSError:
            names = []
        return ([Path(own)] if own else []) + [
            self._tmp / name for name in names if name.startswith("kvtop-")
        ]

    def _sockets(
        self, entry: _Known, process: FoundProcess, shared: dict[int, list[SocketFile]]
    ) -> dict[str, Path]:
        """Probe sockets of one process by role; only its own user or root can have bound them."""
        files: list[SocketFile] = []
        folders: list[Path] = []
        if entry.foreign_mnt and not self._only:
            folders = probe_folders(
                self._proc, process.pid, process.uid, entry.kvtop_dir, foreign=True
            )
        else:
            files += shared.get(process.ns_pid, [])
            if entry.kvtop_dir and not self._only:
                folders = [Path(entry.kvtop_dir)]
        for folder in folders:
            files += [file for file in list_sockets(folder) if file.ns_pid == process.ns_pid]
        found: dict[str, Path] = {}
        for file in files:
            if file.uid in {process.uid, 0}:
                found.setdefault(file.role, file.path)
        return found

    def _address(self, draft: Draft, known: dict[int, _Known]) -> Address:
        """Address of a server, kept once its port has been seen open."""
        if not draft.fronts or draft.offline:
            return Address()
        entry = known[draft.root.process.pid]
        if entry.address is not None:
            return entry.address
        pids = [front.process.pid for front in draft.fronts]
        address = address_of(self._proc, pids, draft.args, foreign_net=entry.foreign_net)
        if address.listening:
            entry.address = address
        return address


def _passed_over(pid: int, error: Exception) -> str:
    """The note for a process that breaks the look at it: the others are shown all the same."""
    return f"process {pid} cannot be made out and is passed over ({type(error).__name__})"


_finders: dict[tuple[str, str], Finder] = {}


def find_servers(proc_root: str | Path = "/proc", socket_dir: str | Path | None = None) -> Found:
    """Every vLLM server on this machine, as far as this user can see.

    Blocking, a few milliseconds; call it in a thread. Never raises.

    Args:
        proc_root: Where /proc is mounted.
        socket_dir: Only servers with a probe in this directory. None: all servers, with
            the probes in `$KVTOP_DIR` and in the usual directories.
    """
    key = (str(proc_root), str(socket_dir or ""))
    finder = _finders.setdefault(key, Finder(proc_root, socket_dir))
    return finder.find()
