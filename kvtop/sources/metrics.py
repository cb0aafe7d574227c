"""vLLM's /metrics page over HTTP, as `EngineMetrics` of each engine behind it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtop.model.snapshot import EngineMetrics
from kvtop.sources.base import SourceError, one_line
from kvtop.sources.http_client import KeptClient
from kvtop.sources.lane import Lane, StuckError
from kvtop.sources.metrics_page import Samples, parse
from kvtop.sources.metrics_rates import Window, advance, derive
from kvtop.sources.metrics_url import normalize_url, short_name

if TYPE_CHECKING:
    import httpx

__all__ = ["MetricsPage", "MetricsSource", "normalize_url", "parse", "stale_reason"]

MAX_BYTES = 8 * 1024 * 1024
"""A page of 64 engines is about 3 MB."""
TIMEOUT_S = 4.0
"""For each step of a request; less than the deadline, so that the plainer message wins."""
PARSE_DEADLINE_S = 3.0
"""For a big page; with the transfer less than the deadline."""
VERSION_TRIES = 3
"""How often /version may fail before it is let be until the server restarts."""
STALE_AFTER_S = 10.0
"""Counters that stand still this long while requests run make the page stale."""
_BIG_VERSION = 500
"""Bytes; a larger answer is no version, and might nest deeper than JSON can be read."""
_BIG_PAGE = 200_000
"""Characters; a larger page is parsed in a thread, so that the screen does not stutter."""


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """One reading of a server's /metrics."""

    url: str
    """Base URL of the server, without `/metrics`."""
    engines: dict[int, EngineMetrics]
    """By `engine` label (data-parallel rank); empty: no series names an engine."""
    models: dict[int, str]
    """By engine: label `model_name`; an engine without one is not in it. Text from outside."""
    cache_config: dict[int, dict[str, str]]
    """By engine: all labels of `cache_config_info`, as text."""
    vllm_version: str | None
    """From `/version`. None: not read yet, or the server does not tell."""
    start_time_s: float | None
    """When the API server's process started. None: the page does not tell."""
    restarted: bool
    """True on the first page after the server started anew."""
    size_bytes: int
    """Size of the page."""


def stale_reason(page: MetricsPage) -> str:
    """Why a page that came is out of date all the same; "" when it is not.

    For `poll(..., stale=stale_reason)`.
    """
    for index, engine in page.engines.items():
        frozen_s = engine.gauges_frozen_s
        if frozen_s is not None and frozen_s >= STALE_AFTER_S:
            return (
                f"engine {index} says {engine.running} running, "
                f"but no counter has moved for {frozen_s:.0f} s"
            )
    return ""


