"""A server that was started without kvtop, under load: attached, watched, detached, again.

`KVTOP_ATTACH_ROUNDS` is the number of rounds in which the probe is put in and taken out; 100
for the full proof.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtop.attach import deliver, payload, probe
from kvtop.attach.find import find_servers
from kvtop.attach.select import members
from kvtop.attach.servers import FoundProcess
from kvtop.errors import ExitCode
from kvtop.sources.answers import parse_snapshot
from kvtop.sources.engine import get_once
from tests.e2e.terminal import NO_TMUX, TMUX, Tmux
from tests.e2e.terminal import kvtop as in_shell
from tests.faults.watching import Faults, long_requests
from tests.vllm import load
from tests.vllm.conftest import probe_socket
from tests.vllm.server import Server, check_identities

pytestmark = pytest.mark.vllm

BLOCKS = 64
ROUNDS = max(3, int(os.environ.get("KVTOP_ATTACH_ROUNDS", "3")))
PLUGIN = Path(__file__).parents[1] / "faults/plugin"

# Run in the target after a detach: what is left of kvtop there.
_LEFT = """
import gc, json, os, sys, threading
gc.collect()
functions = [f for f in gc.get_objects() if type(f).__name__ == "function"]
wrappers = [
    f.__qualname__
    for f in functions
    if "probe.wrappers" in f.__code__.co_filename and f.__closure__
]
threads = [t.name for t in threading.enumerate() if t.name.startswith("kvtop")]
threads = [name for name in threads if name != threading.current_thread().name]
path = os.path.join(os.environ["KVTOP_DIR"], "left-%d.json" % os.getpid())
with open(path + ".part", "w") as file:
    json.dump({"wrappers": wrappers, "threads": threads, "finders": [
        repr(f) for f in sys.meta_path if "kvtop" in repr(type(f)).lower()]}, file)
