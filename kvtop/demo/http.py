"""The simulated server's HTTP side: /metrics, and the GPUs that do not exist.

Loopback only, GET only, a bounded number of connections at once.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MAX_CONNECTIONS = 16
"""Further clients are hung up on."""

Page = Callable[[], tuple[str, bytes]]
"""Gives a content type and a body."""


class DemoServer(ThreadingHTTPServer):
    """Serves pages from threads of its own.

    Args:
        pages: By path, without query.
        port: On 127.0.0.1; 0: any free one.

    Raises:
        OSError: The port is taken.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, pages: dict[str, Page], port: int = 0) -> None:
        self.pages = pages
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def start(self) -> None:
        """Serve in a thread of its own until `shutdown`."""
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.1}, name="http", daemon=True
        ).start()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hang up when there are too many connections."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection and give its place back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that breaks off is nobody's fault and is not reported."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 20.0
    disable_nagle_algorithm = True
    server: DemoServer

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            self._answer(404, "application/json", b'{"detail":"Not Found"}')
            return
        kind, body = page()
        self._answer(200, kind, body)

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def version_string(self) -> str:
        return "kvtop-demo"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Standard error is the user's terminal: nothing is logged."""


def json_page(make: Callable[[], object]) -> Page:
    """A page with the JSON of what `make` gives."""
    return lambda: ("application/json", json.dumps(make()).encode())
