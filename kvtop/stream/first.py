"""The first frame's snapshot: one quick synchronous look with the standard library only.

kvtop is started when the machine is saturated. What the first frame needs is
looked up without an event loop, an HTTP library or NVML; the live stream takes
over with everything else.
"""

from __future__ import annotations

import socket
import time

from kvtop.config import Options
from kvtop.errors import KvtopError
from kvtop.model.snapshot import Engine, Snapshot, SourceState, SourceStatus
from kvtop.sources.answers import parse_snapshot
from kvtop.sources.base import Reading
from kvtop.sources.engine import get_once
from kvtop.stream.merge import Readings, merge
from kvtop.stream.target import Discovery, Target, facts_of

PROBE_TIMEOUT_S = 0.5
"""Longest wait for the probes; the live stream asks again with more patience."""


def first_look(options: Options, target: Target) -> Snapshot:
    """What can be known at once: the servers, and their engines' blocks and requests."""
    found = Discovery(options, target).look()
    now = time.time()
    engines = {}
    deadline = time.monotonic() + PROBE_TIMEOUT_S
    for server in found.servers:
        for engine in server.engines:
            if engine.probe_socket is not None and time.monotonic() < deadline:
                engines[engine.pid] = _read(engine.pid, str(engine.probe_socket))
    return merge(
        Readings(
            time_s=time.time(),
            mono_s=time.monotonic(),
            host=socket.gethostname(),
            found=found,
            discovery=_status("discovery", "discovery", SourceState.OK, now),
            engines=engines,
            processes=facts_of(found),
            demo=target.demo,
        )
    )


def _read(pid: int, path: str) -> Reading[Engine]:
    name = f"engine {pid}"
    try:
        value = parse_snapshot(get_once(path, "/v1/snapshot", PROBE_TIMEOUT_S))
    except Exception as error:
        # Whatever it is, the live stream meets it again and says it with its remedy.
        what = error.what if isinstance(error, KvtopError) else type(error).__name__
        status = _status(name, "engine", SourceState.STARTING, time.time(), what)
        return Reading(status, None, time.time(), time.monotonic())
    status = _status(name, "engine", SourceState.OK, time.time())
    return Reading(status, value, time.time(), time.monotonic())


def _status(
    name: str, kind: str, state: SourceState, now_s: float, reason: str = ""
) -> SourceStatus:
    value_time_s = now_s if state is SourceState.OK else None
    return SourceStatus(
        name=name, kind=kind, state=state, since_s=now_s, reason=reason, value_time_s=value_time_s
    )
