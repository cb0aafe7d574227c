"""The whole probe in one process: threads, socket, HTTP, start, stop and fork."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from probe_fakes import Engine

from kvtop.probe import control, find, plugin, runtime
from kvtop.probe.engine import FRESH_S

ROOT = Path(__file__).parents[2]


class Http(http.client.HTTPConnection):
    """A connection to the probe's Unix socket."""

    def __init__(self, path):
        super().__init__("probe", timeout=10)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)

    def get_json(self, target):
        self.request("GET", target)
        response = self.getresponse()
        return response.status, json.loads(response.read())


class Busy:
    """An engine that steps in a thread, like vLLM's busy loop."""

    def __init__(self, pause_s=0.002, **options):
        self.engine = Engine(**options)
        self.pause_s = pause_s
        self.stopping = False
        self.gate = threading.Event()
        self.gate.set()
        self.thread = threading.Thread(target=self.run_busy_loop, daemon=True)

    def run_busy_loop(self):
        engine = self.engine
        rng = engine.rng
        while not self.stopping:
            self.gate.wait()
            if len(engine.scheduler.requests) < 12:
                engine.add(rng.randrange(5, 30), rng.randrange(1, 20))
            if rng.random() < 0.05 and engine.scheduler.requests:
                engine.abort(rng.choice(list(engine.scheduler.requests)))
            engine.step()
            time.sleep(self.pause_s)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *args):
        self.stopping = True
        self.gate.set()
        self.thread.join(5)


def column(text):
    return zlib.decompress(base64.b64decode(text))


def check_identities(snapshot):
    for pool in snapshot["pools"]:
        counts = pool["counts"]
        states, refs, tables = (column(pool[n]) for n in ("states", "refs", "tables"))
        assert len(states) == len(refs) == len(tables) == counts["total"]
        assert sum(v for k, v in counts.items() if k != "total") == counts["total"]
        assert counts["free"] + counts["cached"] == pool["free_queue"]
        names = ("free", "cached", "used", "shared", "held", "ghost", "null")
        assert [states.count(i) for i in range(7)] == [counts[n] for n in names]
        assert all(r == t for s, r, t in zip(states, refs, tables, strict=True) if s != 6)
        assert counts["ghost"] == 0


@pytest.mark.parametrize("shape", [{}, {"fences": True, "connector": True}, {"window": 8}])
def test_every_snapshot_of_a_working_engine_holds_the_identities(probe_dir, shape):
    with Busy(blocks=60, **shape) as busy:
        probe = control.install(busy.engine, directory=probe_dir)
        client = Http(probe.socket_path)
        steps = set()
        deadline = time.monotonic() + 60
        while len(steps) < 20 and time.monotonic() < deadline:
            time.sleep(0.01)
            status, snapshot = client.get_json("/v1/snapshot")
            assert status == 200
            check_identities(snapshot)
            assert snapshot["probe"]["errors"] == 0
            assert snapshot["probe"]["drift"] == 0
            steps.add(snapshot["probe"]["step"])
        assert len(steps) == 20
        client.close()


def test_cuts_between_scheduler_calls_hold_the_identities_too(probe_dir, monkeypatch):
    """No safe point is waited for: each cut races with the engine and is checked by the lock."""
    monkeypatch.setattr("kvtop.probe.engine.BOUNDARY_WAIT_S", 0.0)
    monkeypatch.setattr("kvtop.probe.engine.FRESH_S", 0.0)
    monkeypatch.setattr("kvtop.probe.engine.MAX_COST", 1.0)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with Busy(blocks=60, fences=True, pause_s=0.0005) as busy:
            probe = control.install(busy.engine, directory=probe_dir)
            client = Http(probe.socket_path)
            points = set()
            for _ in range(150):
                status, snapshot = client.get_json("/v1/snapshot")
                if status == 200:
                    check_identities(snapshot)
                    points.add(snapshot["probe"]["point"])
                    assert snapshot["probe"]["drift"] == 0
                    assert snapshot["probe"]["errors"] == 0
            assert points & {"idle", "executing"}
            client.close()
    finally:
        sys.setswitchinterval(before)


