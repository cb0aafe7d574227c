"""From the latest reading of each source to one `Snapshot`: a pure function.

Who knows what: discovery knows processes and how they belong together, the probe
knows blocks and requests, /metrics knows rates and what the HTTP side calls things,
NVML knows memory. Where two know the same fact the probe wins, since it looks at
the engine itself; a fact that nobody knows is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvtop import __version__
from kvtop.attach.procfs import ProcessFacts
from kvtop.attach.servers import Found, FoundEngine, FoundServer
from kvtop.model.snapshot import (
    Engine,
    EngineMetrics,
    Gpu,
    Request,
    Snapshot,
    SourceState,
    SourceStatus,
    Stacks,
)
from kvtop.sources.base import Reading
from kvtop.sources.metrics import MetricsPage

_NOT_READ = "the probe has not answered yet"


@dataclass(frozen=True, slots=True)
class Readings:
    """The latest of everything. Nothing in it is changed by merging."""

    time_s: float
    """Wall clock of the snapshot."""
    mono_s: float
    """Monotonic clock of the snapshot."""
    host: str
    """Host name."""
    found: Found | None = None
    """Newest discovery. None: none yet."""
    discovery: SourceStatus | None = None
    """How discovery is doing."""
    engines: Mapping[int, Reading[Engine]] = field(default_factory=dict)
    """Probe readings by engine core pid."""
    clients: Mapping[int, Reading[frozenset[str]]] = field(default_factory=dict)
    """Requests with a client, by API server pid."""
    metrics: Mapping[str, Reading[MetricsPage]] = field(default_factory=dict)
    """Pages by server key."""
    gpus: Reading[tuple[Gpu, ...]] | None = None
    """NVML. None: not asked."""
    stacks: Reading[tuple[Stacks, ...]] | None = None
    """py-spy. None: not asked."""
    processes: Mapping[int, ProcessFacts] = field(default_factory=dict)
    """Kernel's view of the servers' processes, by pid; a pid without facts is gone."""
    lost: tuple[tuple[FoundServer, FoundEngine], ...] = ()
    """Engines that were seen and are gone."""
    left: Mapping[int, str] = field(default_factory=dict)
    """Files that probes have left as their engines died, by engine pid."""
    gone_since_s: Mapping[tuple[int, str], float] = field(default_factory=dict)
    """Monotonic time at which a request's client was first missed, by engine pid and id."""
    demo: bool = False
    """True: simulated."""


def merge(readings: Readings) -> Snapshot:
    """One snapshot from the latest readings."""
    engines = []
    lost_servers = {server.key for server, _ in readings.lost}
    for server in readings.found.servers if readings.found else ():
        page = readings.metrics.get(server.key)
        if server.engines:
            engines += [_engine(readings, server, found, page) for found in server.engines]
        elif server.key not in lost_servers:
            engines += _engines_without_process(server, page)
    engines += [_lost_engine(readings, server, found) for server, found in readings.lost]
    return Snapshot(
        time_s=readings.time_s,
        mono_s=readings.mono_s,
        host=readings.host,
        version=__version__,
        sources=_sources(readings),
        gpus=_gpus(readings, engines),
        engines=tuple(engines),
        stacks=(readings.stacks.value or ()) if readings.stacks else (),
        demo=readings.demo or any(engine.simulated for engine in engines),
    )


def _sources(readings: Readings) -> tuple[SourceStatus, ...]:
    every = []
    if readings.discovery is not None:
        every.append(_discovery(readings.discovery, readings.found))
    for group in (readings.engines, readings.metrics, readings.clients):
        every += [reading.status for reading in group.values()]
    for single in (readings.gpus, readings.stacks):
        if single is not None:
            every.append(single.status)
    return tuple(every)


