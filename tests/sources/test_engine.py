"""The probe's socket with something else behind it: silence, drips, bombs, noise."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtop.errors import UnreachableError
from kvtop.sources.answers import parse_detail, request_path
from kvtop.sources.base import SourceError
from kvtop.sources.engine import EngineSource, ProbeClient, get_once


@contextmanager
def behind(path: Path, answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server at `path` that reads one request and then does as it likes."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(4)

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                peer.recv(65536)
                try:
                    answer(peer)
                except OSError:
                    continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield str(path)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def whole(body: bytes, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s\r\n%s" % (len(body), more, body)


def test_an_answer_is_complete_without_waiting_for_the_end(tmp_path: Path) -> None:
    gate = threading.Event()

    def answer(peer: socket.socket) -> None:
        peer.sendall(whole(b"{}"))
        gate.wait(30)

    with behind(tmp_path / "s", answer) as path:
        assert get_once(path, "/", 20.0) == b"{}"
        gate.set()


def test_a_dripping_answer_is_given_up(tmp_path: Path) -> None:
    stop = threading.Event()

    def answer(peer: socket.socket) -> None:
        for byte in b"HTTP/1.1 200 OK\r\n" + b"x" * 10_000:
            peer.sendall(bytes([byte]))
            if stop.wait(0.02):
                return

    with behind(tmp_path / "s", answer) as path:
        begin = time.monotonic()
        with pytest.raises(UnreachableError):
            get_once(path, "/", 0.3)
        assert time.monotonic() - begin < 30  # the whole drip takes minutes
        stop.set()


@pytest.mark.parametrize("answer", [b"", b"junk\r\n\r\n", b"HTTP/1.1 500 No\r\n\r\n", b"\0" * 99])
def test_noise_is_not_an_answer(tmp_path: Path, answer: bytes) -> None:
    with (
        behind(tmp_path / "s", lambda peer: peer.sendall(answer)) as path,
        pytest.raises(UnreachableError),
    ):
        get_once(path, "/", 5.0)


async def test_a_packed_answer_is_refused_unopened(tmp_path: Path) -> None:
    bomb = gzip.compress(gzip.compress(bytes(50_000_000)))
    head = b"Content-Encoding: gzip, gzip\r\n"
    with behind(tmp_path / "s", lambda peer: peer.sendall(whole(bomb, head))) as path:
        source = EngineSource(path, 1)
        with pytest.raises(SourceError, match="packs its answer"):
            await source.read()
        await source.close()


async def test_a_slow_probe_is_given_longer_until_it_answers(tmp_path: Path) -> None:
    silent = 3

    def answer(peer: socket.socket) -> None:
        nonlocal silent
        if silent:
            silent -= 1
            peer.recv(1)  # until the client gives up
        else:
            peer.sendall(whole(b"{}"))

    with behind(tmp_path / "s", answer) as path:
        client = ProbeClient(path, timeout_s=0.05)
        given = []
        for _ in range(3):
            given.append(client.patience_s)
            with pytest.raises(SourceError, match="in time"):
                await client.get("/v1/snapshot")
        assert given == [0.05, 0.1, 0.2]
        client.patience_s = 5.0
        assert await client.get("/v1/snapshot") == b"{}"
        assert client.patience_s == 0.05
        await client.close()


async def test_an_endless_answer_is_given_up(tmp_path: Path) -> None:
    def answer(peer: socket.socket) -> None:
        peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n")
        while True:
            peer.sendall(b" " * 65536)

    with behind(tmp_path / "s", answer) as path:
        client = ProbeClient(path)
        with pytest.raises(SourceError, match="without end"):
            await client.get("/")
        await client.close()


async def test_ids_that_no_address_can_hold(tmp_path: Path) -> None:
    with behind(tmp_path / "s", lambda peer: peer.sendall(whole(b"{}"))) as path:
        client = ProbeClient(path)
        assert await client.get(request_path("\ud800lone")) == b"{}"
        with pytest.raises(SourceError):
            await client.get(request_path("\U0001f600" * 20_000))
        await client.close()


@pytest.mark.parametrize(
    "body",
    [
        b'{"tables":[{"group":0,"blocks":[1e999]}],"refs":[[1]],"shared_with":{}}',
        b'{"tables":[{"group":0,"blocks":[-1]}],"refs":[[1]],"shared_with":{}}',
        b'{"tables":[{"group":0,"blocks":[1]}],"refs":[[1,2]],"shared_with":{}}',
        b"[" * 200_000,
        b"{}",
    ],
)
def test_a_detail_that_makes_no_sense_is_refused(body: bytes) -> None:
    from kvtop.errors import BadDataError

    with pytest.raises(BadDataError):
        parse_detail("x", body)


def test_a_request_that_has_left_is_said() -> None:
    assert "no longer" in parse_detail("x", b'{"found": false, "tables": []}').error
