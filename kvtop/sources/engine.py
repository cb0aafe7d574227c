"""The probes inside engine cores and API servers, read over their Unix sockets."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvtop.errors import BadDataError, UnreachableError
from kvtop.model.snapshot import Engine
from kvtop.sources.answers import parse_clients, parse_snapshot
from kvtop.sources.base import SourceError, one_line
from kvtop.sources.http_client import KeptClient

if TYPE_CHECKING:
    import httpx

MAX_PATIENCE_S = 8.0
"""Longest wait for one answer."""
MAX_ANSWER_BYTES = 8 * 2**20
"""Larger answers are refused: 200,000 blocks and 10,000 requests need a quarter of it."""


def get_once(path: str, target: str, timeout_s: float) -> bytes:
    """One GET over a Unix socket without an HTTP library.

    For the first frame only: importing httpx takes longer than everything else
    that a first frame needs. The poller keeps one httpx connection.

    Raises:
        UnreachableError: No answer in time, or not a 200.
    """
    request = f"GET {target} HTTP/1.1\r\nHost: kvtop\r\nConnection: close\r\n\r\n"
    answer = bytearray()
    deadline = time.monotonic() + timeout_s
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(timeout_s)
            sock.connect(path)
            sock.sendall(request.encode("ascii"))
            # One deadline for the whole answer: a peer that drips must not hold up the frame.
            while not _complete(answer):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError("timed out")
                sock.settimeout(left)
                chunk = sock.recv(1 << 16)
                if not chunk:
                    break
                answer += chunk
                if len(answer) > MAX_ANSWER_BYTES:
                    raise UnreachableError(f"the probe at {path} answers without end")
    except (OSError, ValueError) as error:
        raise UnreachableError(f"the probe at {path} does not answer: {error}") from None
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise UnreachableError(f"the probe at {path} answers {head[:40]!r}")
    return body


def _complete(answer: bytearray) -> bool:
    """Whether all bytes that the head announces have come."""
    end = answer.find(b"\r\n\r\n")
    if end < 0:
        return False
    length = re.search(rb"(?i)\r\ncontent-length:\s*(\d{1,12})\r\n", bytes(answer[: end + 2]))
    return length is not None and len(answer) >= end + 4 + int(length.group(1))


def refusal(status: int, body: bytes) -> str:
    """Why a probe gave no cut, as it says itself; the state of the engine is in it.

    Args:
        status: Of the answer.
        body: JSON with `error` and `step_age_s` (`kvtop.probe.engine`), or anything.
    """
    text = f"the probe answers {status}"
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return text
    why, age = (
        (data.get("error"), data.get("step_age_s")) if isinstance(data, dict) else (None,) * 2
    )
    if not isinstance(why, str):
        return text
    text += f": {one_line(why)}"
    if isinstance(age, float) and 1.0 <= age < 1e9:
        text += f"; its last scheduler step began {age:.0f} s ago"
    return text


class ProbeClient:
    """One kept-alive HTTP connection to a probe.

    Args:
        path: The probe's Unix socket.
        timeout_s: For connecting and for each answer.

    Attributes:
        patience_s: The timeout of the next request. On a saturated machine an answer takes
            longer than it should: after each one that was missed it is given twice as long,
            up to `MAX_PATIENCE_S`, so that it comes at all.
    """

    def __init__(self, path: str, timeout_s: float = 2.0) -> None:
        self._path = path
        self._timeout_s = self.patience_s = timeout_s
        self._client = KeptClient(self._new_client)

    def _new_client(self) -> httpx.AsyncClient:
        import httpx

        return httpx.AsyncClient(
            # No TLS on a Unix socket: without this, megabytes of CA certificates are read.
            transport=httpx.AsyncHTTPTransport(
                uds=self._path, verify=False, limits=httpx.Limits(max_connections=2)
            ),
            trust_env=False,
            timeout=self._timeout_s,
            base_url="http://kvtop",
            # Nothing is unpacked here: a few bytes could become gigabytes.
            headers={"accept-encoding": "identity"},
        )

    async def get(self, target: str) -> bytes:
        """The body of a 200 answer.

        Raises:
            SourceError: No such socket, no permission, no answer, or not a 200.
        """
        import httpx

        try:
            async with self._client.stream("GET", target, timeout=self.patience_s) as answer:
                body = bytearray()
                if answer.headers.get("content-encoding", "identity") != "identity":
                    raise SourceError("the probe packs its answer, which no kvtop probe does")
                async for chunk in answer.aiter_raw():
                    body += chunk
                    if len(body) > MAX_ANSWER_BYTES:
                        raise SourceError("the probe answers without end", "report this")
            if answer.status_code == 404:
                raise SourceError("the probe does not know this request", "")
            if answer.status_code != 200:
                raise SourceError(refusal(answer.status_code, bytes(body)), "")
            self.patience_s = self._timeout_s
            return bytes(body)
        except httpx.TimeoutException:
            self.patience_s = min(2.0 * self.patience_s, MAX_PATIENCE_S)
            raise SourceError(
                "the probe does not answer in time", "the process may be stopped: `kvtop doctor`"
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise SourceError(*self._explain(error)) from None

    def _explain(self, error: Exception) -> tuple[str, str]:
        text = str(error) or type(error).__name__
        if "ermission" in text:
            return (
                "the probe belongs to another user",
                "run kvtop as the user of the server, or as root",
            )
        return f"the probe's socket does not answer ({text})", "the process may be gone"

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()


class _ProbeSource:
    """What the two roles share: a client and a target pid."""

    kind = "engine"

    def __init__(self, name: str, path: str, pid: int, period_s: float) -> None:
        self.name = name
        self.target_pid: int | None = pid
        self.period_s = period_s
        self.client = ProbeClient(path)

    @property
    def deadline_s(self) -> float:
        """Seconds after which a read is given up: longer than the client's own patience."""
        return self.client.patience_s + 1.0

    async def close(self) -> None:
        """Close the connection."""
        await self.client.close()

    async def _snapshot(self, parse: Callable[[bytes], Any]) -> Any:
        try:
            return parse(await self.client.get("/v1/snapshot"))
        except (BadDataError, UnreachableError) as error:
            raise SourceError(error.what, error.remedy) from None


class EngineSource(_ProbeSource):
    """Block and request state of one engine core, from its probe."""

    def __init__(self, path: str, pid: int, period_s: float = 1.0) -> None:
        super().__init__(f"engine {pid}", path, pid, period_s)

    async def read(self) -> Engine:
        """The engine at its last cut.

        Raises:
            SourceError: No answer, or not one that kvtop understands.
        """
        engine: Engine = await self._snapshot(parse_snapshot)
        return engine


class ClientsSource(_ProbeSource):
    """Requests that still have a client, from the probe in an API server."""

    kind = "clients"

    def __init__(self, path: str, pid: int, period_s: float = 1.0) -> None:
        super().__init__(f"clients {pid}", path, pid, period_s)

    async def read(self) -> frozenset[str]:
        """Ids of the requests that have a client here.

        Raises:
            SourceError: No answer, or this vLLM does not tell.
        """
        clients: frozenset[str] | None = await self._snapshot(parse_clients)
        if clients is None:
            raise SourceError("this vLLM's API server does not tell its requests", "")
        return clients