def _discovery(status: SourceStatus, found: Found | None) -> SourceStatus:
    """The discovery status with what the last look has to say."""
    if found is None or status.state is SourceState.FAILED:
        return status
    if not found.servers:
        looked_for = "; ".join(found.looked_for)
        return replace(status, reason=f"no vLLM server found; looked for {looked_for}")
    return replace(status, reason="; ".join(found.notes))


def _metrics_of(
    page: Reading[MetricsPage] | None, rank: int | None, engines: int
) -> EngineMetrics | None:
    """The metrics of one engine; with a single engine its label does not matter."""
    if page is None or page.value is None or page.status.state is SourceState.FAILED:
        return None
    by_rank = page.value.engines
    if rank is not None and rank in by_rank:
        return by_rank[rank]
    if engines == 1 and len(by_rank) == 1:
        return next(iter(by_rank.values()))
    return None


def _engine(
    readings: Readings, server: FoundServer, found: FoundEngine, page: Reading[MetricsPage] | None
) -> Engine:
    reading = readings.engines.get(found.pid)
    base = reading.value if reading and reading.value else Engine(None, found.pid, server.key)
    rank = base.engine if base.engine is not None else found.rank
    metrics = _metrics_of(page, rank, len(server.engines))
    value = page.value if page else None
    facts = readings.processes.get(found.pid)
    return replace(
        base,
        engine=rank if rank is not None else (0 if len(server.engines) == 1 else None),
        pid=found.pid,
        server=server.key,
        api_pids=server.api_pids,
        worker_pids=found.worker_pids,
        alive=facts is not None,
        orphan=server.orphan,
        process_state=facts.state if facts else None,
        rss_bytes=facts.rss_bytes if facts else None,
        rss_by_pid={
            pid: readings.processes[pid].rss_bytes
            for pid in (*server.api_pids, *found.worker_pids)
            if pid in readings.processes and pid != found.pid
        },
        model=base.model or _model(value, rank) or server.model,
        vllm_version=base.vllm_version or (value.vllm_version if value else None),
        block_size=base.block_size
        if base.block_size is not None
        else (metrics.block_size_tokens if metrics else None),
        prefix_caching=base.prefix_caching
        if base.prefix_caching is not None
        else (metrics.prefix_caching if metrics else None),
        metrics=metrics,
        requests=_with_clients(readings, server, found.pid, base.requests),
        probe_reason=_probe_reason(server, found, reading, answered=value is not None),
    )


def _model(page: MetricsPage | None, rank: int | None) -> str | None:
    """The model name of one engine; all engines of a server have the same unless told apart."""
    if page is None:
        return None
    if rank in page.models:
        return page.models[rank]
    names = set(page.models.values())
    return names.pop() if len(names) == 1 else None


def _probe_reason(
    server: FoundServer, found: FoundEngine, reading: Reading[Engine] | None, *, answered: bool
) -> str:
    if reading is None:
        starting = bool(server.apis) and not server.listening and not answered
        if found.probe_socket is None and starting:
            return "the server is starting; a probe that is installed loads with its engine"
        if found.probe_socket is None:
            return "no probe in this engine; `kvtop attach` puts one in without a restart"
        return _NOT_READ
    if reading.status.state is SourceState.FAILED:
        remedy = f"; {reading.status.remedy}" if reading.status.remedy else ""
        return reading.status.reason + remedy
    return "" if reading.value is not None else reading.status.reason or _NOT_READ


def _clients_of(readings: Readings, server: FoundServer) -> tuple[frozenset[str], float] | None:
    """Requests with a client and the monotonic time of the oldest answer; None: not known.

    Every API server of the engine must have answered just now: one that is silent may
    be the one that knows a request.
    """
    answers = [readings.clients.get(pid) for pid in server.api_pids]
    known: frozenset[str] = frozenset()
    times = []
    for answer in answers:
        if answer is None or answer.value is None or answer.status.state is not SourceState.OK:
            return None
        known |= answer.value
        times.append(answer.mono_s)
    return (known, min(times)) if times else None