def test_an_idle_engine_is_read_without_its_help(probe_dir):
    engine = Engine()
    probe = control.install(engine, directory=probe_dir)
    status, snapshot = Http(probe.socket_path).get_json("/v1/snapshot")
    assert status == 200
    assert snapshot["probe"]["point"] == "idle"
    assert snapshot["engine"]["state"] == "idle"
    assert snapshot["probe"]["step_age_s"] is None
    assert snapshot["requests"]["rows"] == []
    check_identities(snapshot)


def test_while_the_model_runs_the_cut_is_taken_between_scheduler_calls(probe_dir):
    engine = Engine()
    probe = control.install(engine, directory=probe_dir)
    engine.add(9, 9)
    output = engine.scheduler.schedule()
    status, snapshot = Http(probe.socket_path).get_json("/v1/snapshot")
    assert (status, snapshot["probe"]["point"]) == (200, "executing")
    assert snapshot["engine"]["state"] == "running"
    check_identities(snapshot)
    engine.scheduler.update_from_output(output, engine.rng)


def test_an_engine_stuck_in_a_scheduler_call_gets_its_last_cut_with_its_age(probe_dir):
    engine = Engine()
    release = threading.Event()
    inside = threading.Event()
    manager = engine.scheduler.kv_cache_manager
    allocate = manager.allocate_slots

    def stuck(*args, **kwargs):
        inside.set()
        release.wait(10)
        return allocate(*args, **kwargs)

    manager.allocate_slots = stuck
    probe = control.install(engine, directory=probe_dir)
    client = Http(probe.socket_path)
    first = client.get_json("/v1/snapshot")[1]
    engine.add(9, 9)
    thread = threading.Thread(target=engine.step)
    thread.start()
    inside.wait(5)
    time.sleep(0.1)
    status, snapshot = client.get_json("/v1/snapshot")
    assert status == 200
    assert snapshot["time_s"] == first["time_s"]
    assert snapshot["age_s"] > 0.1
    assert snapshot["probe"]["step_age_s"] > 0.1
    release.set()
    thread.join(5)
    status, snapshot = client.get_json("/v1/snapshot")
    assert len(snapshot["requests"]["rows"]) == 1


def test_with_no_cut_to_give_it_says_why(probe_dir, monkeypatch):
    monkeypatch.setattr("kvtop.probe.engine.MAX_AGE_S", 0.1)
    engine = Engine()
    probe = control.install(engine, directory=probe_dir)
    engine.add(9, 9)
    probe.role.watch.depth = 1
    try:
        status, body = Http(probe.socket_path).get_json("/v1/snapshot")
    finally:
        probe.role.watch.depth = 0
    assert status == 503
    assert "inside a scheduler call" in body["error"]


def test_hello_and_paths(probe_dir):
    engine = Engine()
    probe = control.install(engine, index=2, directory=probe_dir)
    client = Http(probe.socket_path)
    status, hello = client.get_json("/v1/hello")
    assert status == 200
    assert hello["role"] == "engine"
    assert hello["pid"] == os.getpid()
    assert hello["state"] == "ok"
    assert hello["demo"] is True
    assert hello["model"] == "fake"
    for target in ("/", "/v1", "/v1/", "/v1/hello/x", "/v2/hello", "/v1/requests/", "/..%2f"):
        assert client.get_json(target)[0] == 404
    status, snapshot = client.get_json("/v1/snapshot?columns=0")
    assert set(snapshot["pools"][0]) == {"label", "free_queue", "counts"}
    assert snapshot["engine"]["index"] == 2
    assert snapshot["engine"]["simulated"] is True


