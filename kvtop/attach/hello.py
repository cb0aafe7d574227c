"""Asks a probe who it is, over its Unix socket, without an HTTP library."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path

_MAX_ANSWER = 1 << 16


@dataclass(frozen=True, slots=True)
class Hello:
    """What a probe says of itself."""

    version: str
    """kvtop version of the probe."""
    role: str
    """`engine`, `api` or `worker`."""
    pid: int
    """Its process, in its own pid namespace."""
    state: str
    """`ok`, `starting` or `stopped`."""
    reason: str
    """Why it is not `ok`."""
    loaded_by: str
    """`plugin`, `attach` or `demo`."""
    vllm_version: str | None
    """vLLM's own version string."""
    missing: tuple[str, ...]
    """Facts that this vLLM does not offer."""


def ask(path: Path, timeout_s: float = 1.0) -> Hello | None:
    """The answer of `/v1/hello`; None where nothing sensible answers in time. Never raises."""
    request = b"GET /v1/hello HTTP/1.1\r\nHost: kvtop\r\nConnection: close\r\n\r\n"
    data = bytearray()
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(request)
            while (part := connection.recv(4096)) and len(data) < _MAX_ANSWER:
                data += part
    except OSError:
        return None
    return parse_hello(bytes(data))


def parse_hello(answer: bytes) -> Hello | None:
    """Reads an HTTP answer to `/v1/hello`; None where it is not one."""
    head, blank, body = answer.partition(b"\r\n\r\n")
    if not blank or b" 200 " not in head.split(b"\r\n", 1)[0]:
        return None
    try:
        row = json.loads(body)
        version = row.get("vllm_version")
        return Hello(
            version=str(row["kvtop"]),
            role=str(row["role"]),
            pid=int(row["pid"]),
            state=str(row.get("state", "")),
            reason=str(row.get("reason", "")),
            loaded_by=str(row.get("loaded_by", "")),
            vllm_version=None if version is None else str(version),
            missing=tuple(str(name) for name in row.get("missing", ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