def clientless(readings: Readings) -> set[tuple[int, str]]:
    """Requests in a scheduler that no API server knows, by engine pid and request id."""
    missing = set()
    for server in readings.found.servers if readings.found else ():
        clients = _clients_of(readings, server)
        for engine in server.engines if clients else ():
            reading = readings.engines.get(engine.pid)
            if clients is not None and reading is not None and reading.value is not None:
                ids = {request.id for request in reading.value.requests or ()}
                missing |= {(engine.pid, name) for name in ids - clients[0]}
    return missing


def _with_clients(
    readings: Readings, server: FoundServer, pid: int, requests: tuple[Request, ...] | None
) -> tuple[Request, ...] | None:
    """Requests with their clients; None stays where it is not known.

    The engine and the API servers are not read at the same moment: a request may be
    missing in one answer only because it had just come or just ended. It is `gone` when
    an answer taken after it was first missed does not have it either.
    """
    clients = _clients_of(readings, server)
    if not requests or clients is None:
        return requests
    known, answered_s = clients
    result = []
    for request in requests:
        since_s = readings.gone_since_s.get((pid, request.id))
        if request.id in known:
            result.append(replace(request, client="live"))
        elif since_s is not None and answered_s > since_s:
            gone_s = readings.mono_s - since_s
            result.append(replace(request, client="gone", client_gone_s=gone_s))
        else:
            result.append(request)
    return tuple(result)


def _engines_without_process(
    server: FoundServer, page: Reading[MetricsPage] | None
) -> list[Engine]:
    """Engines of a server of which only the HTTP side can be seen."""
    value = page.value if page else None
    if value is None and not server.apis:
        return []  # Only an address so far; its source says what is wrong with it.
    if server.apis:
        reason = "this server has no engine process: it is starting, or its engine is gone"
    else:
        reason = "the engine's process is not visible from here; run kvtop on its machine"
    ranks = sorted(value.engines) if value and value.engines else [None]
    engines = []
    for rank in ranks:
        metrics = _metrics_of(page, rank, len(ranks))
        engines.append(
            Engine(
                engine=rank,
                pid=None,
                server=server.key,
                api_pids=server.api_pids,
                model=_model(value, rank) or server.model,
                vllm_version=value.vllm_version if value else None,
                block_size=metrics.block_size_tokens if metrics else None,
                prefix_caching=metrics.prefix_caching if metrics else None,
                metrics=metrics,
                probe_reason=reason,
            )
        )
    return engines


def _lost_engine(readings: Readings, server: FoundServer, found: FoundEngine) -> Engine:
    """An engine whose process is gone: its last values, marked as such."""
    reading = readings.engines.get(found.pid)
    base = reading.value if reading and reading.value else Engine(None, found.pid, server.key)
    left = readings.left.get(found.pid)
    reason = "the engine's process is gone; these are its last values"
    if left is not None:
        reason = f"the engine died of an exception; how it was then: kvtop once --file {left}"
    return replace(
        base,
        engine=base.engine if base.engine is not None else found.rank,
        pid=found.pid,
        server=server.key,
        api_pids=server.api_pids,
        worker_pids=found.worker_pids,
        alive=False,
        state="gone",
        metrics=None,
        model=base.model or server.model,
        probe_reason=reason,
        last_snapshot=left,
    )


def _gpus(readings: Readings, engines: list[Engine]) -> tuple[Gpu, ...]:
    """GPUs with each process matched to the engine it belongs to."""
    gpus = (readings.gpus.value or ()) if readings.gpus else ()
    owner: dict[int, int] = {}
    for engine in engines:
        if engine.pid is not None:
            owner[engine.pid] = engine.pid
            owner.update(dict.fromkeys(engine.worker_pids, engine.pid))
    result = []
    for gpu in gpus:
        processes = gpu.processes
        if processes is not None:
            processes = tuple(
                replace(process, engine_pid=owner.get(process.pid)) for process in processes
            )
        result.append(replace(gpu, processes=processes))
    return tuple(result)
