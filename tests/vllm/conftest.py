"""One real vLLM for the whole suite, under one bounded load that many tests look at."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvtop.errors import UnreachableError
from kvtop.model.detail import Detail
from kvtop.model.snapshot import Engine
from kvtop.sources.answers import parse_detail, parse_snapshot, request_path
from kvtop.sources.engine import get_once
from tests.vllm import load
from tests.vllm.server import Server, make_model, python_or_reason

ORACLE = Path(__file__).with_name("oracle")
BLOCKS = 64
ENOUGH_LOOKS = 220
"""Looks under load; of these at least every fourth is at the start of a step."""
ENOUGH_TABLES = 20
"""Block tables looked at under load."""
POLL_S = 0.05


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter of the vLLM environment."""
    python, reason = python_or_reason()
    if not python:
        if os.environ.get("KVTOP_VLLM_REQUIRED"):
            pytest.fail(reason)
        pytest.skip(reason)
    return python


@pytest.fixture(scope="session")
def model(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return make_model(python, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def server(python: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with 64 blocks of 128 tokens, the probe, and the oracle beside it."""
    folder = tmp_path_factory.mktemp("server")
    server = Server(
        python,
        model,
        folder,
        ["--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "16"],
        {"KVTOP_ORACLE": str(folder / "oracle.jsonl"), "PYTHONPATH": str(ORACLE)},
    )
    try:
        yield server.wait()
    finally:
        server.stop()


def probe_socket(server: Server, role: str = "engine", patience_s: float = 20.0) -> str:
    """The probe's socket once it answers."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        for path in server.sockets.glob(f"{role}-*.sock"):
            try:
                get_once(str(path), "/v1/hello", 2.0)
                return str(path)
            except UnreachableError:
                continue
        time.sleep(0.2)
    raise AssertionError(f"no {role} probe answers in {server.sockets}")


@dataclass
class Record:
    """What the probe said during a load, and what the oracle saw."""

    before: Engine
    snapshots: list[Engine] = field(default_factory=list)
    details: list[Detail] = field(default_factory=list)
    after: Engine | None = None
    result: dict[str, int] = field(default_factory=dict)
    oracle: dict[int, dict[str, Any]] = field(default_factory=dict)


@pytest.fixture(scope="session")
def record(server: Server) -> Record:
    """A mixed load with vanishing clients, then a preemption storm, watched at 20 Hz."""
    path = probe_socket(server)

    def look() -> Engine:
        return parse_snapshot(get_once(path, "/v1/snapshot", 5.0))

    record = Record(look())
    stop = threading.Event()

    def watch() -> None:
        turn = 0
        while not stop.wait(POLL_S):
            engine = look()
            record.snapshots.append(engine)
            turn += 1
            if engine.requests and turn % 5 == 0:
                wanted = engine.requests[turn % len(engine.requests)].id
                try:
                    body = get_once(path, request_path(wanted), 5.0)
                except UnreachableError:
                    continue  # it has just left
                if json.loads(body).get("found"):
                    record.details.append(parse_detail(wanted, body))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        record.result = asyncio.run(load.run(server.url, load.mixed(60, seed=1)))
        storm = asyncio.run(load.run(server.url, load.storm()))
        # A fast machine is soon through, and on a busy one looks are rare: there must be enough.
        for seed in range(2, 20):
            if len(record.snapshots) > ENOUGH_LOOKS and len(record.details) > ENOUGH_TABLES:
                break
            asyncio.run(load.run(server.url, load.mixed(60, seed=seed)))
        record.result = {k: record.result[k] + storm[k] for k in storm}
    finally:
        stop.set()
        watcher.join()
    end = time.monotonic() + 20
    while time.monotonic() < end:
        record.after = look()
        if not record.after.requests:
            break
        time.sleep(0.2)
    for line in (server.log.parent / "oracle.jsonl").read_text().splitlines():
        if line.endswith("}"):
            seen = json.loads(line)
            record.oracle[seen["step"]] = seen
    return record


@pytest.fixture
def quiet_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@pytest.fixture(scope="session", autouse=True)
def _turns() -> Iterator[None]:
    """Looks are not starved by the load that the tests make themselves."""
    with load.taking_turns():
        yield
