"""The engine process from outside: real process, real probe, real sockets."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtop.demo import serve as serve_module
from kvtop.demo.clock import PacedClock
from kvtop.demo.launch import Running, running
from kvtop.demo.source import DemoGpuSource
from kvtop.errors import KvtopError, UsageError
from kvtop.model.blocks import BlockState
from kvtop.sources.engine import EngineSource

FREE, CACHED, NULL = int(BlockState.FREE), int(BlockState.CACHED), int(BlockState.NULL)


def column(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def client(path: Path) -> httpx.Client:
    return httpx.Client(
        transport=httpx.HTTPTransport(uds=str(path)), base_url="http://probe", timeout=10.0
    )


def check(snapshot: dict[str, Any]) -> None:
    """The three identities, on one answer of the probe."""
    (pool,) = snapshot["pools"]
    counts = pool["counts"]
    states, refs, tables = (column(pool[name]) for name in ("states", "refs", "tables"))
    assert len(states) == len(refs) == len(tables) == counts["total"]
    assert sum(v for k, v in counts.items() if k != "total") == counts["total"]
    assert counts["free"] + counts["cached"] == pool["free_queue"]
    seen = Counter(states)
    for state in BlockState:
        assert seen[int(state)] == counts[state.name.lower()]
    ghosts = 0
    for state, ref, held in zip(states, refs, tables, strict=True):
        if state == BlockState.GHOST:
            ghosts += 1
            assert (ref, held) == (1, 0)
        elif state != NULL:
            assert ref == held
            assert (ref == 0) == (state in (FREE, CACHED))
    rows = [
        dict(zip(snapshot["requests"]["columns"], row, strict=True))
        for row in snapshot["requests"]["rows"]
    ]
    assert sum(row["blocks"] for row in rows) == sum(
        held for state, held in zip(states, tables, strict=True) if state != NULL
    )


def eventually(what: Callable[[], bool], limit_s: float = 20.0) -> bool:
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        if what():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("scenario", ["leak", "preempt-storm"])
def test_identities_hold_on_every_snapshot_and_nothing_is_left_behind(scenario: str) -> None:
    with running(scenario, seed=5, blocks=2048, speed=5.0) as engine:
        assert engine.directory.stat().st_mode & 0o777 == 0o700
        with client(engine.socket) as probe:
            hello = probe.get("/v1/hello").json()
            assert (hello["role"], hello["demo"], hello["loaded_by"]) == ("engine", True, "demo")
            assert hello["missing"] == []
            steps, taken = [], 0
            while taken < 30:
                answer = probe.get("/v1/snapshot")
                if answer.status_code == 503:  # No cut could be taken in time; ask again.
                    continue
                snapshot = answer.json()
                check(snapshot)
                assert snapshot["engine"]["simulated"] is True
                assert snapshot["probe"]["missing"] == []
                assert snapshot["probe"]["errors"] == 0
                assert snapshot["probe"]["drift"] == 0
                steps.append(snapshot["probe"]["step"])
                taken += 1
                time.sleep(0.05)
            assert steps == sorted(steps)
            assert steps[-1] > steps[0]
        page = httpx.get(engine.metrics_url, trust_env=False).text
        assert any(f.name == "vllm:kv_cache_usage_perc" for f in _families(page))
    assert not engine.directory.exists()
    assert not psutil.pid_exists(engine.pid)


def _families(page: str) -> list[Any]:
    return list(text_string_to_metric_families(page))


async def test_kvtops_own_sources_read_it() -> None:
    with running("disconnect", seed=1, speed=10.0) as engine:
        source, gpus = EngineSource(engine.socket, engine.pid), DemoGpuSource(engine.url)
        try:
            read = await source.read()
            (gpu,) = await gpus.read()
        finally:
            await source.close()
            await gpus.close()
        assert read.simulated
        assert read.model == "Qwen/Qwen3-8B"
        assert read.blocks is not None
        assert read.blocks.total == 20_480
        assert read.block_bytes == 16 * 147_456
        assert gpu.processes is not None
        assert gpu.processes[0].engine_pid == engine.pid
        clients = engine.directory / f"api-{engine.pid}.sock"
        assert eventually(lambda: _zombies(engine, clients) > 0)


def _zombies(engine: Running, clients: Path) -> int:
    """Requests in the engine that were without a client before and after it was asked."""
    with client(clients) as api, client(engine.socket) as probe:
        before = set(api.get("/v1/snapshot").json()["clients"])
        answer = probe.get("/v1/snapshot", params={"columns": "0"})
        if answer.status_code != 200:
            return 0
        after = set(api.get("/v1/snapshot").json()["clients"])
        return len({row[0] for row in answer.json()["requests"]["rows"]} - before - after)


def test_it_stops_when_its_parent_dies(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from kvtop.demo.launch import running\n"
        "with running('healthy') as engine:\n"
        "    print(engine.pid, engine.directory, flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, directory = parent.stdout.readline().split()
    parent.kill()
    parent.wait(10)
    parent.stdout.close()
    assert eventually(lambda: not psutil.pid_exists(int(pid)))
    assert eventually(lambda: not Path(directory).exists())


def test_a_folder_of_the_users_own_is_kept(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with running("healthy", directory=tmp_path) as engine:
        assert engine.directory == tmp_path
        assert engine.socket.parent == tmp_path
        os.kill(engine.pid, signal.SIGINT)
        assert eventually(lambda: not engine.socket.exists())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"scenario": "nope"}, "scenario"),
        ({"blocks": 3}, "--blocks"),
        ({"speed": 0.0}, "--speed"),
        ({"speed": float("nan")}, "--speed"),
    ],
)
def test_values_that_cannot_be_simulated_are_refused(values: dict[str, Any], word: str) -> None:
    options = {"scenario": "healthy", "seed": 0, "blocks": None, "speed": 1.0, **values}
    with pytest.raises(UsageError) as caught:
        serve_module.serve(**options, directory=None, parent=None, ready=lambda _: None)
    assert word in caught.value.line()
    assert "\n" not in caught.value.line()


def test_a_refusal_reaches_the_parent_as_it_was_said() -> None:
    with pytest.raises(UsageError, match="--blocks 7 is not possible"), running(blocks=7):
        pass


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(KvtopError, match="mode 0700"), running(directory=tmp_path):
        pass


def test_the_ready_line_is_one_line_of_json(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    process = subprocess.Popen(
        [sys.executable, "-m", "kvtop.demo.serve", "--directory", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    rest, errors = process.communicate(timeout=20)
    assert set(ready) == {"pid", "metrics_url", "socket", "directory"}
    assert ready["pid"] == process.pid
    assert ready["metrics_url"].startswith("http://127.0.0.1:")
    assert (rest, errors, process.returncode) == ("", "", 0)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT], ids=lambda n: n.name
)
def test_each_way_of_ending_it_stops_the_clock_and_is_given_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    clock = PacedClock(1.0)
    with serve_module._stopped_by_signals(clock):
        signal.raise_signal(number)
        assert clock.stopping
    assert signal.getsignal(number) is before


def test_nohup_is_obeyed() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    clock = PacedClock(1.0)
    try:
        with serve_module._stopped_by_signals(clock):
            signal.raise_signal(signal.SIGHUP)
            assert not clock.stopping
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
