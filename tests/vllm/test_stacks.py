"""Stacks of a real vLLM under load: panel, captures, what stops it, what is denied, leaks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen
from xml.etree import ElementTree

import pytest

from kvtop.config import Options
from kvtop.errors import ExitCode
from kvtop.flame import target
from kvtop.flame.auto import AutoCapture, parse_kinds
from kvtop.flame.capture import Plan, Recording
from kvtop.flame.folded import Folded, code_of, parse
from kvtop.flame.tree import build
from kvtop.model.frames import split_frame
from kvtop.model.snapshot import Snapshot, SourceState, Stacks
from kvtop.sources.stacks_spy import find_py_spy
from kvtop.stream.live import Live
from kvtop.stream.target import Target
from tests.faults.conftest import PLUGIN
from tests.faults.watching import Faults, LoadThread, Look, Watcher, long_requests
from tests.flame.test_formats import validate
from tests.vllm.server import Server

pytestmark = pytest.mark.vllm

WATCH_S = 30.0
"""How long panel and py-spy look at the same time."""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    """The switches; all off."""
    return Faults(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def server(
    python: str, model: Path, faults: Faults, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server that can be broken."""
    server = Server(
        python,
        model,
        tmp_path_factory.mktemp("server"),
        ["--num-gpu-blocks-override", "128", "--max-num-seqs", "16"],
        {
            "KVTOP_FAULT": "lose-free,lose-abort,stall",
            "KVTOP_FAULT_DIR": str(faults.folder),
            "PYTHONPATH": str(PLUGIN),
        },
    )
    try:
        yield server.wait()
    finally:
        server.stop()


@pytest.fixture(scope="module")
def load(server: Server) -> Iterator[LoadThread]:
    """A steady load, for as long as the module runs."""
    with LoadThread(server.url, 3, gaps=False) as load:
        time.sleep(3)
        yield load


@dataclass
class Watched:
    """What the panel has shown, and what py-spy has recorded meanwhile."""

    snapshots: list[Snapshot] = field(default_factory=list)
    peers: dict[str, Folded] = field(default_factory=dict)

    def panel(self, role: str) -> Stacks:
        """The newest frames of a role."""
        (found,) = [one for one in self.snapshots[-1].stacks if one.role == role]
        return found


