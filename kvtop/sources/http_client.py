"""An HTTP client that is replaced after every request that did not come to its end.

A request that is cancelled or given up on a busy machine can leave its connection taken in
the pool below httpx for good. With the one or two connections that kvtop allows itself,
nothing would ever be answered again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

_CLOSE_S = 1.0


class KeptClient:
    """Keeps one `httpx.AsyncClient` for as long as all goes well.

    Args:
        make: Makes one.
    """

    def __init__(self, make: Callable[[], httpx.AsyncClient]) -> None:
        self._make = make
        self._client: httpx.AsyncClient | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def stream(self, method: str, url: str, **options: Any) -> AsyncIterator[httpx.Response]:
        """As `httpx.AsyncClient.stream`; leave it normally only after the whole answer."""
        client = self._client
        if client is None:
            client = self._client = self._make()
        whole = False
        try:
            async with client.stream(method, url, **options) as answer:
                yield answer
            whole = True
        finally:
            if not whole:
                self._drop(client)

    def _drop(self, client: httpx.AsyncClient) -> None:
        if self._client is not client:
            return  # It was dropped by another request already.
        self._client = None
        task = asyncio.ensure_future(_close(client))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close it. Never raises, never waits long."""
        client, self._client = self._client, None
        if client is not None:
            await _close(client)
        if self._closing:
            await asyncio.wait(self._closing, timeout=_CLOSE_S)


async def _close(client: httpx.AsyncClient) -> None:
    with contextlib.suppress(Exception):
        await asyncio.wait_for(client.aclose(), _CLOSE_S)
