"""What discovery found: servers -> engines -> workers, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FoundProcess:
    """One process of a server."""

    pid: int
    """As seen from here."""
    ns_pid: int
    """As the process sees itself; the same outside containers."""
    uid: int
    """Its user, as seen from here. -1: not readable."""
    start_ticks: int
    """Clock ticks from boot to its start; with the pid it names the process for good."""
    start_time_s: float | None = None
    """The same as Unix time."""
    container: bool = False
    """It lives in another mount or pid namespace."""
    probe_socket: Path | None = None
    """Socket of its probe, as reached from here. None: no probe in it that can be seen."""


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """One engine core and what belongs to it."""

    process: FoundProcess
    """The engine core."""
    rank: int | None
    """Data-parallel rank. None: not told by its title, and there are several."""
    workers: tuple[FoundProcess, ...] = ()
    """Processes that run the model for it; empty: it runs the model itself, or is starting."""
    api_pids: tuple[int, ...] = ()
    """API servers in front of it."""

    @property
    def pid(self) -> int:
        """As seen from here."""
        return self.process.pid

    @property
    def ns_pid(self) -> int:
        """As the process sees itself."""
        return self.process.ns_pid

    @property
    def uid(self) -> int:
        """Its user, as seen from here. -1: not readable."""
        return self.process.uid

    @property
    def start_ticks(self) -> int:
        """Clock ticks from boot to its start."""
        return self.process.start_ticks

    @property
    def start_time_s(self) -> float | None:
        """Unix time of its start."""
        return self.process.start_time_s

    @property
    def probe_socket(self) -> Path | None:
        """Socket of its probe. None: no probe that can be seen."""
        return self.process.probe_socket

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Pids of `workers`."""
        return tuple(worker.pid for worker in self.workers)


@dataclass(frozen=True, slots=True)
class FoundServer:
    """One vLLM server, or an engine without one."""

    key: str
    """`127.0.0.1:8000`, `unix:/path`, or `pid 4740`; unique among the servers found."""
    url: str | None
    """Base address of its HTTP side, root path included. None: none, or not reachable from here."""
    apis: tuple[FoundProcess, ...] = ()
    """API server processes; empty: offline batch, headless, or they are gone."""
    engines: tuple[FoundEngine, ...] = ()
    """Engine cores by rank; empty while it starts."""
    launcher_pid: int | None = None
    """The process that started the others. None: it is gone."""
    uds: Path | None = None
    """Unix socket of its HTTP side, as reached from here. None: it uses TCP."""
    listening: bool = False
    """Its port was seen open; False: starting, or this user cannot see it."""
    model: str | None = None
    """Served model name or path from the command line. None: not there."""
    python: str | None = None
    """Python executable of its environment. None: not readable."""
    container: bool = False
    """It lives in another mount or pid namespace."""
    orphan: bool = False
    """True: its engine has lost the API server that started it."""
    offline: bool = False
    """True: an in-process `LLM(...)`, there is no HTTP side."""
    demo: bool = False
    """True: the simulated engine of `kvtop demo`."""

    @property
    def api_pids(self) -> tuple[int, ...]:
        """Pids of `apis`."""
        return tuple(api.pid for api in self.apis)

    @property
    def api_sockets(self) -> dict[int, Path]:
        """Probe sockets of the API server processes that have one, by pid."""
        return {api.pid: api.probe_socket for api in self.apis if api.probe_socket}

    @property
    def processes(self) -> tuple[FoundProcess, ...]:
        """API servers, engines and workers, each once."""
        every = [*self.apis]
        for engine in self.engines:
            every += [engine.process, *engine.workers]
        return tuple({process.pid: process for process in every}.values())


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of one look at this machine."""

    servers: tuple[FoundServer, ...]
    """Sorted by key."""
    looked_for: tuple[str, ...]
    """What was looked for, one plain phrase each."""
    notes: tuple[str, ...] = ()
    """What could not be read and why, one plain line each."""
    stray_pids: tuple[int, ...] = ()
    """Workers that have lost their engine and still run, holding their memory."""

    def server_of(self, pid: int) -> FoundServer | None:
        """The server that a process belongs to, by the pid seen from here; None: to none."""
        for server in self.servers:
            if pid == server.launcher_pid or any(pid == p.pid for p in server.processes):
                return server
        return None

    def role_of(self, pid: int) -> str | None:
        """`engine`, `worker` or `api`; None: not a process that holds state of a server.

        An engine that serves HTTP in the same process is an `engine`.
        """
        for server in self.servers:
            for engine in server.engines:
                if pid == engine.pid:
                    return "engine"
                if pid in engine.worker_pids:
                    return "worker"
            if pid in server.api_pids:
                return "api"
        return None