@pytest.fixture(scope="module")
def watched(server: Server, load: LoadThread, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """Panel and `py-spy record` over the same seconds."""
    out = Watched()
    folder = tmp_path_factory.mktemp("peers")

    async def watch() -> None:
        options = Options(url=server.url, gpus=False, interval_s=1.0)
        live = Live(options, Target(socket_dir=server.sockets))
        peers: dict[str, subprocess.Popen[bytes]] = {}
        end = time.monotonic() + 90
        try:
            async for snapshot in live.snapshots():
                out.snapshots.append(snapshot)
                assert time.monotonic() < end, snapshot.sources
                if not peers and len(snapshot.stacks) == 3:
                    end = time.monotonic() + WATCH_S
                    peers = {
                        one.role: record(one.pid, folder / one.role) for one in snapshot.stacks
                    }
                if peers and time.monotonic() > end - 2:
                    return
        finally:
            for peer in peers.values():
                peer.send_signal(signal.SIGINT)
                peer.wait(20)
            await live.close()

    asyncio.run(watch())
    for role in ("engine", "worker", "api"):
        text = (folder / role).read_text()
        if text:
            out.peers[role] = parse(text)
    return out


def record(pid: int, path: Path) -> subprocess.Popen[bytes]:
    """py-spy as it is, on one process."""
    words = ["record", "--pid", str(pid), "--nonblocking", "--rate", "50", "--threads"]
    return subprocess.Popen(
        [find_py_spy() or "py-spy", *words, "--format", "raw", "--output", str(path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def by_self(folded: Folded) -> dict[str, float]:
    """Share of each function, of what ran."""
    sums: Counter[str] = Counter()
    for frames, count in folded.stacks:
        # py-spy may find a thread that has no frame.
        sums[split_frame((code_of(frames) or ("",))[-1])[0]] += count
    return {name: count / folded.total for name, count in sums.items()}


@pytest.mark.parametrize("role", ["engine", "worker"])
def test_the_top_function_is_py_spys(watched: Watched, role: str) -> None:
    panel, peer = watched.panel(role), by_self(watched.peers[role])
    assert panel.samples >= 20
    assert not panel.stalled
    own: Counter[str] = Counter()
    for frame in panel.frames:
        own[frame.function] += frame.self_percent
    (top, share), total = own.most_common(1)[0], sum(own.values())
    print(role, "panel", own.most_common(3), "py-spy", Counter(peer).most_common(3))
    print(role, "split", panel.split, "unread", panel.unread, "of", panel.samples)
    # Two functions of about the same share may change places.
    assert peer.get(top, 0.0) >= max(peer.values()) - 0.1
    assert share / total == pytest.approx(peer[top], abs=0.25)


def test_all_processes_are_sampled_and_their_cost_is_told(watched: Watched, server: Server) -> None:
    (engine,) = watched.snapshots[-1].engines
    pids = {"engine": (engine.pid,), "worker": engine.worker_pids, "api": engine.api_pids}
    for role, wanted in pids.items():
        one = watched.panel(role)
        assert (one.pid,) == wanted
        assert one.cost_ms is not None
        assert 0.0 < one.rate_hz < 3.0
        assert sum(one.split.values()) == pytest.approx(100.0)
        print(role, f"{one.cost_ms * one.rate_hz / 10:.2f} % of a core", one.samples, one.unread)
    assert "model" in watched.panel("worker").split


async def until(live: Live, what: object, limit_s: float = 40.0) -> Snapshot:
    """The first snapshot for which it is true."""
    end = time.monotonic() + limit_s
    async for snapshot in live.snapshots():
        if what(snapshot):  # type: ignore[operator]
            return snapshot
        assert time.monotonic() < end, (snapshot.stacks, snapshot.sources)
    raise AssertionError


async def test_only_the_chosen_process_is_sampled(server: Server, load: LoadThread) -> None:
    live = Live(
        Options(url=server.url, gpus=False, interval_s=0.5), Target(socket_dir=server.sockets)
    )
    try:
        live.set_visible(True, [server.process.pid])
        snapshot = await until(live, lambda s: s.stacks)
        assert [one.role for one in snapshot.stacks] == ["api"]
        live.set_visible(False)
        snapshot = await until(live, lambda s: not s.stacks)
        (status,) = [one for one in snapshot.sources if one.kind == "stacks"]
        assert status.state is SourceState.OFF
    finally:
        await live.close()


def flame(*words: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, sys.executable, "-m", "kvtop", "flame", *words],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_a_capture_in_each_format(
    server: Server, load: LoadThread, tmp_path: Path, engine_pid: int
) -> None:
    paths = {form: tmp_path / f"x.{form}" for form in ("folded", "svg", "json", "html")}
    for form, path in paths.items():
        long = "20s" if form == "folded" else "4s"
        done = flame(str(engine_pid), "--for", long, "--rate", "200", "-o", str(path))
        assert done.returncode == ExitCode.OK, done.stderr
        assert target.stopped(target.tree_of(engine_pid)) == ()
    folded = parse(paths["folded"].read_text())
    split = build(folded).split()
    print("capture", folded.total, split)
    # How often each is seen depends on what else this machine does; these always are.
    assert {"model", "wait"} <= split.keys()
    assert split.keys() & {"schedule", "allocate", "free", "sampling"}
    assert any("Scheduler." in label for label in build(folded).labels)
    engine = "EngineCore"
    root = ElementTree.fromstring(paths["svg"].read_text())
    titles = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert any(engine in title for title in titles)
    data = validate(paths["json"].read_text())
    assert any(engine in frame["name"] for frame in data["shared"]["frames"])
    assert len(data["profiles"]) >= 2
    assert engine in paths["html"].read_text()


@pytest.fixture
def engine_pid(server: Server) -> int:
    """The engine core, with its worker below it."""
    return server.engine_pid()


@pytest.mark.parametrize("words", [("--gil",), ("--blocking",), ("--native",)])
def test_runs_that_must_be_chosen(
    server: Server, load: LoadThread, tmp_path: Path, engine_pid: int, words: tuple[str, ...]
) -> None:
    path = tmp_path / "x.folded"
    tree = target.tree_of(engine_pid)
    threads = target.thread_count(tree)
    done = flame(str(engine_pid), "--for", "4s", "--rate", "20", "-o", str(path), *words)
    print(words, done.returncode, done.stderr.strip())
    assert f"{words[0]} " in done.stderr
    warned = next(int(word) for word in done.stderr.split() if word.isdecimal())
    assert abs(warned - threads) <= 4
    assert f"threads in {len(tree)} processes" in done.stderr
    time.sleep(0.2)
    assert target.stopped(target.tree_of(engine_pid)) == ()
    with urlopen(f"{server.url}/health", timeout=10) as answer:
        assert answer.status == 200
    if done.returncode == ExitCode.OK:
        assert parse(path.read_text()).total > 0
    else:
        # One plain line with the reason, after the warning.
        assert len(done.stderr.strip().splitlines()) == 2
        assert not path.exists()


def test_a_denied_ptrace_shows_the_remedy(
    server: Server, load: LoadThread, tmp_path: Path, engine_pid: int
) -> None:
    setpriv = shutil.which("setpriv")
    if setpriv is None or os.geteuid() != 0:
        pytest.skip("setpriv and root are needed to drop CAP_SYS_PTRACE in a child")
    drop = (setpriv, "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace")
    done = flame(str(engine_pid), "--for", "1s", "-o", str(tmp_path / "x.svg"), prefix=drop)
    assert done.returncode == ExitCode.DENIED
    assert f"py-spy may not read process {engine_pid}" in done.stderr
    assert "SYS_PTRACE" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    code = (
        "import asyncio, sys\n"
        "from kvtop.sources.stacks import StacksSource\n"
        "try: asyncio.run(StacksSource({int(sys.argv[1]): 'engine'}).read())\n"
        "except Exception as error: print(error.reason, '|', error.remedy)\n"
    )
    panel = subprocess.run(
        [*drop, sys.executable, "-c", code, str(engine_pid)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert f"py-spy may not read process {engine_pid} | " in panel.stdout
    assert "SYS_PTRACE" in panel.stdout
    assert panel.stderr == ""


async def test_cancelling_leaves_no_child(server: Server, engine_pid: int) -> None:
    before = set(target.tree_of(os.getpid()))
    recording = Recording(Plan(engine_pid, 60.0, 100))
    running = asyncio.ensure_future(recording.run())
    while recording.progress == 0.0 and not running.done():
        await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)
    recording.cancel()
    with contextlib.suppress(Exception):
        await running
    left = {pid for pid in set(target.tree_of(os.getpid())) - before if target.state_of(pid) != "Z"}
    assert not left
    assert target.stopped(target.tree_of(engine_pid)) == ()


@pytest.fixture(scope="module")
def watcher(server: Server) -> Iterator[Watcher]:
    """The live stream and the judge, for what needs a finding."""
    from kvtop.detect.thresholds import apply_overrides

    with Watcher(server.url, apply_overrides({}), server.sockets) as watcher:
        yield watcher


@pytest.mark.parametrize(
    ("fault", "rule"), [("lose-free", "leak.ghost-blocks"), ("lose-abort", "leak.zombie-request")]
)
def test_a_leak_is_explained(
    server: Server,
    load: LoadThread,
    faults: Faults,
    watcher: Watcher,
    engine_pid: int,
    fault: str,
    rule: str,
) -> None:
    def long(look: Look) -> int:
        rows = [row for engine in look.snapshot.engines for row in engine.requests or ()]
        return sum(row.max_tokens == 3700 for row in rows)

    with long_requests(server.url, 3) as leave:
        # Clients that leave before the engine has their requests leave nothing behind.
        assert watcher.until(lambda look: long(look) == 3, 90, len(watcher.looks)) is not None
        begin = len(watcher.looks)
        faults.on(fault)
        time.sleep(1)
        leave.set()
        try:
            look = watcher.until(lambda look: rule in look.rules(), 90, begin)
            assert look is not None, (
                rule,
                watcher.looks[-1].findings,
                watcher.looks[-1].snapshot.engines,
            )
            words = (str(engine_pid), "--explain", "--for", "45s", "--rate", "50")
            done = subprocess.run(
                [sys.executable, "-m", "kvtop", "flame", *words],
                capture_output=True,
                text=True,
                timeout=150,
                check=False,
                env={**os.environ, "KVTOP_DIR": str(server.sockets)},
            )
            broken = json.loads((faults.folder / f"{fault}.json").read_text())
        finally:
            faults.off(fault)
    print(done.stdout, done.stderr)
    assert done.returncode == ExitCode.OK
    assert f" {rule} engine {engine_pid}" in done.stdout
    told = broken["blocks"] if fault == "lose-free" else broken["requests"]
    assert told
    assert any(str(one) in done.stdout for one in told), broken
    assert "allocated -" not in done.stdout
    assert "What the code was doing" in done.stdout
    assert "\n  allocate " in done.stdout
    gone = len(watcher.looks)
    assert watcher.until(lambda look: rule not in look.rules(), 60, gone) is not None


async def test_a_stall_is_captured_where_it_hangs(
    server: Server, load: LoadThread, faults: Faults, watcher: Watcher, engine_pid: int
) -> None:
    auto = AutoCapture(parse_kinds("stall"))
    begin = len(watcher.looks)
    faults.on("stall")
    try:
        found = None
        end = time.monotonic() + 60
        while found is None and time.monotonic() < end:
            await asyncio.sleep(0.2)
            for look in watcher.looks[begin:]:
                found = found or auto.wanted(look.findings, look.mono_s)
            begin = len(watcher.looks)
        assert found is not None
        assert (found.rule, found.engine_pid) == ("health.stalled", engine_pid)
        # Threads that wait are what a stall is about.
        capture = await Recording(Plan(engine_pid, 4.0, 20, idle=True)).run()
    finally:
        faults.off("stall")
    labels = build(capture.folded).labels
    assert any("schedule (kvtop_faults.py" in label for label in labels), labels


def test_the_panel_shows_where_a_stalled_engine_hangs(
    server: Server, load: LoadThread, faults: Faults, engine_pid: int
) -> None:
    faults.on("stall")

    async def watch() -> Snapshot:
        options = Options(url=server.url, gpus=False, interval_s=1.0)
        live = Live(options, Target(socket_dir=server.sockets))
        live.set_visible(True, [engine_pid])
        try:
            return await until(
                live,
                lambda s: s.stacks and s.stacks[0].stalled and s.stacks[0].samples > 1,
                60.0,
            )
        finally:
            await live.close()

    try:
        # The fault holds an engine only once it has a request.
        threading.Event().wait(2)
        (stacks,) = asyncio.run(watch()).stacks
    finally:
        faults.off("stall")
    assert stacks.frames[0].self_percent == 100.0
    assert any(frame.file == "kvtop_faults.py" for frame in stacks.frames), stacks.frames
