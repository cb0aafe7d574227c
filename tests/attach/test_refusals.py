"""The real commands on what cannot be attached: one plain line each, and an exit code."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvtop.attach.procfs import Proc
from kvtop.errors import ExitCode

Make = Callable[..., Any]
ROOT = Path(__file__).parents[2]
NOBODY = 65534
SETPRIV = shutil.which("setpriv")

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or SETPRIV is None, reason="becoming another user needs root and setpriv"
)

OLD_API = """
import multiprocessing, socket, sys, time
import vllm

def engine():
    import vllm
    print("engine up", flush=True)
    time.sleep(600)

if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
    multiprocessing.get_context("spawn").Process(target=engine, daemon=True).start()
    time.sleep(600)
"""
"""The API server of a vLLM before V1, as far as it is seen from outside."""


def run(*arguments: str, before: tuple[str, ...] = (), python: str = sys.executable) -> Any:
    """A command of kvtop; it must not end in a traceback."""
    environ = {name: value for name, value in os.environ.items() if name != "KVTOP_DIR"}
    done = subprocess.run(
        [*before, python, "-m", "kvtop", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *_packages()])},
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done


def _packages() -> list[str]:
    return [path for path in sys.path if path.endswith("site-packages")]


def refused(done: Any, code: ExitCode) -> str:
    """The one line of a command that has done nothing."""
    assert done.returncode == code, done.stdout + done.stderr
    (line,) = (done.stdout + done.stderr).splitlines()
    assert line.isprintable()
    return str(line)


@cache
def python_for_all() -> str:
    """An interpreter that another user can start and that has what kvtop needs."""
    check = "import kvtop.cli, httpx, psutil"
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        if not os.path.exists(path):
            continue
        done = subprocess.run(
            [*as_user(NOBODY), path, "-c", check],
            capture_output=True,
            check=False,
            cwd="/",
            env={"PYTHONPATH": os.pathsep.join([str(ROOT), *_packages()]), "PATH": "/usr/bin:/bin"},
        )
        if done.returncode == 0:
            return path
    pytest.skip("no interpreter with kvtop's packages that another user may start")


def as_user(uid: int) -> tuple[str, ...]:
    home = ("env", "HOME=/nonexistent", "XDG_CONFIG_HOME=/nonexistent")
    return (str(SETPRIV), f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *home)


NO_TRACE = (str(SETPRIV), "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")
"""As root in a container that was not given the capability."""


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as child:
        yield child.pid
        child.kill()


@pytest.mark.parametrize("command", ["attach", "detach"])
class TestWrongPids:
    @pytest.mark.parametrize("text", ["abc", "0", "1.5", "99999999999"])
    def test_no_pid(self, command: str, text: str) -> None:
        assert "is not a process id" in refused(run(command, text), ExitCode.USAGE)

    def test_a_dead_one(self, command: str) -> None:
        with subprocess.Popen(["true"]) as child:
            pid = child.pid
        line = refused(run(command, str(pid)), ExitCode.NOT_FOUND)
        assert f"there is no process {pid}" in line

    def test_not_python(self, command: str, sleeper: int) -> None:
        line = refused(run(command, str(sleeper)), ExitCode.NOT_FOUND)
        assert f"process {sleeper} (sleep) is not part of a vLLM server" in line

    def test_python_without_vllm(self, command: str) -> None:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
            line = refused(run(command, str(child.pid)), ExitCode.NOT_FOUND)
        assert "is not part of a vLLM server" in line


def test_a_process_that_only_has_the_name(make_target: Make) -> None:
    target = make_target(mode="steps")
    line = refused(run("attach", str(target.pid)), ExitCode.BAD_DATA)
    assert "it is not a vLLM process" in line


def test_a_stopped_engine(make_target: Make) -> None:
    target = make_target(mode="steps")
    os.kill(target.pid, signal.SIGSTOP)
    for _ in range(100):
        if target.state() == "T":
            break
        time.sleep(0.01)
    line = refused(run("attach", str(target.pid)), ExitCode.UNREACHABLE)
    assert "is stopped" in line
    assert f"kill -CONT {target.pid}" in line
    checks = doctor(target.pid)
    assert f"kill -CONT {target.pid}" in {check["remedy"] for check in checks}
    os.kill(target.pid, signal.SIGCONT)


def doctor(pid: int, **options: Any) -> list[dict[str, str]]:
    """What `kvtop doctor` says of one process."""
    done = run("doctor", "--json", **options)
    assert (done.returncode, done.stderr) == (ExitCode.DEGRADED, "")
    checks: list[dict[str, str]] = json.loads(done.stdout)["checks"]
    assert run("doctor", **options).returncode == ExitCode.DEGRADED
    return [check for check in checks if check["name"].endswith(f" {pid}")]


@pytest.fixture
def old_server(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """A stand-in for vLLM 0.7: pid of its API server and of its engine."""
    package = tmp_path / "vllm/entrypoints/openai"
    package.mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").write_text("__version__ = '0.7.3'\n")
    (package / "api_server.py").write_text(OLD_API)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    module = "vllm.entrypoints.openai.api_server"
    child = subprocess.Popen(
        [sys.executable, "-m", module, "--model", "m", "--port", str(port)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "engine up\n"
    proc = Proc()
    stats = {pid: proc.stat(pid) for pid in proc.pids()}
    children = [
        pid
        for pid, stat in stats.items()
        if stat and stat.ppid == child.pid and any("spawn_main" in a for a in proc.cmdline(pid))
    ]
    try:
        yield child.pid, children[0]
    finally:
        child.kill()
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        child.stdout.close()
        child.wait()


def test_a_vllm_before_v1(old_server: tuple[int, int]) -> None:
    done = run("attach", str(old_server[0]))
    assert done.returncode == ExitCode.BAD_DATA
    lines = done.stdout.splitlines()
    assert {int(line.split()[1].rstrip(":")) for line in lines} == set(old_server)
    assert all("vLLM 0.7.3 has no V1 engine" in line for line in lines)
    assert done.stderr == ""


@needs_root
class TestWithoutRights:
    def test_another_users_engine(self, make_target: Make) -> None:
        target = make_target(mode="steps")
        options = {"before": as_user(NOBODY), "python": python_for_all()}
        for command in ("attach", "detach"):
            line = refused(run(command, str(target.pid), **options), ExitCode.DENIED)
            assert f"process {target.pid} belongs to user 0; run kvtop as that user" in line
        (check,) = doctor(target.pid, **options)
        assert "belongs to another user" in check["text"]
        assert "attach" not in check["text"]
        assert check["remedy"] == "run kvtop as user 0 or as root"

    def test_an_engine_of_ones_own_without_any_capability(self, make_target: Make) -> None:
        python = python_for_all()
        named = ["bash", "-c", 'exec -a VLLM::EngineCore "$0" "$@"']
        target = make_target(python, "steps", [*as_user(NOBODY), *named], {"KVTOP_DIR": ""})
        # It gets as far as the code inside, which finds no vLLM.
        done = run("attach", str(target.pid), before=as_user(NOBODY), python=python)
        assert "it is not a vLLM process" in refused(done, ExitCode.BAD_DATA)

    def test_without_the_right_to_trace(self, make_target: Make) -> None:
        target = make_target(mode="steps")
        line = refused(run("attach", str(target.pid), before=NO_TRACE), ExitCode.DENIED)
        assert f"the system does not let this user trace process {target.pid}" in line
        assert "SYS_PTRACE" in line
        checks = doctor(target.pid, before=NO_TRACE)
        text = next(c for c in checks if "no probe" in c["text"])
        assert "cannot be attached: the system does not let this user trace" in text["text"]
        assert "SYS_PTRACE" in text["remedy"]
