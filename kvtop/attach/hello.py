"""Asks a probe who it is, over its Unix socket, without an HTTP library."""

from __future__ import annotations

import json
import socket
import time
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
    end_s = time.monotonic() + timeout_s
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(request)
            # A probe that sends byte by byte must not hold the caller either.
            while (part := connection.recv(4096)) and len(data) < _MAX_ANSWER:
                data += part
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    return None
                connection.settimeout(left_s)
    except (OSError, ValueError):
        return None
    return parse_hello(bytes(data))


def parse_hello(answer: bytes) -> Hello | None:
    """Reads an HTTP answer to `/v1/hello`; None where it is not one. Never raises."""
    head, blank, body = answer.partition(b"\r\n\r\n")
    if not blank or b" 200 " not in head.split(b"\r\n", 1)[0]:
        return None
    try:
        row = json.loads(body)
        version = row.get("vllm_version")
        return Hello(
            version=str(row["kvtop"]),
            role=str(row["role"]),
            pid=_pid(row["pid"]),
            state=str(row.get("state", "")),
            reason=str(row.get("reason", "")),
            loaded_by=str(row.get("loaded_by", "")),
            vllm_version=None if version is None else str(version),
            missing=tuple(str(name) for name in row.get("missing", ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        # RecursionError: JSON that nests deeper than Python's parser follows.
        return None


def _pid(value: object) -> int:
    """A process id of an answer.

    Raises:
        ValueError: It is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise ValueError("not a process id")
    return value
