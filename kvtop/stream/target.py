"""Where to look: the machine, one server of it, or the demo."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from kvtop.attach.find import Finder
from kvtop.attach.procfs import ProcessFacts, process_facts
from kvtop.attach.servers import Found, FoundServer
from kvtop.config import Options
from kvtop.errors import NotFoundError
from kvtop.model.snapshot import Gpu
from kvtop.sources.base import Source
from kvtop.sources.metrics import normalize_url
from kvtop.stream.threads import Worker

DISCOVERY_PERIOD_S = 2.0
"""How often the process table is read."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where to look."""

    socket_dir: Path | None = None
    """Only probes in this directory. None: the usual places."""
    url: str | None = None
    """Address of the only server. None: as the options say."""
    pid: int | None = None
    """Process of the only server. None: as the options say."""
    gpu_source: Source[tuple[Gpu, ...]] | None = None
    """Where GPU figures come from. None: NVML."""
    demo: bool = False
    """True: everything is simulated."""


def narrow(found: Found, url: str | None, pid: int | None) -> Found:
    """Only the server at `url`, or the one that process `pid` belongs to.

    A server that answers at `url` and has no process here is kept as a server
    without engines: its /metrics can be read all the same.
    """
    servers = found.servers
    if pid is not None:
        server = found.server_of(pid)
        servers = (server,) if server is not None else ()
    if url is not None:
        wanted = urlsplit(normalize_url(url))
        near = tuple(s for s in servers if s.url and _same_place(s.url, wanted))
        if near:
            servers = tuple(replace(server, url=url) for server in near)
        elif pid is not None and len(servers) == 1:
            servers = (replace(servers[0], url=url),)
        else:
            servers = (FoundServer(key=wanted.netloc, url=url, apis=(), engines=()),)
    return replace(found, servers=servers)


def _same_place(url: str, wanted: SplitResult) -> bool:
    local = {"127.0.0.1", "localhost", "0.0.0.0", "::1", "::"}  # noqa: S104 - compared, not bound
    try:
        there = urlsplit(url)
        same_port = there.port == wanted.port
    except ValueError:
        return False  # A command line of somebody else's that is no address.
    return same_port and (
        there.hostname == wanted.hostname or {there.hostname, wanted.hostname} <= local
    )


def check_target(options: Options) -> None:
    """Refuse what can never be watched, before the screen is taken.

    Raises:
        UsageError: The address is not one.
        NotFoundError: There is no such process.
    """
    if options.url is not None:
        normalize_url(options.url)
    if options.pid is not None and process_facts(options.pid) is None:
        raise NotFoundError(f"no process {options.pid}", "see `kvtop once` for what there is")


def folder_notes(folder: str | None) -> tuple[str, ...]:
    """Why probes do not use the directory that `KVTOP_DIR` names; empty when they can."""
    if not folder:
        return ()
    try:
        info = os.lstat(folder)
    except FileNotFoundError:
        return ()  # The first probe makes it.
    except (OSError, ValueError) as error:
        return (f"KVTOP_DIR {folder} cannot be read: {error}",)
    if not stat.S_ISDIR(info.st_mode):
        return (f"KVTOP_DIR {folder} is not a directory: no probe puts its socket there",)
    if info.st_mode & 0o077:
        return (f"KVTOP_DIR {folder} can be entered by others, so probes refuse it: chmod 700 it",)
    return ()


class Discovery:
    """Looks for the servers that were asked for, again and again.

    Args:
        options: What the user asked for.
        target: Where to look.
    """

    def __init__(self, options: Options, target: Target) -> None:
        self._finder = Finder(socket_dir=target.socket_dir)
        self._url = target.url or options.url
        self._pid = target.pid or options.pid
        self._demo = target.demo

    def look(self) -> Found:
        """Look once, now. Blocking; reads /proc only."""
        found = self._finder.find()
        found = replace(found, notes=(*found.notes, *folder_notes(os.environ.get("KVTOP_DIR"))))
        if self._url is None and self._pid is None and not os.environ.get("KVTOP_DIR"):
            # Somebody's demo is not a server of this machine unless it is asked for.
            kept = tuple(server for server in found.servers if server.demo == self._demo)
            return replace(found, servers=kept)
        return narrow(found, self._url, self._pid)


def facts_of(found: Found | None) -> Mapping[int, ProcessFacts]:
    """The kernel's view of each process of the servers that is still there."""
    facts = {}
    for server in found.servers if found else ():
        for process in server.processes:
            fact = process_facts(process.pid)
            if fact is None or fact.state in "ZX":
                continue
            if fact.start_ticks == process.start_ticks:
                facts[process.pid] = fact
    return facts


class DiscoverySource:
    """`Discovery` as a source, on a thread of its own."""

    name = "discovery"
    kind = "discovery"
    period_s = DISCOVERY_PERIOD_S
    deadline_s = 5.0
    target_pid: int | None = None

    def __init__(self, discovery: Discovery) -> None:
        self._discovery = discovery
        self._worker = Worker("kvtop discovery")

    async def read(self) -> Found:
        """Everything that looks like a vLLM server now; maybe nothing."""
        return await self._worker.call(self._discovery.look)

    async def close(self) -> None:
        """Let the thread end."""
        self._worker.close()
