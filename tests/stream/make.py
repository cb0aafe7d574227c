"""Hand-made pieces of a machine: servers, readings, engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from kvtop.attach.servers import Found, FoundEngine, FoundProcess, FoundServer
from kvtop.model.blocks import BlockState, count_states
from kvtop.model.snapshot import (
    Engine,
    Phase,
    Pool,
    ProbeInfo,
    Request,
    SourceState,
    SourceStatus,
)
from kvtop.sources.base import Reading

T = TypeVar("T")


def process(pid: int, socket: str | None = None) -> FoundProcess:
    return FoundProcess(pid, pid, 0, pid * 10, probe_socket=Path(socket) if socket else None)


def found_engine(pid: int, rank: int = 0, socket: str | None = "/s/engine") -> FoundEngine:
    return FoundEngine(process(pid, socket), rank, (process(pid + 1),), (pid - 1,))


def server(*engines: FoundEngine, key: str = "127.0.0.1:8000", **more: Any) -> FoundServer:
    apis = tuple(process(pid, "/s/api") for e in engines for pid in e.api_pids)
    return FoundServer(key=key, url=f"http://{key}", apis=apis, engines=engines, **more)


def found(*servers: FoundServer) -> Found:
    return Found(servers, ("this", "that"))


def request(name: str, **more: Any) -> Request:
    return Request(id=name, status="RUNNING", phase=Phase.DECODE, **more)


def engine(pid: int, *requests: Request, **more: Any) -> Engine:
    states = bytes([BlockState.NULL, BlockState.USED, BlockState.FREE])
    return Engine(
        engine=0,
        pid=pid,
        server="",
        model="tiny",
        pools=(Pool(count_states(states), free_queue=1, states=states),),
        requests=requests,
        probe=ProbeInfo("0.1.0", 5, 1.0, 0.0, "boundary", 100.0),
        **more,
    )


def reading(
    value: T | None, state: SourceState = SourceState.OK, reason: str = "", **more: Any
) -> Reading[T]:
    status = SourceStatus("name", "kind", state, 90.0, reason, **more)
    return Reading(status, value, 100.0, 50.0)
