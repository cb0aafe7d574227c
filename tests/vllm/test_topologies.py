"""Several engines, several workers, several KV-cache groups, and no server at all."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtop.errors import ExitCode
from kvtop.model.snapshot import Engine
from kvtop.sources.answers import parse_detail, parse_snapshot, request_path
from kvtop.sources.engine import get_once
from tests.vllm import load
from tests.vllm.conftest import probe_socket
from tests.vllm.server import CONFIG, START_S, Server, check_identities, make_model

pytestmark = pytest.mark.vllm

BLOCKS = 48
GEMMA_BLOCKS = 64
"""The least that holds one request of full length in two groups is 52."""
LOOKS = 25
WINDOW = 256

GEMMA = {
    **CONFIG,
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 32,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
}
"""Every second layer attends to a window only: two KV-cache groups."""

LLM = """
import os, signal, sys, time
from vllm import LLM, SamplingParams

def main():
    signal.alarm(450)  # Ends it even where the test was killed.
    # Not a name that the probe knows.
    offline = LLM(sys.argv[1], load_format="dummy", enforce_eager=True, max_model_len=2048,
                  num_gpu_blocks_override=48, max_num_seqs=8, disable_log_stats=True)
    print("built", flush=True)
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    while not os.path.exists(sys.argv[2]):
        offline.generate([f"{i} says " * 40 for i in range(6)], params, use_tqdm=False)
    time.sleep(300)

if __name__ == "__main__":
    main()
"""


@contextmanager
def served(
    python: str, model: Path, folder: Path, *arguments: str, **environment: str
) -> Iterator[Server]:
    """A server with small pools, always stopped."""
    sizes = ("--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "8")
    server = Server(python, model, folder, [*sizes, *arguments], environment)
    try:
        yield server.wait()
    finally:
        server.stop()


def once(sockets: Path, *arguments: str) -> dict[str, Any]:
    """`kvtop once --json`, again while a busy machine keeps it from seeing all in time."""
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-m", "kvtop", "once", "--json", "--no-gpus", *arguments],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
            env={**os.environ, "KVTOP_DIR": str(sockets)},
        )
        if done.returncode not in (ExitCode.UNREACHABLE, ExitCode.NOT_FOUND):
            break
    assert (done.returncode, done.stderr) == (0, ""), done.stdout[-2000:]
    data: dict[str, Any] = json.loads(done.stdout)
    return data


def roles(sockets: Path, patience_s: float = 30.0, **wanted: int) -> dict[str, int]:
    """How many probes of each role there are, once there are as many as wanted."""
    end = time.monotonic() + patience_s
    while True:
        names = [path.name.split("-")[0] for path in sockets.glob("*.sock")]
        found = {role: names.count(role) for role in sorted(set(names))}
        if found == wanted or time.monotonic() > end:
            return found
        time.sleep(0.25)


def load_and_look(server: Server, paths: list[str]) -> list[list[Engine]]:
    """Cuts of each engine while it works."""

    async def both() -> list[list[Engine]]:
        jobs = [load.Job(prompt_chars=400, max_tokens=250) for _ in range(10)]
        working = asyncio.create_task(load.run(server.url, jobs))
        seen: list[list[Engine]] = [[] for _ in paths]
        while not working.done() and len(seen[0]) < LOOKS:
            for looks, path in zip(seen, paths, strict=True):
                body = await asyncio.to_thread(get_once, path, "/v1/snapshot", 10.0)
                looks.append(parse_snapshot(body))
            await asyncio.sleep(0.05)
        assert (await working)["finished"] == len(jobs)
        return seen

    return asyncio.run(both())


def test_data_parallel_engines_each_have_their_own_map(
    python: str, model: Path, tmp_path: Path
) -> None:
    with served(python, model, tmp_path, "--data-parallel-size", "2") as server:
        assert roles(server.sockets, engine=2, api=1, worker=2) == {
            "api": 1,
            "engine": 2,
            "worker": 2,
        }
        paths = [str(p) for p in sorted(server.sockets.glob("engine-*.sock"))]
        seen = load_and_look(server, paths)
        for looks in seen:
            for engine in looks:
                check_identities(engine, BLOCKS)
        data = once(server.sockets, "--url", server.url)
    assert {looks[0].engine for looks in seen} == {0, 1}
    assert all(any(e.requests for e in looks) for looks in seen)
    engines = data["engines"]
    assert [e["engine"] for e in engines] == [0, 1]
    assert len({e["pid"] for e in engines}) == 2
    # /metrics has the sum of both in `num_gpu_blocks`, under either engine's label.
    assert [e["blocks"]["total"] for e in engines] == [BLOCKS, BLOCKS]
    assert all(len(e["worker_pids"]) == 1 for e in engines)
    assert engines[0]["worker_pids"] != engines[1]["worker_pids"]


def test_tensor_parallel_workers_belong_to_their_engine(
    python: str, model: Path, tmp_path: Path
) -> None:
    arguments = ("--tensor-parallel-size", "2")
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with served(python, model, tmp_path, *arguments, **environment) as server:
        wanted = {"api": 1, "engine": 1, "worker": 2}
        assert roles(server.sockets, **wanted) == wanted
        ranks = {
            json.loads(get_once(str(path), "/v1/snapshot", 10.0))["rank"]
            for path in server.sockets.glob("worker-*.sock")
        }
        pids = {int(p.stem.split("-")[1]) for p in server.sockets.glob("worker-*.sock")}
        (engine,) = once(server.sockets, "--url", server.url)["engines"]
    assert ranks == {0, 1}
    assert set(engine["worker_pids"]) == pids
    # One head of the two in each worker: together as much as one worker would have.
    assert engine["block_bytes"] == 2 * 2 * 2 * 32 * 2 * 128
    assert engine["blocks"]["total"] == BLOCKS


def test_two_kv_cache_groups_share_one_pool(python: str, tmp_path: Path) -> None:
    model = make_model(python, tmp_path / "gemma")
    (model / "config.json").write_text(json.dumps(GEMMA))
    sizes = ("--num-gpu-blocks-override", str(GEMMA_BLOCKS))
    with served(python, model, tmp_path, *sizes) as server:
        path = probe_socket(server)
        (looks,) = load_and_look(server, [path])
        working = subprocess.Popen(
            [sys.executable, "-c", _ONE_REQUEST, server.url],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            detail = _long_request(path)
        finally:
            working.kill()
            working.wait()
    for engine in looks:
        check_identities(engine, GEMMA_BLOCKS)
    groups = looks[0].groups
    assert sorted((g.kind, g.sliding_window_tokens) for g in groups) == [
        ("FullAttention", None),
        ("SlidingWindow", WINDOW),
    ]
    assert max(len(e.requests or ()) for e in looks) > 2
    tables = {group: blocks for group, _, blocks in detail.tables}
    window = next(g.index for g in groups if g.kind == "SlidingWindow")
    (full,) = [g.index for g in groups if g.index != window]
    # The window has left the first blocks, and the null block stands for them.
    assert tables[window][0] == 0
    assert 0 not in tables[full]
    assert len(tables[window]) == len(tables[full])
    assert set(tables[window]) & set(tables[full]) <= {0}


_ONE_REQUEST = """
import asyncio, sys
from tests.vllm import load
asyncio.run(load.run(sys.argv[1], [load.Job(prompt_chars=900, max_tokens=3000)]))
"""


def _long_request(path: str) -> Any:
    """Tables of a request that is far beyond its window."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        engine = parse_snapshot(get_once(path, "/v1/snapshot", 10.0))
        for request in engine.requests or ():
            if (request.computed_tokens or 0) > 3 * WINDOW:
                return parse_detail(request.id, get_once(path, request_path(request.id), 10.0))
        time.sleep(0.1)
    raise AssertionError("no long request was seen")


