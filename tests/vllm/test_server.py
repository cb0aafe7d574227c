"""kvtop beside a real server: commands, quiet, stopped, killed, restarted, switched off."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from kvtop.config import Options
from kvtop.errors import ExitCode
from kvtop.model.snapshot import Engine, Snapshot
from kvtop.sources.answers import parse_snapshot
from kvtop.sources.engine import get_once
from kvtop.stream.live import Live
from kvtop.stream.target import Target
from tests.vllm import load
from tests.vllm.conftest import Record, probe_socket
from tests.vllm.server import Server

pytestmark = pytest.mark.vllm


def kvtop(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtop", *arguments, "--url", server.url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "KVTOP_DIR": str(server.sockets)},
    )


def test_once_as_json_is_the_contract(server: Server, record: Record) -> None:
    done = kvtop(server, "once", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert list(data) == ["schema", "time", "sources", "gpus", "engines", "stacks", "findings"]
    (engine,) = data["engines"]
    assert engine["pid"] == server.engine_pid()
    assert engine["model"] == "tiny"
    assert engine["vllm_version"] == "0.32.0"
    assert engine["block_size"] == 128
    names = {"total", "null", "free", "cached", "used", "shared", "held", "ghost"}
    assert set(engine["blocks"]) >= names
    assert engine["blocks"]["total"] == 64
    assert engine["requests"] == []
    assert {"version", "scan_us", "cost_percent", "step"} <= set(engine["probe"])
    assert engine["metrics"]["preemptions_total"] == engine["counters"]["preemptions"]


def test_once_as_text(server: Server, record: Record) -> None:
    done = kvtop(server, "once")
    assert done.returncode == 0
    assert "total 64 x 128 tok" in done.stdout
    assert "no requests" in done.stdout


def test_once_without_a_server(server: Server, quiet_port: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvtop", "once", "--url", f"127.0.0.1:{quiet_port}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == ExitCode.NOT_FOUND
    assert f"nothing answers at 127.0.0.1:{quiet_port}" in done.stdout


def probe_threads(pid: int) -> set[int]:
    """Native ids of the probe's threads; before Python 3.14 the kernel has no names for them."""
    spy = Path(sys.executable).with_name("py-spy")
    shown = subprocess.run(
        [spy, "dump", "--json", "--nonblocking", "--pid", str(pid)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    threads = json.loads(shown.stdout)
    return {t["os_thread_id"] for t in threads if str(t["thread_name"]).startswith("kvtop")}


def cpu_of(pid: int, threads: set[int]) -> float:
    """Seconds of CPU that these threads have used."""
    found = [t for t in psutil.Process(pid).threads() if t.id in threads]
    assert len(found) == len(threads)
    return sum(t.user_time + t.system_time for t in found)


def test_without_a_client_the_probe_sleeps(server: Server, record: Record) -> None:
    pid = server.engine_pid()
    threads = probe_threads(pid)
    assert threads
    time.sleep(6)  # the last client is forgotten
    before = cpu_of(pid, threads)
    asyncio.run(load.run(server.url, load.mixed(8, seed=3)))
    assert cpu_of(pid, threads) - before <= 0.02


def watched(server: Server, wanted: object, limit_s: float = 30.0) -> Snapshot:
    """The first snapshot of the live stream for which `wanted` holds."""

    async def watch() -> Snapshot:
        target = Target(socket_dir=server.sockets, url=server.url)
        live = Live(Options(interval_s=0.25, stacks=False, gpus=False), target)
        end = time.monotonic() + limit_s
        last = None
        try:
            async for snapshot in live.snapshots():
                last = snapshot
                if wanted(snapshot):  # type: ignore[operator]
                    return snapshot
                if time.monotonic() > end:
                    break
        finally:
            await live.close()
        raise AssertionError(f"never came: {last}")

    return asyncio.run(watch())


def ours(snapshot: Snapshot) -> Engine | None:
    return snapshot.engines[0] if snapshot.engines else None


def test_a_stopped_engine_is_not_shown_as_healthy(server: Server, record: Record) -> None:
    pid = server.engine_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        snapshot = watched(server, lambda s: (e := ours(s)) and e.probe_reason)
        engine = ours(snapshot)
        assert engine is not None
        assert engine.process_state == "T"
        assert engine.probe_reason
    finally:
        os.kill(pid, signal.SIGCONT)
    snapshot = watched(server, lambda s: (e := ours(s)) and e.probe and not e.probe_reason)
    assert ours(snapshot)


def test_vanished_clients_leave_nothing_behind(server: Server, record: Record) -> None:
    jobs = [load.Job(prompt_chars=300, max_tokens=2000, leave_after=3) for _ in range(6)]
    assert asyncio.run(load.run(server.url, jobs))["left"] == 6
    path = probe_socket(server)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        engine = parse_snapshot(get_once(path, "/v1/snapshot", 5.0))
        if not engine.requests:
            break
        time.sleep(0.2)
    assert engine.requests == ()
    assert engine.blocks is not None
    assert engine.blocks.used == engine.blocks.ghost == engine.blocks.held == 0


@pytest.fixture
def plain_server(
    python: str, model: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Server]:
    """A second server, started with the environment that the test names."""
    server = Server(python, model, tmp_path, ["--num-gpu-blocks-override", "64"], request.param)
    try:
        yield server.wait()
    finally:
        server.stop()


@pytest.mark.parametrize("plain_server", [{"KVTOP_PROBE": "0"}], indirect=True)
def test_switched_off_there_is_no_probe_and_kvtop_says_so(plain_server: Server) -> None:
    assert not list(plain_server.sockets.glob("*.sock"))
    snapshot = watched(plain_server, lambda s: (e := ours(s)) and e.metrics)
    engine = ours(snapshot)
    assert engine is not None
    assert engine.blocks is None
    assert engine.probe_reason
    assert engine.metrics is not None
    assert engine.metrics.block_size_tokens == 128


def test_death_and_restart_are_survived(python: str, model: Path, tmp_path: Path) -> None:
    first = Server(python, model, tmp_path / "a", ["--num-gpu-blocks-override", "64"])
    servers = [first]

    async def story() -> list[str]:
        target = Target(socket_dir=None, url=first.url)
        live = Live(Options(interval_s=0.5, stacks=False, gpus=False), target)
        stages: list[str] = []
        end = time.monotonic() + 400
        first_pid = None
        try:
            async for snapshot in live.snapshots():
                assert time.monotonic() < end, stages
                engine = ours(snapshot)
                if not stages and engine and engine.probe and engine.alive:
                    first_pid = engine.pid
                    stages.append("alive")
                    first.stop()
                elif stages == ["alive"] and engine and engine.state == "gone":
                    stages.append("gone")
                    again = Server(
                        python,
                        model,
                        tmp_path / "b",
                        ["--num-gpu-blocks-override", "64"],
                        port=first.port,
                        sockets=first.sockets,
                    )
                    servers.append(again)
                elif stages == ["alive", "gone"] and engine and engine.probe and engine.alive:
                    assert engine.pid != first_pid
                    stages.append("back")
                    return stages
        finally:
            await live.close()
        return stages

    os.environ["KVTOP_DIR"] = str(first.sockets)
    try:
        assert asyncio.run(story()) == ["alive", "gone", "back"]
    finally:
        del os.environ["KVTOP_DIR"]
        for server in servers:
            server.stop()
