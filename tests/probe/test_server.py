"""The HTTP server against slow, vanishing and hostile clients."""

from __future__ import annotations

import json
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtop.probe import rundir, server
from kvtop.probe.server import MAX_CONNECTIONS, Server

GET = b"GET /v1/echo?a=1&b=%32 HTTP/1.1\r\nHost: x\r\n\r\n"


class Running:
    """A server in a thread, answering with what it was asked."""

    def __init__(self, directory, token=None):
        self.later = []
        self.server = Server(self.handle, token)
        self.listener, self.path = rundir.listen(directory, "engine")
        self.server.add_listener(self.listener)
        self.stopping = False
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def handle(self, connection, request):
        if request.path == ["v1", "later"]:
            self.later.append(connection)
            return
        if request.path == ["v1", "big"]:
            connection.answer(200, b"x" * 4_000_000)
            return
        if request.path == ["v1", "broken"]:
            raise KeyError("mine")
        body = {"path": request.path, "query": request.query}
        connection.answer(200, json.dumps(body).encode())

    def run(self):
        while not self.stopping:
            self.server.poll(None)

    def connect(self):
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(5)
        client.connect(self.path)
        return client

    def stop(self):
        self.stopping = True
        self.server.wake()
        self.thread.join(5)
        assert not self.thread.is_alive()
        self.server.close()


@pytest.fixture
def running(probe_dir):
    instance = Running(probe_dir)
    yield instance
    instance.stop()


