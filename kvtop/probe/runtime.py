"""The roles that need no cut, and what each process says of itself."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from kvtop.probe.answer import dump
from kvtop.probe.facts import path, vllm_version
from kvtop.probe.server import Connection, Request
from kvtop.probe.version import SCHEMA, VERSION


class PlainRole:
    """Serves what can be read at once, without a cut."""

    def __init__(self, name: str, found: str, read: Callable[[], dict[str, Any]]) -> None:
        self.name = name
        self._found = found
        self._read = read

    def start(self) -> None:
        """Nothing is watched."""

    def stop(self) -> None:
        """Nothing to take out."""

    def work(self) -> None:
        """Nothing is under way."""

    def timeout_s(self) -> float | None:
        """Nothing to do until somebody asks."""
        return None

    def about(self) -> dict[str, Any]:
        """What `/v1/hello` says of this role."""
        return {
            "model": None,
            "found": [self._found],
            "missing": [],
            "state": "ok",
            "reason": "",
            "demo": False,
        }

    def handle(self, connection: Connection, request: Request) -> bool:
        """Answers a request; False: no such path."""
        if request.path[1:] != ["snapshot"]:
            return False
        body = {"schema": SCHEMA, "role": self.name, "time_s": time.time(), **self._read()}
        connection.answer(200, dump(body))
        return True


def front_end(processor: Any) -> PlainRole:
    """The role of an API server: the requests that still have a client."""

    def read() -> dict[str, Any]:
        return {"clients": [str(rid) for rid in list(processor.request_states)]}

    return PlainRole("api", "clients", read)


def worker(found: Any) -> PlainRole:
    """The role of a worker: what PyTorch's allocator holds; null on other devices."""

    def read() -> dict[str, Any]:
        return {"rank": path(found, "rank"), "allocator": _allocator(path(found, "device"))}

    return PlainRole("worker", "worker", read)


def _allocator(device: Any) -> dict[str, int] | None:
    """PyTorch's figures for the worker's own device; the current one is a matter of threads."""
    cuda = path(sys.modules.get("torch"), "cuda")
    try:
        if path(device, "type") != "cuda" or not cuda.is_initialized():
            return None
        stats = cuda.memory_stats(device)
        return {
            "allocated_bytes": int(stats["allocated_bytes.all.current"]),
            "reserved_bytes": int(stats["reserved_bytes.all.current"]),
            "allocated_peak_bytes": int(stats["allocated_bytes.all.peak"]),
            "reserved_peak_bytes": int(stats["reserved_bytes.all.peak"]),
            "alloc_retries": int(stats["num_alloc_retries"]),
            "ooms": int(stats["num_ooms"]),
        }
    except Exception:
        return None


def hello(role: Any, loaded_by: str, since: float) -> bytes:
    """The body of `/v1/hello`."""
    return dump(
        {
            "kvtop": VERSION,
            "schema": SCHEMA,
            "role": role.name,
            "pid": os.getpid(),
            "vllm_version": vllm_version(),
            "loaded_by": loaded_by,
            "uptime_s": round(time.monotonic() - since, 3),
            **role.about(),
        }
    )
