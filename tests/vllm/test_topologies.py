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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtop.errors import ExitCode, UnreachableError
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
PATIENCE_S = 240.0
"""Longest wait on a machine that others keep busy too."""
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

LFM2 = {
    **CONFIG,
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    "norm_eps": 1e-5,
    "conv_bias": False,
    "conv_dim": 64,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_ff_dim": 128,
    "block_multiple_of": 32,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
}
"""Every second layer keeps a state a request, as Mamba does, and no keys and values."""

UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Where there are fewer cores than workers."""

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
    server = started(python, model, folder, *arguments, **environment)
    try:
        yield server.wait()
    finally:
        server.stop(kill=True)


def started(python: str, model: Path, folder: Path, *arguments: str, **environment: str) -> Server:
    """The same on its way up."""
    sizes = ("--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "8")
    sockets = folder.parent / "sockets"
    return Server(python, model, folder, [*sizes, *arguments], environment, sockets=sockets)


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


def roles(sockets: Path, patience_s: float = 60.0, **wanted: int) -> dict[str, int]:
    """How many probes of each role there are, once there are as many as wanted."""
    end = time.monotonic() + patience_s
    while True:
        names = [path.name.split("-")[0] for path in sockets.glob("*.sock")]
        found = {role: names.count(role) for role in sorted(set(names))}
        if found == wanted or time.monotonic() > end:
            return found
        time.sleep(0.25)


@contextmanager
def two_servers(python: str, model: Path, folder: Path) -> Iterator[tuple[Server, Server]]:
    """One with two API servers and one that can be paused, up at the same time."""
    sizes = ("--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "8")
    sockets = folder / "sockets"
    two = (*sizes, "--api-server-count", "2")
    first = Server(python, model, folder / "first", two, sockets=sockets, command=True)
    second = started(python, model, folder / "second", VLLM_SERVER_DEV_MODE="1")
    try:
        yield first.wait(), second.wait()
    finally:
        first.stop(kill=True)
        second.stop(kill=True)


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


def test_data_and_tensor_parallel(python: str, model: Path, tmp_path: Path) -> None:
    arguments = ("--data-parallel-size", "2", "--tensor-parallel-size", "2")
    with served(python, model, tmp_path / "server", *arguments, **UNBOUND) as server:
        wanted = {"api": 1, "engine": 2, "worker": 4}
        assert roles(server.sockets, **wanted) == wanted
        paths = [str(p) for p in sorted(server.sockets.glob("engine-*.sock"))]
        seen = load_and_look(server, paths)
        for looks in seen:
            for engine in looks:
                check_identities(engine, BLOCKS)
        workers = {
            int(p.stem.split("-")[1]): json.loads(get_once(str(p), "/v1/snapshot", 10.0))["rank"]
            for p in server.sockets.glob("worker-*.sock")
        }
        engines = once(server.sockets, "--url", server.url)["engines"]
    assert {looks[0].engine for looks in seen} == {0, 1}
    assert all(any(e.requests for e in looks) for looks in seen)
    assert [e["engine"] for e in engines] == [0, 1]
    assert len({e["pid"] for e in engines}) == 2
    # /metrics has the sum of both in `num_gpu_blocks`, under either engine's label.
    assert [e["blocks"]["total"] for e in engines] == [BLOCKS, BLOCKS]
    # Two workers of each, and none of both.
    assert [len(e["worker_pids"]) for e in engines] == [2, 2]
    assert {pid for e in engines for pid in e["worker_pids"]} == set(workers)
    assert all({workers[pid] for pid in e["worker_pids"]} == {0, 1} for e in engines)
    # One head of the two in each worker: together as much as one worker would have.
    assert {e["block_bytes"] for e in engines} == {2 * 2 * 2 * 32 * 2 * 128}


def test_pipeline_parallel(python: str, model: Path, tmp_path: Path) -> None:
    # Without a compilation the CPU build of 0.32 makes no buffers between the stages, and its
    # second worker ends at the first request.
    compiled = ("--no-enforce-eager", "--compilation-config", '{"mode": 1, "backend": "eager"}')
    arguments = ("--pipeline-parallel-size", "2", *compiled)
    with served(python, model, tmp_path / "server", *arguments, **UNBOUND) as server:
        wanted = {"api": 1, "engine": 1, "worker": 2}
        assert roles(server.sockets, **wanted) == wanted
        (looks,) = load_and_look(server, [probe_socket(server)])
        pids = {int(p.stem.split("-")[1]) for p in server.sockets.glob("worker-*.sock")}
        (engine,) = once(server.sockets, "--url", server.url)["engines"]
    for look in looks:
        check_identities(look, BLOCKS)
    assert any(look.requests for look in looks)
    assert set(engine["worker_pids"]) == pids
    # Each stage has its own layers: what a block takes in all of them is not told anywhere.
    assert engine["block_bytes"] is None


def test_two_servers_one_of_them_with_two_api_servers(
    python: str, model: Path, tmp_path: Path
) -> None:
    with two_servers(python, model, tmp_path) as (first, second):
        wanted = {"api": 3, "engine": 2, "worker": 2}
        assert roles(first.sockets, **wanted) == wanted
        with load.Steady(first.url, clients=8) as steady, load.Steady(second.url, 2):
            every = once(first.sockets, "--rates")["engines"]
            (alone,) = once(first.sockets, "--url", first.url, "--rates")["engines"]
        assert steady.done["failed"] == 0
        # Others may run on this machine too.
        keys = sorted(f"127.0.0.1:{server.port}" for server in (first, second))
        both = [e for e in every if e["server"] in keys]
        assert [e["server"] for e in both] == keys
        assert [e["blocks"]["total"] for e in both] == [BLOCKS, BLOCKS]
        assert {e["pid"] for e in both} == {first.engine_pid(), second.engine_pid()}
        assert len({pid for e in both for pid in e["worker_pids"]}) == 2
        # Its requests have come through two processes, and either knows only its own.
        assert alone["pid"] == first.engine_pid()
        assert alone["requests"]
        assert {r["client"] for r in alone["requests"]} == {"live"}
        check_pausing(second)


def check_pausing(server: Server) -> None:
    """An engine that is held on purpose says so, and its requests wait for that reason."""
    with load.Steady(server.url, 3) as steady:
        time.sleep(1)
        httpx.post(f"{server.url}/pause?mode=keep", timeout=60, trust_env=False).raise_for_status()
        try:
            time.sleep(0.5)
            (engine,) = once(server.sockets, "--url", server.url)["engines"]
        finally:
            done = httpx.post(f"{server.url}/resume", timeout=60, trust_env=False)
    done.raise_for_status()
    assert engine["state"] == "paused"
    assert engine["requests"]
    assert steady.done["failed"] == 0
    (engine,) = once(server.sockets, "--url", server.url)["engines"]
    assert engine["state"] in ("running", "idle")


@pytest.mark.parametrize(
    ("config", "kind"), [(GEMMA, "SlidingWindow"), (LFM2, "Mamba")], ids=["window", "mamba"]
)
def test_two_kv_cache_groups_share_one_pool(
    python: str, tmp_path: Path, config: dict[str, Any], kind: str
) -> None:
    model = make_model(python, tmp_path / "model")
    (model / "config.json").write_text(json.dumps(config))
    sizes = ("--num-gpu-blocks-override", str(GEMMA_BLOCKS))
    with served(python, model, tmp_path / "server", *sizes) as server:
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
    assert {g.kind for g in groups} == {"FullAttention", kind}
    assert {g.sliding_window_tokens for g in groups if g.kind == kind} == {
        WINDOW if kind == "SlidingWindow" else None
    }
    assert max(len(e.requests or ()) for e in looks) > 2
    tables = {group: blocks for group, _, blocks in detail.tables}
    other = next(g.index for g in groups if g.kind == kind)
    (full,) = [g.index for g in groups if g.index != other]
    # What is behind the window, and all states but the last, have left: the null block stands
    # for them.
    assert tables[other][0] == 0
    assert 0 not in tables[full]
    assert len(tables[other]) == len(tables[full])
    assert set(tables[other]) & set(tables[full]) <= {0}


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


@contextmanager
def offline(python: str, model: Path, folder: Path, multiprocessing: str) -> Iterator[Any]:
    """A script that works without an end, until the file `enough` is there; always stopped."""
    script = folder / "offline.py"
    script.write_text(LLM)
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [python, str(script), str(model), str(folder / "enough")],
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
                "KVTOP_DIR": str(folder / "sockets"),
            },
        )
    try:
        end = time.monotonic() + START_S
        while b"built" not in log.read_bytes():
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.2)
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)


def looks_of(path: Path, count: int) -> list[Engine]:
    """Cuts with requests in them; a machine that is busy enough answers late or not at all."""
    looks: list[Engine] = []
    end = time.monotonic() + PATIENCE_S
    while len(looks) < count:
        assert time.monotonic() < end, f"only {len(looks)} cuts with requests"
        try:
            engine = parse_snapshot(get_once(str(path), "/v1/snapshot", 20.0))
        except UnreachableError:
            continue
        check_identities(engine, BLOCKS)
        if engine.requests:
            looks.append(engine)
        time.sleep(0.05)
    return looks


@pytest.mark.parametrize("multiprocessing", ["0", "1"])
def test_an_llm_without_a_server(
    python: str, model: Path, tmp_path: Path, multiprocessing: str
) -> None:
    sockets = tmp_path / "sockets"
    with offline(python, model, tmp_path, multiprocessing) as process:
        wanted = {"engine": 1} if multiprocessing == "0" else {"api": 1, "engine": 1, "worker": 1}
        assert roles(sockets, **wanted) == wanted
        (path,) = sockets.glob("engine-*.sock")
        looks = looks_of(path, LOOKS)
        # It takes all the processor while it works, and kvtop is wanted soon.
        (tmp_path / "enough").touch()
        (shown,) = once(sockets, "--pid", str(process.pid))["engines"]
    pid = int(path.stem.split("-")[1])
    assert (pid == process.pid) is (multiprocessing == "0")
    assert (shown["pid"], shown["blocks"]["total"]) == (pid, BLOCKS)
    assert shown["requests"] is not None
    assert len({e.probe.step for e in looks if e.probe}) > 5