os.rename(path + ".part", path)
"""


class Bare:
    """A server without a probe, and what can be asked about its processes from outside."""

    def __init__(self, server: Server, faults: Faults) -> None:
        self.server = server
        self.faults = faults
        self.environ = {**os.environ, "KVTOP_DIR": str(server.sockets)}

    def kvtop(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of kvtop."""
        return subprocess.run(
            [sys.executable, "-m", "kvtop", *arguments],
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
            env=self.environ,
        )

    def rows(self, *arguments: str, code: int = ExitCode.OK) -> list[dict[str, Any]]:
        """What `kvtop attach` or `detach` did to each process of this server."""
        done = self.kvtop(*arguments, "--json")
        assert done.stderr == ""
        rows = [r for r in json.loads(done.stdout)["processes"] if r["pid"] in self.pids()]
        # With --all there may be other servers on the machine.
        assert done.returncode == code or "--all" in arguments, done.stdout
        return rows

    def once(self, *arguments: str) -> dict[str, Any]:
        """The only engine, as `kvtop once` has it."""
        for _ in range(5):
            done = self.kvtop("once", "--json", "--no-gpus", "--url", self.server.url, *arguments)
            if done.returncode == ExitCode.OK:
                break
        assert done.returncode == ExitCode.OK, done.stdout + done.stderr
        (engine,) = json.loads(done.stdout)["engines"]
        found: dict[str, Any] = engine
        return found

    def processes(self) -> list[tuple[FoundProcess, str]]:
        """Engine core, API server and worker."""
        found = find_servers().server_of(self.server.process.pid)
        assert found is not None
        return members(found)

    def pids(self) -> list[int]:
        return [process.pid for process, _ in self.processes()]

    def held(self) -> dict[int, tuple[int, int]]:
        """Threads and descriptors of each process."""
        return {
            pid: (len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd")))
            for pid in self.pids()
        }

    def quiet(self, wanted: dict[int, tuple[int, int]] | None = None) -> dict[int, Any]:
        """The same at rest: when `wanted` is there again, or nothing changes any more."""
        seen = self.held()
        same = 0
        for _ in range(100):
            time.sleep(0.2)
            now = self.held()
            same = same + 1 if now == seen else 0
            seen = now
            if seen == wanted or (wanted is None and same >= 10):
                break
        return seen

    def check_rest(self, before: dict[int, tuple[int, int]]) -> None:
        """No thread and no descriptor is left by a round.

        A pool of vLLM's own may have grown by one in the meantime; `ROUNDS` is at least 3, and
        what each round left would be there so often.
        """
        after = self.quiet(before)
        assert set(after) == set(before)
        grown = {
            pid: [now - then for now, then in zip(after[pid], before[pid], strict=True)]
            for pid in before
        }
        assert all(number < 3 for numbers in grown.values() for number in numbers), grown

    def left(self) -> dict[str, list[str]]:
        """What a detached probe has left in the processes, all of them together."""
        sums: dict[str, list[str]] = {}
        (backend,) = [b for b in probe.backends() if b.name == "ptrace"]
        for process, role in self.processes():
            path = self.server.sockets / f"left-{process.ns_pid}.json"
            path.unlink(missing_ok=True)
            backend.run(deliver.injectee(process), payload.boot(_LEFT))
            wait(path.exists, f"an answer of the {role}")
            for name, found in json.loads(path.read_text()).items():
                sums.setdefault(name, []).extend(found)
        return sums


def wait(ready: Callable[[], Any], what: str, limit_s: float = 60.0) -> Any:
    """The first true value."""
    end = time.monotonic() + limit_s
    while not (found := ready()):
        assert time.monotonic() < end, f"never came: {what}"
        time.sleep(0.1)
    return found


NOTHING: dict[str, list[str]] = {"wrappers": [], "threads": [], "finders": []}


@pytest.fixture(scope="module")
def bare(python: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bare]:
    """A server in which the probe is switched off, and which can lose abort messages."""
    folder = tmp_path_factory.mktemp("bare")
    faults = Faults(tmp_path_factory.mktemp("faults"))
    server = Server(
        python,
        model,
        folder,
        ["--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "16"],
        {
            "KVTOP_PROBE": "0",
            "KVTOP_FAULT": "lose-abort",
            "KVTOP_FAULT_DIR": str(faults.folder),
            "PYTHONPATH": str(PLUGIN),
        },
    )
    try:
        yield Bare(server.wait(), faults)
    finally:
        server.stop()


@pytest.fixture(autouse=True)
def _clean(bare: Bare) -> Iterator[None]:
    """Each test begins and ends without a probe."""
    assert not list(bare.server.sockets.glob("*.sock"))
    yield
    bare.kvtop("detach", str(bare.server.process.pid))


def test_attach_all_under_load_and_detach(bare: Bare) -> None:
    before = bare.once()
    assert (before["blocks"], before["requests"]) == (None, None)
    assert before["probe_reason"]
    with load.Steady(bare.server.url) as first:
        # What the API server opens once in its life is open from here on.
        bare.rows("attach", "--all")
        bare.rows("detach", "--all")
    rest = bare.quiet()
    with load.Steady(bare.server.url) as steady:
        rows = bare.rows("attach", "--all")
        assert sorted(row["role"] for row in rows) == ["api", "engine", "worker"]
        assert all(row["ok"] and row["changed"] for row in rows), rows
        engine = wait(lambda: (e := bare.once())["requests"] and e, "requests")
        assert engine["blocks"]["total"] == BLOCKS
        # Of one that comes or ends between the two answers a single look knows nothing.
        clients = {r["client"] for r in engine["requests"]}
        assert {"live"} <= clients <= {"live", None}
        path = probe_socket(bare.server)
        for _ in range(20):
            check_identities(parse_snapshot(get_once(path, "/v1/snapshot", 10.0)), BLOCKS)
            time.sleep(0.05)
        again = bare.rows("attach", str(rows[0]["pid"]))
        assert not any(row["changed"] for row in again)
        assert all("runs in it already" in row["text"] for row in again)
        rows = bare.rows("detach", "--all")
        assert all(row["ok"] and row["changed"] for row in rows), rows
        assert not list(bare.server.sockets.glob("*.sock"))
        again = bare.rows("detach", str(bare.server.process.pid))
        assert {row["text"] for row in again} == {"there is no probe in it"}
        assert all(row["changed"] for row in bare.rows("attach", str(bare.server.process.pid)))
        assert bare.once()["blocks"]["total"] == BLOCKS
        assert all(row["changed"] for row in bare.rows("detach", str(bare.server.process.pid)))
    assert first.done["failed"] == steady.done["failed"] == 0
    assert steady.done["finished"] > 20
    assert bare.left() == NOTHING
    bare.check_rest(rest)
    engine = bare.once()
    assert (engine["blocks"], engine["requests"]) == (None, None)


def test_rounds_under_load_leave_nothing(bare: Bare) -> None:
    processes = bare.processes()

    def one_round() -> None:
        for act in (probe.attach, probe.detach):
            for process, role in processes:
                outcome = act(process, role)
                assert outcome.changed, outcome

    with load.Steady(bare.server.url):
        # What a process opens once in its life is open from here on.
        one_round()
        one_round()
    rest = bare.quiet()
    with load.Steady(bare.server.url, seed=1) as steady:
        for _ in range(ROUNDS):
            one_round()
    print(f"{ROUNDS} rounds, load {steady.done}, at rest {rest}")
    assert (steady.done["failed"], steady.reasons) == (0, [])
    assert steady.done["finished"] > 0
    assert bare.left() == NOTHING
    bare.check_rest(rest)


def test_requests_whose_clients_went_before_are_zombies(bare: Bare) -> None:
    bare.faults.on("lose-abort")
    try:
        # More than fit at once: a quiet machine is through with two of them in six seconds.
        with long_requests(bare.server.url, 12):
            time.sleep(2)
        # The clients have gone, and the engine was not told.
        bare.rows("attach", str(bare.server.process.pid))

        def zombies() -> Any:
            # One look alone cannot tell a client that went from a request that has just come.
            rows = bare.once("--rates")["requests"] or ()
            return [r for r in rows if r["client"] == "gone" and r["client_gone_s"] is not None]

        found = wait(lambda: len(z := zombies()) >= 2 and z, "two zombies")
        running = [r for r in found if r["status"] == "RUNNING"]
        assert running
        assert all(r["blocks"] > 0 for r in running)
    finally:
        bare.faults.off("lose-abort")
    wait(lambda: bare.once()["requests"] == [], "the end of the zombies", 120)


def terminal(bare: Bare) -> Tmux:
    return Tmux(160, 50, {"KVTOP_DIR": str(bare.server.sockets)})


needs_tmux = pytest.mark.skipif(TMUX is None, reason=NO_TMUX)


@needs_tmux
def test_the_key_asks_and_attaches(bare: Bare) -> None:
    with load.Steady(bare.server.url) as steady, terminal(bare) as tmux:
        tmux.type(in_shell("--url", bare.server.url, "--no-gpus"))
        tmux.wait_text("no probe", 60)
        tmux.press("a")
        tmux.wait_text("Attach the probe")
        assert "kvtop detach" in tmux.screen()
        assert not list(bare.server.sockets.glob("*.sock"))
        tmux.press("n")
        tmux.wait_gone("Attach the probe")
        assert not list(bare.server.sockets.glob("*.sock"))
        tmux.press("a")
        tmux.wait_text("Attach the probe")
        tmux.press("y")
        tmux.wait_text("probe attached with", 60)
        tmux.wait_text("cmpl-", 60)
        assert len(list(bare.server.sockets.glob("*.sock"))) == 3
        tmux.press("a")
        tmux.wait_text("a probe is in this engine already")
        tmux.press("q")
        tmux.wait_text("PROMPT>")
    assert steady.done["failed"] == 0


@needs_tmux
def test_the_option_attaches_without_a_question(bare: Bare) -> None:
    with load.Steady(bare.server.url) as steady, terminal(bare) as tmux:
        tmux.type(in_shell("--attach", "--url", bare.server.url, "--no-gpus"))
        tmux.wait_text("cmpl-", 90)
        assert len(list(bare.server.sockets.glob("*.sock"))) == 3
        tmux.press("q")
        tmux.wait_text("PROMPT>")
    assert steady.done["failed"] == 0


def test_doctor_before_and_after(bare: Bare) -> None:
    def checks() -> tuple[int, dict[str, dict[str, str]]]:
        done = bare.kvtop("doctor", "--json")
        assert done.stderr == ""
        section = f"server 127.0.0.1:{bare.server.port}"
        rows = [c for c in json.loads(done.stdout)["checks"] if c["section"] == section]
        return done.returncode, {row["name"]: row for row in rows}

    names = {f"{role} {process.pid}" for process, role in bare.processes()}
    code, before = checks()
    assert code == ExitCode.DEGRADED
    assert names <= set(before)
    for name in names:
        assert before[name]["state"] == "degraded"
        assert "no probe, can be attached with" in before[name]["text"]
        assert before[name]["remedy"] == f"kvtop attach {name.split()[1]}"
    bare.rows("attach", str(bare.server.process.pid))
    _, after = checks()
    for name in names:
        assert after[name]["state"] == "ok", after[name]
        assert "(attach)" in after[name]["text"]
        assert "vLLM 0." in after[name]["text"]
    assert after["/metrics"]["state"] == "ok"
