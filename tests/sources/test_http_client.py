"""Requests that are given up at any moment must not use up the connections."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtop.sources.base import SourceError
from kvtop.sources.engine import ProbeClient
from kvtop.sources.metrics import MetricsSource


def answer(peer: socket.socket) -> None:
    with peer:
        try:
            while peer.recv(65536):
                time.sleep(random.random() * 0.004)
                peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        except OSError:
            return


def serve(listener: socket.socket) -> None:
    while True:
        try:
            peer, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=answer, args=(peer,), daemon=True).start()


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen(64)
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield str(tmp_path / "s")
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


async def give_up_often(ask: object, *, rng: random.Random) -> None:
    for _ in range(150):
        task = asyncio.ensure_future(ask())  # type: ignore[operator]
        await asyncio.sleep(rng.random() * 0.006)
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.01)  # a loop that is held up, as on a busy machine
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_probe_is_read_again_after_reads_that_were_given_up(path: str) -> None:
    client = ProbeClient(path, 5.0)
    await give_up_often(lambda: client.get("/v1/snapshot"), rng=random.Random(1))
    assert await client.get("/v1/snapshot") == b"{}"
    await client.close()


async def test_a_page_is_read_again_after_reads_that_were_given_up(port: int) -> None:
    source = MetricsSource(f"http://127.0.0.1:{port}")
    await give_up_often(lambda: source._get("/version"), rng=random.Random(2))
    try:
        assert await source._get("/version") == b"{}"
    except SourceError as error:  # pragma: no cover - said plainly when it fails
        raise AssertionError(error.reason) from error
    await source.close()