def answer(client):
    """Status and body of one answer; None when the server closed."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = client.recv(65536)
        if not part:
            return None
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += client.recv(65536)
    return int(head.split()[1]), body[:length]


def ask(running, data):
    with running.connect() as client:
        client.sendall(data)
        return answer(client)


def test_path_and_query_are_decoded(running):
    status, body = ask(running, GET)
    assert status == 200
    assert json.loads(body) == {"path": ["v1", "echo"], "query": {"a": "1", "b": "2"}}
    status, body = ask(running, b"GET /v1/requests/a%2Fb%00%5Bx HTTP/1.1\r\n\r\n")
    assert json.loads(body)["path"] == ["v1", "requests", "a/b\0[x"]


def test_a_connection_is_kept_for_the_next_request(running):
    with running.connect() as client:
        for _ in range(5):
            client.sendall(GET)
            assert answer(client)[0] == 200


def test_pipelined_requests_are_answered_in_order_and_without_recursion(running):
    with running.connect() as client:
        small = b"GET /v1/%d HTTP/1.1\r\n\r\n"
        client.sendall(b"".join(small % n for n in range(600)))
        got = b""
        while got.count(b"HTTP/1.1 200 OK") < 600 or not got.endswith(b"}"):
            got += client.recv(65536)
        places = [got.index(b'"%d"' % n) for n in (1, 77, 599)]
        assert places == sorted(places)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"POST /v1/hello HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", 405),
        (b"DELETE / HTTP/1.1\r\n\r\n", 405),
        (b"HEAD / HTTP/1.1\r\n\r\n", 405),
        (b"get / HTTP/1.1\r\n\r\n", 405),
        (b"GET / HTTP/2.0\r\n\r\n", 505),
        (b"GET http://x/ HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nContent-Length: 9\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nbroken header\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n folded: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"y" * 9000 + b"\r\n\r\n", 431),
        (b"y" * 20000, 431),
        (b"GET /v1/broken HTTP/1.1\r\n\r\n", 500),
    ],
)
def test_what_is_not_a_plain_get_is_refused_and_the_server_goes_on(running, data, status):
    with running.connect() as client:
        client.sendall(data)
        got = answer(client)
        assert got[0] == status
        assert set(json.loads(got[1])) == {"error"}
        assert client.recv(10) == b""
    assert ask(running, GET)[0] == 200


@given(data=st.binary(max_size=200))
@settings(max_examples=60, deadline=None)
def test_any_bytes_leave_the_server_alive(data):
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        running = Running(directory)
        try:
            with running.connect() as client:
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                while client.recv(65536):
                    pass
            assert ask(running, GET)[0] == 200
        finally:
            running.stop()


def test_a_silent_and_a_slow_client_block_nobody(running):
    with running.connect() as silent, running.connect() as slow:
        slow.sendall(GET[:10])
        assert ask(running, GET)[0] == 200
        slow.sendall(GET[10:])
        assert answer(slow)[0] == 200
        silent.sendall(GET)
        assert answer(silent)[0] == 200


def test_a_client_that_does_not_read_a_large_answer_blocks_nobody(running):
    with running.connect() as lazy:
        lazy.sendall(b"GET /v1/big HTTP/1.1\r\n\r\n")
        assert ask(running, GET)[0] == 200
        assert len(answer(lazy)[1]) == 4_000_000


def test_a_client_that_vanishes_while_it_waits_is_forgotten(running):
    client = running.connect()
    client.sendall(b"GET /v1/later HTTP/1.1\r\n\r\n")
    while not running.later:
        assert ask(running, GET)[0] == 200
    client.close()
    while not running.later[0].closed:
        assert ask(running, GET)[0] == 200
    running.later[0].answer(200, b"{}")
    assert ask(running, GET)[0] == 200


def test_an_answer_given_later_is_sent(running):
    with running.connect() as client:
        client.sendall(b"GET /v1/later HTTP/1.1\r\n\r\n")
        while not running.later:
            assert ask(running, GET)[0] == 200
        running.later[0].answer(200, b"{}")
        running.server.wake()
        assert answer(client) == (200, b"{}")


def test_with_all_connections_idle_the_oldest_makes_room(running):
    clients = []
    for _ in range(MAX_CONNECTIONS):
        client = running.connect()
        client.sendall(GET)
        assert answer(client)[0] == 200
        clients.append(client)
    assert ask(running, GET)[0] == 200
    assert clients[0].recv(10) == b""
    clients[-1].sendall(GET)
    assert answer(clients[-1])[0] == 200
    for client in clients:
        client.close()


def test_clients_that_never_read_lock_nobody_out(running):
    lazy = []
    for _ in range(MAX_CONNECTIONS):
        client = running.connect()
        client.sendall(b"GET /v1/big HTTP/1.1\r\n\r\n")
        assert client.recv(1) == b"H"  # The answer is under way.
        lazy.append(client)
    assert ask(running, GET)[0] == 200
    # The one answered first made room; the last is served to its end.
    got = 0
    while part := lazy[0].recv(65536):
        got += len(part)
    assert got < 4_000_000
    assert len(lazy[-1].recv(65536)) > 0
    for client in lazy:
        client.close()


def test_half_a_request_is_given_up_after_a_while(running, monkeypatch):
    monkeypatch.setattr(server, "HEAD_TIMEOUT_S", 0.05)
    with running.connect() as client:
        client.sendall(GET[:20])
        assert client.recv(10) == b""


def test_tcp_needs_the_token(probe_dir):
    running = Running(probe_dir, token="secret")
    try:
        listener = rundir.listen_tcp(":0")
        address = listener.getsockname()
        assert address[0] == "127.0.0.1"
        running.server.add_listener(listener)
        running.server.wake()
        for head, status in (
            (b"", 401),
            (b"Authorization: Bearer wrong\r\n", 401),
            (b"Authorization: Basic secret\r\n", 401),
            (b"Authorization: Bearer\r\n", 401),
            (b"Authorization: Bearer secret\r\n", 200),
            (b"authorization: bearer secret\r\n", 200),
        ):
            with socket.create_connection(address, timeout=5) as client:
                client.sendall(b"GET /v1/echo HTTP/1.1\r\n" + head + b"\r\n")
                assert answer(client)[0] == status
        assert ask(running, GET)[0] == 200  # The Unix socket needs none.
    finally:
        running.stop()


def test_tcp_without_any_token_admits_nobody(probe_dir):
    running = Running(probe_dir, token=None)
    try:
        listener = rundir.listen_tcp("127.0.0.1:0")
        address = listener.getsockname()
        running.server.add_listener(listener)
        running.server.wake()
        with socket.create_connection(address, timeout=5) as client:
            client.sendall(b"GET /v1/echo HTTP/1.1\r\nAuthorization: Bearer \r\n\r\n")
            assert answer(client)[0] == 401
    finally:
        running.stop()


@pytest.mark.parametrize(
    "address",
    [
        "nowhere",
        "127.0.0.1:",
        ":70000",
        "127.0.0.1:x",
        ":\u00b2",
        ":" + "9" * 5000,
        "a" * 70 + ":80",
        "\x1b[2J:80",
    ],
)
def test_a_wrong_tcp_address_is_refused(address):
    with pytest.raises(rundir.RefusedError) as caught:
        rundir.listen_tcp(address)
    assert str(caught.value).isprintable()