def test_one_requests_tables(probe_dir):
    engine = Engine(window=8, blocks=80)
    probe = control.install(engine, directory=probe_dir)
    hostile = "a/b[x]\x1b[31m\n\udcff?é"
    engine.add(25, 9, rid=hostile)
    for _ in range(5):
        engine.step()
    client = Http(probe.socket_path)
    status, body = client.get_json("/v1/requests/" + quote(hostile, safe="", errors="replace"))
    assert (status, body["found"]) == (200, False)
    hostile = "a/b[x]\x1b[31m\n?é"
    engine.add(25, 9, rid=hostile)
    for _ in range(5):
        engine.step()
    time.sleep(FRESH_S)  # The cut before serves for so long.
    status, body = client.get_json("/v1/requests/" + quote(hostile, safe=""))
    assert (status, body["id"], body["found"]) == (200, hostile, True)
    managers = engine.scheduler.kv_cache_manager.managers
    for table, refs, manager in zip(body["tables"], body["refs"], managers, strict=True):
        blocks = manager.req_to_blocks[hostile]
        assert table["group"] == manager.kv_cache_group_id
        assert table["blocks"] == [b.block_id for b in blocks]
        assert [r for r, b in zip(refs, blocks, strict=True) if not b.is_null] == [
            b.ref_cnt for b in blocks if not b.is_null
        ]
    status, body = client.get_json("/v1/requests/nobody")
    assert body == {
        "id": "nobody",
        "found": False,
        "step": body["step"],
        "tables": [],
        "refs": [],
        "shared_with": {},
    }


def test_whom_a_block_is_shared_with(probe_dir):
    engine = Engine(blocks=64)
    probe = control.install(engine, directory=probe_dir)
    ids = []
    for _ in range(3):
        ids.append(engine.add(17, 20, vocabulary=1))
        engine.step()
    body = Http(probe.socket_path).get_json(f"/v1/requests/{ids[0]}")[1]
    first = body["tables"][0]["blocks"][:4]
    assert body["shared_with"] == {str(i): ids[1:] for i in first}
    assert body["refs"][0][:4] == [3, 3, 3, 3]


def test_no_answer_holds_tokens(probe_dir):
    engine = Engine()
    probe = control.install(engine, directory=probe_dir)
    rid = engine.add(9, 9)
    engine.scheduler.requests[rid].tokens[:] = [987654321] * 9
    engine.step()
    client = Http(probe.socket_path)
    for target in ("/v1/snapshot", f"/v1/requests/{rid}", "/v1/hello"):
        assert "987654321" not in json.dumps(client.get_json(target)[1])


def test_stop_takes_everything_out_and_start_works_again(probe_dir):
    engine = Engine()
    scheduler = engine.scheduler
    before = {id(o): set(vars(o)) for o in (scheduler, engine.pools[0])}
    threads = threading.active_count()
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        probe = control.install(engine, directory=probe_dir)
        client = Http(probe.socket_path)
        assert client.get_json("/v1/snapshot")[0] == 200
        client.close()
        assert control.stop()["already"] is False
        assert control.current() is None
        assert {id(o): set(vars(o)) for o in (scheduler, engine.pools[0])} == before
        assert os.listdir(probe_dir) == []
        assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert control.stop()["already"] is True


def test_a_second_start_is_a_no_op_that_says_so(probe_dir):
    engine = Engine()
    probe = control.install(engine, directory=probe_dir)
    status = control.start(loaded_by="attach", directory=probe_dir)
    assert status["already"] is True
    assert status["loaded_by"] == "demo"
    assert control.current() is probe
    with pytest.raises(RuntimeError, match="already"):
        control.install(engine, directory=probe_dir)


