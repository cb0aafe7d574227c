"""A very small HTTP/1.1 server: one thread, no blocking call, bounded everything.

It knows nothing of vLLM: whole requests are handed to a function, which answers at once or
later. A client that is slow, silent, gone or hostile costs one of a few connections.
"""

from __future__ import annotations

import hmac
import os
import selectors
import socket
import time
from collections.abc import Callable
from threading import Lock
from urllib.parse import unquote

from kvtop.probe.rundir import admitted

MAX_CONNECTIONS = 8
MAX_HEAD_BYTES = 8_192
HEAD_TIMEOUT_S = 5.0
"""For a request head to arrive completely."""
SEND_TIMEOUT_S = 10.0
"""For an answer to make any progress."""
IDLE_TIMEOUT_S = 60.0
"""For the next request on a connection kept open."""

REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    414: "URI Too Long",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}


class Request:
    """One parsed request.

    Attributes:
        path: Percent-decoded segments of the path.
        query: Query parameters, the last of each name.
    """

    def __init__(self, path: list[str], query: dict[str, str]) -> None:
        self.path = path
        self.query = query


class BadRequestError(Exception):
    """Answered with `status` and closed."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Connection:
    """One client."""

    def __init__(self, sock: socket.socket, token: str | None, now: float) -> None:
        self.sock = sock
        self.token = token
        self.received = bytearray()
        self.to_send = memoryview(b"")
        self.keep_alive = True
        self.waiting = False
        """Its request is being worked on."""
        self.closed = False
        self.answered = now
        """When its last answer was queued."""
        self.since = now
        """When it last made progress."""

    def answer(self, status: int, body: bytes, kind: str = "application/json") -> None:
        """Queues an answer; `Server.poll` sends it."""
        self.waiting = False
        allow = "Allow: GET\r\n" if status == 405 else ""
        challenge = "WWW-Authenticate: Bearer\r\n" if status == 401 else ""
        close = "" if self.keep_alive else "Connection: close\r\n"
        head = (
            f"HTTP/1.1 {status} {REASONS.get(status, 'Error')}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\n"
            f"{allow}{challenge}{close}\r\n"
        )
        self.to_send = memoryview(head.encode("ascii") + body)
        self.since = self.answered = time.monotonic()


Handler = Callable[[Connection, Request], None]


class Server:
    """Serves listening sockets from one thread, which calls `poll` again and again.

    Args:
        handler: Gets each request; calls `Connection.answer` now or later.
        token: What TCP clients must bring as bearer.
    """

    def __init__(self, handler: Handler, token: str | None = None) -> None:
        self.handler = handler
        self.token = token
        self.connections: set[Connection] = set()
        self._selector = selectors.DefaultSelector()
        self._wake_lock = Lock()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        os.set_blocking(self._wake_w, False)
        self._selector.register(self._wake_r, selectors.EVENT_READ, None)
        self._listeners: list[socket.socket] = []
        self._pipelined = False

    def add_listener(self, listener: socket.socket) -> None:
        """Serves this listening socket too; it is closed with the server."""
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ, listener)

    def wake(self) -> None:
        """Makes `poll` return, from any thread; never blocks, never raises."""
        # Whoever has the lock is waking it already, or closes it. Without it, a descriptor
        # closed and given to something else meanwhile could be written to.
        if not self._wake_lock.acquire(False):
            return
        try:
            if self._wake_w >= 0:
                os.write(self._wake_w, b"x")
        except OSError:
            pass
        finally:
            self._wake_lock.release()

    def poll(self, timeout_s: float | None) -> None:
        """Waits for events for at most this long and serves them.

        Args:
            timeout_s: None: until there is something to do.
        """
        # Answers given since the last call go out first.
        self._sweep()
        if self._pipelined:
            timeout_s = 0.0
        elif self.connections:
            timeout_s = 1.0 if timeout_s is None else min(timeout_s, 1.0)
        for key, events in self._selector.select(timeout_s):
            if key.data is None:
                try:
                    os.read(self._wake_r, 4096)
                except OSError:
                    pass
            elif isinstance(key.data, Connection):
                # It may have been closed for the sake of one accepted a moment ago.
                if not key.data.closed:
                    self._serve(key.data, events)
            else:
                self._accept(key.data)

    def _sweep(self) -> None:
        self._pipelined = False
        now = time.monotonic()
        for connection in list(self.connections):
            if connection.to_send and not connection.closed:
                self._send(connection)
            self._advance(connection)
            self._expire(connection, now)

    def abandon(self) -> None:
        """Closes the descriptors of a server that belongs to the parent process."""
        for sock in (*self._listeners, *(c.sock for c in self.connections)):
            sock.close()
        for fd in (self._wake_r, self._wake_w):
            os.close(fd)
        self._selector.close()

    def close(self) -> None:
        """Closes everything."""
        for connection in list(self.connections):
            self._drop(connection)
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        self._listeners.clear()
        self._selector.close()
        with self._wake_lock:
            os.close(self._wake_r)
            os.close(self._wake_w)
            self._wake_w = -1

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        unix = listener.family == socket.AF_UNIX
        if unix and not admitted(sock):
            sock.close()
            return
        if len(self.connections) >= MAX_CONNECTIONS and not self._make_room():
            sock.close()
            return
        sock.setblocking(False)
        connection = Connection(sock, None if unix else self.token or "", time.monotonic())
        self.connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _make_room(self) -> bool:
        """Closes the connection that does nothing for longest, else the slowest reader.

        Clients that do not read their answers must not lock the others out.
        """
        idle = [c for c in self.connections if not c.waiting and not c.to_send]
        unsent = [c for c in self.connections if c.to_send]
        if idle:
            self._drop(min(idle, key=lambda c: c.since))
        elif unsent:
            self._drop(min(unsent, key=lambda c: c.answered))
        else:
            return False
        return True

    def _expire(self, connection: Connection, now: float) -> None:
        if connection.waiting or connection.closed:
            return
        if connection.to_send:
            limit = SEND_TIMEOUT_S
        else:
            limit = HEAD_TIMEOUT_S if connection.received else IDLE_TIMEOUT_S
        if now - connection.since > limit:
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        connection.closed = True
        connection.waiting = False
        self.connections.discard(connection)
        try:
            self._selector.unregister(connection.sock)
        except (KeyError, ValueError):
            pass
        connection.sock.close()

    def _serve(self, connection: Connection, events: int) -> None:
        if events & selectors.EVENT_READ:
            try:
                data = connection.sock.recv(65_536)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._drop(connection)
                return
            if not data:
                self._drop(connection)
                return
            if not connection.received:
                connection.since = time.monotonic()
            connection.received += data
            if len(connection.received) > 2 * MAX_HEAD_BYTES:
                # More than any head and one pipelined behind it.
                if connection.waiting or connection.to_send:
                    self._drop(connection)
                else:
                    self._refuse(connection, 431, "the request head is too large")
                return
            self._advance(connection)
        elif events & selectors.EVENT_WRITE:
            self._send(connection)

    def _advance(self, connection: Connection) -> None:
        """Serves requests that have arrived whole: a few of each client in turn."""
        for _ in range(16):
            if not connection.received or connection.closed:
                return
            if connection.waiting or connection.to_send or not self._next(connection):
                return
        self._pipelined = True

    def _next(self, connection: Connection) -> bool:
        """Takes the next request; False when it has not arrived whole, or was refused."""
        end = connection.received.find(b"\r\n\r\n")
        if end > MAX_HEAD_BYTES or (end < 0 and len(connection.received) > MAX_HEAD_BYTES):
            self._refuse(connection, 431, "the request head is too large")
            return False
        if end < 0:
            return False
        head = bytes(connection.received[:end])
        del connection.received[: end + 4]
        try:
            request = self._parse(connection, head)
        except BadRequestError as error:
            self._refuse(connection, error.status, str(error))
            return False
        connection.waiting = True
        connection.since = time.monotonic()
        try:
            self.handler(connection, request)
        except Exception as error:
            self._refuse(connection, 500, f"{type(error).__name__} in the probe")
            return False
        if connection.to_send:
            self._send(connection)
        return True

    def _refuse(self, connection: Connection, status: int, text: str) -> None:
        connection.keep_alive = False
        connection.received.clear()
        connection.answer(status, f'{{"error":"{text}"}}'.encode("ascii", "replace"))
        self._send(connection)

    def _parse(self, connection: Connection, head: bytes) -> Request:
        try:
            lines = head.decode("ascii").split("\r\n")
        except UnicodeDecodeError:
            raise BadRequestError(400, "the request head is not ASCII") from None
        parts = lines[0].split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/"):
            raise BadRequestError(400, "this is not an HTTP request")
        method, target, version = parts
        if version not in ("HTTP/1.1", "HTTP/1.0"):
            raise BadRequestError(505, "only HTTP/1.1 is spoken here")
        fields: dict[str, str] = {}
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon or not name or name != name.strip():
                raise BadRequestError(400, "a header line is malformed")
            fields[name.lower()] = value.strip()
        wish = fields.get("connection", "").lower()
        connection.keep_alive = version == "HTTP/1.1" and "close" not in wish
        if connection.token is not None:
            self._authorize(connection.token, fields.get("authorization", ""))
        if method != "GET":
            raise BadRequestError(405, "only GET is allowed")
        if fields.get("content-length", "0") != "0" or "transfer-encoding" in fields:
            raise BadRequestError(400, "a GET has no body here")
        return _target(target)

    @staticmethod
    def _authorize(token: str, given: str) -> None:
        scheme, _, value = given.partition(" ")
        ok = hmac.compare_digest(value.strip().encode("utf-8"), token.encode("utf-8"))
        if not (token and ok and scheme.lower() == "bearer"):
            raise BadRequestError(401, "a bearer token is needed")

    def _send(self, connection: Connection) -> None:
        try:
            while connection.to_send:
                sent = connection.sock.send(connection.to_send[:262_144])
                connection.to_send = connection.to_send[sent:]
                connection.since = time.monotonic()
        except (BlockingIOError, InterruptedError):
            self._selector.modify(
                connection.sock, selectors.EVENT_READ | selectors.EVENT_WRITE, connection
            )
            return
        except OSError:
            self._drop(connection)
            return
        if not connection.keep_alive:
            self._drop(connection)
            return
        self._selector.modify(connection.sock, selectors.EVENT_READ, connection)


def _target(target: str) -> Request:
    if not target.startswith("/"):
        raise BadRequestError(400, "the path must begin with a slash")
    path, _, query_text = target.partition("?")
    query: dict[str, str] = {}
    for pair in query_text.split("&"):
        name, _, value = pair.partition("=")
        if name:
            query[unquote(name)] = unquote(value)
    return Request([unquote(part, errors="replace") for part in path.split("/")[1:]], query)
