"""vLLM's own HTTP routes that abort a request or reset the prefix cache, where it serves them.

In 0.32: `/reset_prefix_cache` with VLLM_SERVER_DEV_MODE=1
(vllm/entrypoints/serve/dev/cache/api_router.py), `/inference/v1/abort_requests` and
`/abort_requests` on some servers (entrypoints/scale_out/token_in_token_out/api_router.py,
entrypoints/rl/online/api_router.py). Whether a route is there is asked with a GET, which none of
them takes: 405, and not 404. The list of all routes would cost the server far more.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtop.attach.outside import visible

if TYPE_CHECKING:
    import httpx

ROUTES = {
    "abort": ("/inference/v1/abort_requests", "/abort_requests"),
    "reset": ("/reset_prefix_cache",),
}
"""Where vLLM takes each, the likeliest first."""
LOOK_S = 4.0
"""For the question whether a route is there."""
ACT_S = 20.0
"""For the answer to the request itself."""
_MAX_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Said:
    """What a server answered."""

    done: str
    """`aborted`, `reset`, `refused`, `sent` (taken, outcome not told) or `failed`."""
    text: str
    """One plain phrase."""


def route_of(url: str, uds: Path | None, what: str) -> tuple[str, str]:
    """The path at which a server takes it.

    Args:
        url: Its base address.
        uds: Its Unix socket. None: TCP.
        what: `abort` or `reset`.

    Returns:
        The path and nothing, or nothing and why there is none.
    """
    for path in ROUTES[what]:
        status, body = _ask("GET", url, uds, path, None, LOOK_S)
        if status == 0:
            return "", str(body)
        if status == 405:  # Method Not Allowed
            return path, ""
    dev = " (VLLM_SERVER_DEV_MODE=1 adds it)" if what == "reset" else ""
    return "", f"the server has no route {ROUTES[what][-1]}{dev}"


def ask_to_abort(url: str, uds: Path | None, path: str, ids: Sequence[str]) -> Said:
    """Ask a server to abort requests, by the ids that their clients gave them.

    An empty list would abort everything, so that it is never sent.
    """
    if not ids:
        return Said("failed", "the id that its client gave it is not known")
    status, body = _ask("POST", url, uds, path, {"request_ids": list(ids)}, ACT_S)
    if status == 200:
        return Said("sent", f"the server took it at {path} and does not say how it went")
    return Said("failed", _refusal(status, body, path))


def ask_to_reset(url: str, uds: Path | None, path: str) -> Said:
    """Ask a server to reset the prefix cache of its engines."""
    status, body = _ask("POST", url, uds, path, None, ACT_S)
    if status != 200:
        return Said("failed", _refusal(status, body, path))
    try:
        success = json.loads(body).get("success")
    except (ValueError, AttributeError, RecursionError):
        success = None  # Before 0.12 the body is empty.
    if success is True:
        return Said("reset", "vLLM says that the prefix cache is reset")
    if success is False:
        return Said("refused", "vLLM refused: blocks are in use; it resets only an engine at rest")
    return Said("sent", f"the server took it at {path} and does not say how it went")


def _refusal(status: int, body: bytes | str, path: str) -> str:
    if status == 0:
        return str(body)
    key = " (it wants an API key)" if status in (401, 403) else ""
    return f"{path} answers {status}{key}"


def _ask(
    method: str, url: str, uds: Path | None, path: str, content: Any, timeout_s: float
) -> tuple[int, bytes | str]:
    """Status and body; 0 and why when there is no answer. Takes `timeout_s` at most."""
    import httpx

    try:
        # httpx bounds each read alone: one byte a second would go on for ever.
        return asyncio.run(
            asyncio.wait_for(_exchange(method, url + path, uds, path, content), timeout_s)
        )
    except (TimeoutError, asyncio.TimeoutError):  # Two classes before Python 3.11.
        return 0, f"{path} does not answer within {timeout_s:g} s"
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, ValueError) as error:
        return 0, f"{path} does not answer: {visible(str(error) or type(error).__name__, 120)}"


async def _exchange(
    method: str, url: str, uds: Path | None, path: str, content: Any
) -> tuple[int, bytes | str]:
    async with (
        _client(uds) as client,
        client.stream(method, url, json=content) as answer,
    ):
        body = bytearray()
        async for chunk in answer.aiter_raw():
            body += chunk
            if len(body) > _MAX_BYTES:
                return 0, f"{path} answers without end"
        return answer.status_code, bytes(body)


def _client(uds: Path | None) -> httpx.AsyncClient:
    import httpx

    transport = None if uds is None else httpx.AsyncHTTPTransport(uds=str(uds), verify=False)
    return httpx.AsyncClient(
        transport=transport,
        timeout=None,  # noqa: S113 - the whole exchange is bounded
        trust_env=False,
        follow_redirects=False,
        headers={"accept-encoding": "identity"},
    )