def test_a_directory_that_is_not_private_is_reported(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(RuntimeError, match="0700"):
        control.install(Engine(), directory=str(tmp_path / "open"))


def test_tracking_ends_when_nobody_asks(probe_dir, monkeypatch):
    monkeypatch.setattr("kvtop.probe.engine.TRACK_S", 0.05)
    engine = Engine()
    probe = control.install(engine, directory=probe_dir)
    client = Http(probe.socket_path)
    assert client.get_json("/v1/snapshot")[0] == 200
    assert probe.role.watch.tracking
    deadline = time.monotonic() + 10
    while probe.role.watch.tracking and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not probe.role.watch.tracking
    engine.add(9, 9)
    engine.step()
    assert probe.role.watch.dirty == [[]]
    check_identities(client.get_json("/v1/snapshot")[1])


# -- finding out what a process is


class EngineCore:
    """Named and shaped like vLLM's."""

    def __init__(self):
        self.inner = Engine()
        self.scheduler = self.inner.scheduler
        self.stopping = threading.Event()

    def run_busy_loop(self):
        self.stopping.wait(30)


def wait_for_role(probe, name):
    assert probe.ready.wait(10)
    assert probe.state == "ok", probe.reason
    assert probe.role.name == name


def test_the_engine_is_found_in_the_frames_of_its_thread(probe_dir):
    core = EngineCore()
    thread = threading.Thread(target=core.run_busy_loop)
    thread.start()
    try:
        assert control.start(directory=probe_dir)["already"] is False
        wait_for_role(control.current(), "engine")
        path = control.current().socket_path
        assert Http(path).get_json("/v1/hello")[1]["loaded_by"] == "plugin"
    finally:
        core.stopping.set()
        thread.join()


def test_the_front_end_is_found_in_the_tasks_of_its_loop(probe_dir):
    processor = SimpleNamespace(request_states={"cmpl-1-0-abc": object()})
    stop = []

    async def output_handler():
        output_processor = processor  # noqa: F841
        while not stop:
            await asyncio.sleep(0.01)

    async def serve():
        await asyncio.create_task(output_handler())

    thread = threading.Thread(
        target=lambda: (
            asyncio.Runner().run(serve()) if sys.version_info >= (3, 11) else asyncio.run(serve())
        )
    )
    thread.start()
    try:
        control.start(directory=probe_dir)
        wait_for_role(control.current(), "api")
        client = Http(control.current().socket_path)
        body = client.get_json("/v1/snapshot")[1]
        assert body["role"] == "api"
        assert body["clients"] == ["cmpl-1-0-abc"]
        assert client.get_json("/v1/requests/x")[0] == 404
    finally:
        stop.append(1)
        thread.join()


def test_an_engine_in_the_process_of_its_front_end_is_the_engine(probe_dir):
    """An in-process `LLM`: the front end is there long before the engine core is."""

    class LLMEngine:
        def __init__(self, stop):
            self.output_processor = SimpleNamespace(request_states={})
            assert find.find_front_end() is None
            time.sleep(3 * control.STARTING_PERIOD_S)
            self.engine_core = SimpleNamespace(engine_core=EngineCore())
            stop.wait(30)

    stop = threading.Event()
    control.start(directory=probe_dir)
    thread = threading.Thread(target=LLMEngine, args=(stop,))
    thread.start()
    try:
        wait_for_role(control.current(), "engine")
    finally:
        stop.set()
        thread.join()


def test_a_worker_without_a_gpu_has_no_allocator_figures(probe_dir):
    class Worker:
        def __init__(self):
            self.rank = 1
            self.model_runner = object()
            self.device = SimpleNamespace(type="cpu")
            self.stopping = threading.Event()

        def worker_busy_loop(self):
            self.stopping.wait(30)

    worker = Worker()
    thread = threading.Thread(target=worker.worker_busy_loop)
    thread.start()
    try:
        control.start(directory=probe_dir)
        wait_for_role(control.current(), "worker")
        body = Http(control.current().socket_path).get_json("/v1/snapshot")[1]
        assert (body["rank"], body["allocator"]) == (1, None)
    finally:
        worker.stopping.set()
        thread.join()


def test_allocator_figures_are_of_the_workers_own_device(monkeypatch):
    asked = []

    def memory_stats(device):
        asked.append(device.index)
        names = (
            "allocated_bytes.all.current",
            "reserved_bytes.all.current",
            "allocated_bytes.all.peak",
            "reserved_bytes.all.peak",
            "num_alloc_retries",
            "num_ooms",
        )
        return {name: n for n, name in enumerate(names, 10)}

    cuda = SimpleNamespace(is_initialized=lambda: True, memory_stats=memory_stats)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    found = SimpleNamespace(rank=1, device=SimpleNamespace(type="cuda", index=1))
    role = runtime.worker(found)
    assert role._read()["allocator"]["reserved_bytes"] == 11
    assert asked == [1]


def test_a_process_without_any_role_gives_up(probe_dir, monkeypatch):
    monkeypatch.setattr(control, "GIVE_UP_S", 0.1)
    monkeypatch.setattr(control, "STARTING_PERIOD_S", 0.02)
    control.start(directory=probe_dir)
    probe = control.current()
    assert probe.ready.wait(10)
    assert probe.state == "stopped"
    assert os.listdir(probe_dir) == []


def test_no_reference_to_locals_is_kept():
    import gc
    import weakref

    class Payload:
        pass

    started, stop = threading.Event(), threading.Event()
    refs = []

    def run():
        self = Payload()  # noqa: F841
        other = Payload()
        refs.append(weakref.ref(other))
        started.set()
        stop.wait(10)
        del other
        stop.clear()
        started.set()
        stop.wait(10)

    thread = threading.Thread(target=run)
    thread.start()
    started.wait(10)
    started.clear()
    assert find.find_engine() is None
    stop.set()
    started.wait(10)
    gc.collect()
    assert refs[0]() is None
    stop.set()
    thread.join()


# -- the plugin


@pytest.mark.parametrize("value", ["0", "off", " False "])
def test_the_plugin_can_be_turned_off(monkeypatch, value):
    monkeypatch.setenv("KVTOP_PROBE", value)
    plugin.register()
    assert control.current() is None


def test_the_plugin_never_raises(monkeypatch):
    def fails(**kwargs):
        raise MemoryError

    monkeypatch.delenv("KVTOP_PROBE", raising=False)
    monkeypatch.setattr(control, "start", fails)
    plugin.register()


def test_the_plugin_may_be_called_again_and_again(monkeypatch, probe_dir):
    monkeypatch.delenv("KVTOP_PROBE", raising=False)
    monkeypatch.setenv("KVTOP_DIR", probe_dir)
    before = threading.active_count()
    for _ in range(3):
        plugin.register()
    assert threading.active_count() == before + 1


FORK = """
import os, sys, threading, time
from types import SimpleNamespace
sys.path[:0] = [{root!r}, {here!r}]
from probe_fakes import Engine
from kvtop.probe import control, plugin
plugin.register()

class AsyncLLM:
    def __init__(self):
        self.output_processor = SimpleNamespace(request_states={{}})
        self.engine_core = "client"
        assert control.current().ready.wait(20)
        print(control.status()["role"], flush=True)
        import multiprocessing
        child = multiprocessing.get_context("fork").Process(target=run_engine_core)
        child.start()
        child.join()

def run_engine_core():
    engine_core = Engine()
    probe = control.current()
    assert probe.pid == os.getpid() and probe.ready.wait(20)
    print(probe.role.name, os.path.exists(probe.socket_path), flush=True)
    parent = [n for n in os.listdir({directory!r}) if n.startswith("api")]
    assert len(parent) == 1, parent

AsyncLLM()
print(sorted(n.split("-")[0] for n in os.listdir({directory!r})), flush=True)
"""


def test_a_forked_engine_core_has_a_probe_of_its_own(probe_dir):
    """As with VLLM_WORKER_MULTIPROC_METHOD=fork: the child lies under its parent's frames."""
    code = FORK.format(root=str(ROOT), here=str(Path(__file__).parent), directory=probe_dir)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        env={**os.environ, "KVTOP_DIR": probe_dir},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split("\n")[:3] == ["api", "engine True", "['api']"], done.stderr
    assert os.listdir(probe_dir) == []


def test_a_stopped_process_resumes_where_it_was(probe_dir):
    code = f"""
import sys, time
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
from probe_fakes import Engine
from kvtop.probe import control
engine = Engine()
print(control.install(engine, directory={probe_dir!r}).socket_path, flush=True)
while True:
    if not engine.scheduler.requests:
        engine.add(9, 9)
    engine.step()
    time.sleep(0.01)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        path = process.stdout.readline().strip()
        assert Http(path).get_json("/v1/snapshot")[0] == 200
        process.send_signal(signal.SIGSTOP)
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        client = Http(path)
        client.timeout = 0.3
        with pytest.raises(TimeoutError):
            client.get_json("/v1/snapshot")
        client.close()
        process.send_signal(signal.SIGCONT)
        check_identities(Http(path).get_json("/v1/snapshot")[1])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
