"""Which processes a user means by a pid, by `--all`, or by nothing. Pure, but for /proc."""

from __future__ import annotations

from kvtop.attach.elf import images
from kvtop.attach.outside import visible, whole
from kvtop.attach.procfs import Proc
from kvtop.attach.servers import Found, FoundProcess, FoundServer
from kvtop.errors import NotFoundError, UsageError

_MAX_PID_DIGITS = 10

Chosen = tuple[FoundProcess, str]
"""A process and its role."""


def parse_pid(text: str) -> int:
    """A process id from the command line.

    Raises:
        UsageError: It is none.
    """
    pid = whole(text, _MAX_PID_DIGITS)
    if pid is None or not 0 < pid < 1 << 31:
        shown = visible(text, 40)
        raise UsageError(f"{shown!r} is not a process id", "give the number of a vLLM process")
    return pid


def members(server: FoundServer) -> list[Chosen]:
    """Processes of a server that a probe has work in: engines first."""
    chosen: dict[int, Chosen] = {}
    for engine in server.engines:
        chosen.setdefault(engine.pid, (engine.process, "engine"))
    for api in server.apis:
        chosen.setdefault(api.pid, (api, "api"))
    for engine in server.engines:
        for worker in engine.workers:
            chosen.setdefault(worker.pid, (worker, "worker"))
    return list(chosen.values())


def select(found: Found, pid: int | None, *, every: bool, proc: Proc | None = None) -> list[Chosen]:
    """The processes meant.

    Args:
        found: What is on this machine.
        pid: Any process of the server meant. None: the only server there is.
        every: All servers.
        proc: The /proc tree, for a pid that belongs to no server found.

    Raises:
        NotFoundError: There is no such process, or it is not part of a vLLM server.
        UsageError: Several servers could be meant.
    """
    if pid is not None:
        server = found.server_of(pid)
        if server is not None:
            return members(server)
        return [_unlisted(pid, proc or Proc())]
    servers = [server for server in found.servers if members(server)]
    if not servers:
        raise NotFoundError("no vLLM server found: looked for " + ", ".join(found.looked_for))
    if len(servers) > 1 and not every:
        pids = ", ".join(f"{members(server)[0][0].pid} ({server.key})" for server in servers)
        raise UsageError(f"there are {len(servers)} vLLM servers", f"name one: {pids}; or --all")
    return [one for server in servers for one in members(server)]


def _unlisted(pid: int, proc: Proc) -> Chosen:
    """A process that does not look like a server, and has vLLM loaded all the same.

    That is an in-process `LLM(...)` whose engine runs in the process of the script.
    """
    stat, identity = proc.stat(pid), proc.identity(pid)
    if stat is None or identity is None or stat.state in "ZX":
        raise NotFoundError(f"there is no process {pid}")
    if not any("/vllm/" in image.path for image in images(proc, pid)):
        name = visible(stat.comm)
        raise NotFoundError(
            f"process {pid} ({name}) is not part of a vLLM server",
            "`kvtop doctor` lists those that are",
        )
    process = FoundProcess(
        pid=pid,
        ns_pid=identity.ns_pids[-1],
        uid=identity.uid,
        start_ticks=stat.start_ticks,
        start_time_s=proc.start_time_s(stat.start_ticks),
        container=len(identity.ns_pids) > 1,
    )
    return process, "engine"