@pytest.mark.parametrize("multiprocessing", ["0", "1"])
def test_an_llm_without_a_server(
    python: str, model: Path, tmp_path: Path, multiprocessing: str
) -> None:
    script = tmp_path / "offline.py"
    script.write_text(LLM)
    sockets = tmp_path / "sockets"
    log, enough = tmp_path / "log", tmp_path / "enough"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [python, str(script), str(model), str(enough)],
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "OMP_NUM_THREADS": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": multiprocessing,
                "KVTOP_DIR": str(sockets),
            },
        )
    try:
        end = time.monotonic() + START_S
        while b"built" not in log.read_bytes() and process.poll() is None:
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.5)
        wanted = {"engine": 1} if multiprocessing == "0" else {"api": 1, "engine": 1, "worker": 1}
        assert roles(sockets, **wanted) == wanted, log.read_text()[-3000:]
        (path,) = sockets.glob("engine-*.sock")
        looks = []
        end = time.monotonic() + 60
        while len(looks) < LOOKS and time.monotonic() < end:
            engine = parse_snapshot(get_once(str(path), "/v1/snapshot", 10.0))
            check_identities(engine, BLOCKS)
            if engine.requests:
                looks.append(engine)
            time.sleep(0.05)
        # It takes all the processor while it works, and kvtop is wanted soon.
        enough.touch()
        (shown,) = once(sockets, "--pid", str(process.pid))["engines"]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
    assert len(looks) == LOOKS
    pid = int(path.stem.split("-")[1])
    assert (pid == process.pid) is (multiprocessing == "0")
    assert (shown["pid"], shown["blocks"]["total"]) == (pid, BLOCKS)
    assert shown["requests"] is not None
    assert len({e.probe.step for e in looks if e.probe}) > 5