class MetricsSource:
    """Reads one server's /metrics.

    Args:
        url: Any form that `normalize_url` takes.
        client: Makes the HTTP client; for tests. None: one that keeps one connection and
            obeys no proxy variables of the environment.
        target_pid: Process of the API server, if known.
        monotonic: Clock for the rates, seconds.

    Raises:
        UsageError: The URL is none.
    """

    kind = "metrics"
    period_s = 1.0
    deadline_s = 6.0

    def __init__(
        self,
        url: str,
        client: Callable[[], httpx.AsyncClient] | None = None,
        *,
        target_pid: int | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = normalize_url(url)
        self.name = f"metrics {short_name(self.url)}"
        self.target_pid = target_pid
        self._client = KeptClient(client or (lambda: _new_client(self.url)))
        self._monotonic = monotonic
        self._window: Window = ()
        self._version: str | None = None
        self._version_tries = 0
        self._lane = Lane("kvtop-metrics")

    async def read(self) -> MetricsPage:
        """Fetch and read the page once.

        Raises:
            SourceError: No answer, a refusal, or not a page of vLLM's.
        """
        if self._lane.busy:
            raise _too_much()
        body = await self._get("/metrics")
        mono_s = self._monotonic()
        text = body.decode("utf-8", "replace")
        samples = await self._parse(text) if len(text) > _BIG_PAGE else parse(text)
        before = self._window[-1].epoch_s if self._window else {}
        self._window = advance(self._window, samples, mono_s)
        epoch_s = self._window[-1].epoch_s
        restarted = any(epoch_s.get(index, since) != since for index, since in before.items())
        if restarted:
            self._version, self._version_tries = None, 0
        if self._version is None and self._version_tries < VERSION_TRIES:
            self._version_tries += 1
            self._version = await self._read_version()
        return MetricsPage(
            url=self.url,
            engines=derive(self._window),
            models={i: e.model for i, e in samples.engines.items() if e.model},
            cache_config={i: e.cache_config for i, e in samples.engines.items()},
            vllm_version=self._version,
            start_time_s=samples.start_time_s,
            restarted=restarted,
            size_bytes=len(body),
        )

    async def close(self) -> None:
        """Close the connection. Never raises."""
        self._lane.end()
        self._lane = Lane("kvtop-metrics")
        await self._client.close()

    async def _parse(self, text: str) -> Samples:
        """A big page, in a thread that nobody waits for at exit; one at a time."""
        try:
            return await self._lane.call(lambda: parse(text), PARSE_DEADLINE_S)
        except StuckError as error:
            raise _too_much() from error

    async def _read_version(self) -> str | None:
        """The server's own version; a nicety, so that no failure of it is told."""
        import json

        try:
            body = await asyncio.wait_for(self._get("/version"), 1.0)
            version = json.loads(body)["version"] if len(body) < _BIG_VERSION else None
        except (SourceError, asyncio.TimeoutError, ValueError, LookupError, TypeError):
            return None
        return one_line(version, 64) if isinstance(version, str) and version else None

    async def _get(self, path: str) -> bytes:
        import httpx

        where = short_name(self.url)
        try:
            async with self._client.stream("GET", self.url + path) as response:
                if response.status_code != 200:
                    location = response.headers.get("location", "")
                    raise _status_error(response.status_code, where + path, location)
                kind = response.headers.get("content-type", "text/plain").lower()
                if path == "/metrics" and not kind.startswith(
                    ("text/plain", "application/openmetrics-text")
                ):
                    raise SourceError(
                        f"{where}{path} is not a metrics page but {one_line(kind, 60)}",
                        "check that the address is that of a vLLM server, "
                        "with its root path if it has one",
                    )
                if response.headers.get("content-encoding", "identity").lower() != "identity":
                    raise SourceError(
                        f"{where}{path} came compressed, which kvtop did not ask for",
                        "point --url at vLLM itself and not at a proxy in front of it",
                    )
                body = bytearray()
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > MAX_BYTES:
                        raise SourceError(
                            f"{where}{path} is larger than {MAX_BYTES // 2**20} MB",
                            "check that the address is that of a vLLM server",
                        )
            return bytes(body)
        except httpx.HTTPError as error:
            raise _transport_error(error, where) from error
        except (httpx.InvalidURL, UnicodeError, ValueError) as error:
            raise SourceError(
                f"{where} is not an address that can be asked: {one_line(str(error), 80)}",
                "give another --url",
            ) from error


def _new_client(url: str) -> httpx.AsyncClient:
    import httpx

    return httpx.AsyncClient(
        trust_env=False,
        follow_redirects=False,
        timeout=httpx.Timeout(TIMEOUT_S),
        limits=httpx.Limits(max_connections=1, max_keepalive_connections=1),
        # Without TLS there is nothing to verify, and loading the certificates takes time.
        verify=url.startswith("https:"),
        headers={"accept": "text/plain", "accept-encoding": "identity", "user-agent": "kvtop"},
    )


def _too_much() -> SourceError:
    """A page that takes longer to understand than there is time for."""
    return SourceError(
        f"the metrics page cannot be read within {PARSE_DEADLINE_S:g} s",
        "check that the address is that of a vLLM server",
    )


def _status_error(status: int, where: str, location: str) -> SourceError:
    """A plain line for an answer that is not 200."""
    if status == 404:
        return SourceError(
            f"{where} does not exist (404)",
            "if the server runs behind a root path, give it: --url http://HOST:PORT/ROOT-PATH",
        )
    if status in (401, 403, 407):
        return SourceError(
            f"{where} refuses kvtop ({status})",
            "vLLM leaves /metrics open; ask for access at the proxy in front, or go around it",
        )
    if 300 <= status < 400:
        to = f" to {one_line(location, 80)}" if location else ""
        return SourceError(f"{where} redirects{to} ({status})", "give that address as --url")
    if status == 503:
        return SourceError(f"{where} is not ready (503)", "wait; the server may be starting")
    if status >= 500:
        return SourceError(f"{where} fails in the server ({status})", "look at the server's log")
    return SourceError(
        f"{where} answers with status {status}", "check that the address is that of a vLLM server"
    )


def _transport_error(error: httpx.HTTPError, where: str) -> SourceError:
    """A plain line for an answer that did not come."""
    import httpx

    text = str(error).lower()
    if isinstance(error, httpx.TimeoutException):
        return SourceError(
            f"{where} does not answer within {TIMEOUT_S:g} s",
            "the server may be overloaded or stopped; it is asked again by itself",
        )
    if isinstance(error, httpx.ConnectError):
        if "certificate" in text:
            return SourceError(
                f"{where} has a certificate that this machine does not trust",
                "use the http address of the server itself, or add its authority to the system",
            )
        if "ssl" in text or "tls" in text:
            return SourceError(f"{where} does not speak https", "try http:// in --url")
        if "name or service" in text or "resolution" in text or "nodename" in text:
            return SourceError(f"{where}: no such host name", "check the name in --url")
        if "all connection attempts failed" in text or "refused" in text:
            return SourceError(
                f"nothing answers at {where}",
                "start the server there, or give the right address with --url",
            )
        return SourceError(
            f"{where} cannot be reached: {one_line(str(error), 80)}",
            "check the address in --url and the network",
        )
    if isinstance(error, httpx.RemoteProtocolError):
        return SourceError(
            f"{where} broke off or does not speak HTTP",
            "the server may be ending; if it stays so, check the address in --url",
        )
    return SourceError(
        f"reading {where} failed: {type(error).__name__} {one_line(str(error), 80)}".rstrip(),
        "it is asked again by itself",
    )
