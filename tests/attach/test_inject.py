"""The probe in real processes: every Python and every way in that this machine has."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attach_targets import INTERPRETERS, VERSIONS

from kvtop.attach import deliver, native, payload, probe
from kvtop.attach.ability import AttachError, Backend, Injectee
from kvtop.attach.hello import ask
from kvtop.attach.native import NativeBackend
from kvtop.attach.remote import RemoteExecBackend
from kvtop.attach.with_frida import FridaBackend
from kvtop.attach.with_gdb import GdbBackend
from kvtop.errors import ExitCode

Make = Callable[..., Any]

PYTHONS = [
    pytest.param(
        INTERPRETERS.get(version, ""),
        id=version,
        marks=pytest.mark.skipif(
            version not in INTERPRETERS,
            reason=f"no Python {version} in KVTOP_PYTHONS, in pyenv or on PATH",
        ),
    )
    for version in VERSIONS
]


@pytest.fixture(scope="session")
def may_trace() -> None:
    """Skips where this user may not trace another process of its own."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            os.close(os.open(f"/proc/{child.pid}/mem", os.O_RDWR))
        except OSError as error:
            pytest.skip(f"this user may not trace its own processes: {error}")
        finally:
            child.kill()


def way(name: str) -> tuple[Backend, ...]:
    backend: dict[str, Callable[[], Backend]] = {
        "ptrace": NativeBackend,
        "frida": FridaBackend,
        "gdb": GdbBackend,
    }
    if name == "ptrace" and platform.machine() != "x86_64":
        pytest.skip("the ptrace back end is built for x86-64")
    if name == "frida" and not FridaBackend.installed().ok:
        pytest.skip("frida is not installed (extra `attach`)")
    if name == "gdb" and shutil.which("gdb") is None:
        pytest.skip("gdb is not installed")
    return (backend[name](),)


def found(target: Any, pid: int | None = None) -> Any:
    """The target as discovery finds it, with its probe socket."""
    from kvtop.attach.find import Finder

    pid = pid or target.pid
    for server in Finder().find().servers:
        for process in server.processes:
            if process.pid == pid:
                return process
    return target.process(pid)


@pytest.mark.usefixtures("may_trace")
class TestWays:
    @pytest.mark.parametrize("python", PYTHONS)
    @pytest.mark.parametrize("name", ["ptrace", "frida", "gdb"])
    @pytest.mark.parametrize("mode", ["idle", "steps"])
    def test_in_and_out_again(self, make_target: Make, python: str, name: str, mode: str) -> None:
        among = way(name)
        target = make_target(python, mode)
        threads, descriptors = target.threads(), target.descriptors()
        done = probe.attach(target.process(), "engine", among=among, any_process=True)
        assert done.changed
        process = found(target)
        hello = ask(process.probe_socket)
        assert hello is not None
        assert (hello.role, hello.pid, hello.loaded_by) == ("engine", target.pid, "attach")
        again = probe.attach(process, "engine", among=among, any_process=True)
        assert not again.changed
        assert "already" in again.text
        assert probe.detach(process, "engine", among=among).changed
        assert not process.probe_socket.exists()
        target.settle(threads, descriptors)
        assert (target.threads(), target.descriptors()) == (threads, descriptors)
        assert target.child.poll() is None
        gone = probe.detach(found(target), "engine", among=among)
        assert not gone.changed

    @pytest.mark.parametrize("python", PYTHONS)
    def test_a_busy_thread_is_never_borrowed(
        self, make_target: Make, python: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(native, "PATIENCE_S", 0.5)
        target = make_target(python, "busy")
        with pytest.raises(AttachError, match="safely"):
            probe.attach(target.process(), "engine", among=way("ptrace"), any_process=True)
        assert target.state() in "RS"
        assert target.child.poll() is None

    @pytest.mark.parametrize("python", PYTHONS)
    def test_a_busy_process_with_a_thread_that_waits(self, make_target: Make, python: str) -> None:
        target = make_target(python, "busy poller")
        done = probe.attach(target.process(), "engine", among=way("ptrace"), any_process=True)
        assert done.changed
        assert probe.detach(found(target), "engine", among=way("ptrace")).changed

    def test_a_busy_process_is_left_to_frida(
        self, make_target: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(native, "PATIENCE_S", 0.5)
        target = make_target(sys.executable, "busy")
        among = (*way("ptrace"), *way("frida"))
        done = probe.attach(target.process(), "engine", among=among, any_process=True)
        assert "frida" in done.text

    def test_a_stopped_process_is_refused_and_stays_stopped(self, make_target: Make) -> None:
        target = make_target(sys.executable, "steps")
        os.kill(target.pid, signal.SIGSTOP)
        for _ in range(100):
            if target.state() == "T":
                break
            time.sleep(0.01)
        with pytest.raises(AttachError, match="stopped") as caught:
            probe.attach(target.process(), "engine", any_process=True)
        assert f"kill -CONT {target.pid}" in caught.value.remedy
        assert target.state() == "T"
        os.kill(target.pid, signal.SIGCONT)

    def test_many_rounds_leave_nothing_behind(self, make_target: Make) -> None:
        target = make_target(sys.executable, "steps")
        threads, descriptors = target.threads(), target.descriptors()
        counts = []
        for _ in range(12):
            assert probe.attach(
                target.process(), "engine", among=way("ptrace"), any_process=True
            ).changed
            assert probe.detach(found(target), "engine", among=way("ptrace")).changed
            target.settle(threads, descriptors)
            counts.append((target.threads(), target.descriptors(), target.mappings()))
        # The first rounds import modules; after them nothing may grow.
        assert counts[-1][:2] == counts[3][:2]
        # Arenas of the allocator come and go: what a round leaves would be there eight times.
        assert counts[-1][2] - counts[3][2] < 8

    def test_a_process_without_vllm_says_so(self, make_target: Make) -> None:
        target = make_target(sys.executable, "steps")
        with pytest.raises(AttachError, match="not a vLLM process"):
            probe.attach(target.process(), "engine", among=way("ptrace"))
        assert target.child.poll() is None

    def test_code_that_raises_does_not_reach_the_target(self, make_target: Make) -> None:
        target = make_target(sys.executable, "steps")
        process = target.process()
        bad = payload.boot("raise SystemExit(3)")
        way("ptrace")[0].run(deliver.injectee(process), bad)
        time.sleep(0.3)
        assert target.child.poll() is None
        assert probe.attach(process, "engine", among=way("ptrace"), any_process=True).changed

    def test_a_signal_that_comes_meanwhile_is_not_lost(self, make_target: Make) -> None:
        target = make_target(sys.executable, "steps")
        backend = way("ptrace")[0]
        at = deliver.injectee(target.process())
        for _ in range(20):
            backend.run(at, "pass")
        os.kill(target.pid, signal.SIGTERM)
        assert target.child.wait(5) == -signal.SIGTERM


def doctor(pid: int) -> list[dict[str, str]]:
    """What `kvtop doctor` says of the container of an engine, and of the engine."""
    done = subprocess.run(
        [sys.executable, "-m", "kvtop", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    checks = json.loads(done.stdout)["checks"]
    (section,) = {c["section"] for c in checks if c["name"] == f"engine {pid}"}
    mine = [c for c in checks if c["section"] == section]
    return [c for c in mine if c["name"] in {"server", f"engine {pid}"}]


@pytest.mark.usefixtures("may_trace")
def test_a_container_is_attached_and_read_through_its_root(make_target: Make) -> None:
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0:
        pytest.skip("making namespaces needs root and unshare")
    if sys.prefix.startswith("/tmp/") or __file__.startswith("/tmp/"):
        pytest.skip("kvtop itself is below /tmp, which the container of this test has for itself")
    inside = 'mount -t tmpfs none /tmp && unset KVTOP_DIR && exec -a VLLM::EngineCore "$@"'
    wrap = [unshare, "-p", "-m", "-f", "--kill-child", "--mount-proc", "bash", "-c", inside, "sh"]
    target = make_target(sys.executable, "steps", wrap)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(target.pid)], capture_output=True, text=True, check=True
    )
    pid = int(children.stdout)
    process = replace(target.process(pid), container=True)
    assert process.ns_pid == 1
    server, engine = doctor(pid)
    assert "in a container" in server["text"]
    assert "no probe, can be attached with" in engine["text"]
    assert "pid 1 in its container" in engine["text"]
    assert probe.attach(process, "engine", any_process=True).changed
    seen = found(target, pid)
    assert seen.container
    assert str(seen.probe_socket) == f"/proc/{pid}/root/tmp/kvtop-0/engine-1.sock"
    _, engine = doctor(pid)
    assert (engine["state"], engine["remedy"]) == ("ok", "")
    assert "(attach)" in engine["text"]
    assert probe.detach(seen, "engine").changed


def test_a_process_that_ended_or_was_replaced(make_target: Make) -> None:
    target = make_target(sys.executable, "steps")
    process = target.process()
    with pytest.raises(AttachError) as caught:
        probe.attach(replace(process, start_ticks=1), "engine")
    assert caught.value.code is ExitCode.NOT_FOUND
    target.child.kill()
    target.child.wait()
    with pytest.raises(AttachError, match="gone"):
        probe.attach(process, "engine")


def test_another_users_process_is_refused(
    make_target: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make_target(sys.executable, "steps")
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(AttachError, match="belongs to user") as caught:
        probe.attach(replace(target.process(), uid=4243), "engine")
    assert caught.value.code is ExitCode.DENIED


def test_no_way_in_names_the_reason_of_each() -> None:
    class Never:
        def __init__(self, name: str, reason: str) -> None:
            self.name, self.reason = name, reason

        def available(self, target: Injectee) -> Any:
            from kvtop.attach.ability import Ability

            return Ability(False, self.reason)

        def run(self, target: Injectee, code: str) -> None:
            raise AssertionError("must not be run")

    from kvtop.attach.procfs import Proc
    from kvtop.attach.servers import FoundProcess

    stat = Proc().stat(os.getpid())
    assert stat is not None
    me = FoundProcess(os.getpid(), os.getpid(), os.geteuid(), stat.start_ticks)
    with pytest.raises(AttachError) as caught:
        probe.attach(me, "engine", among=[Never("a", "too old"), Never("b", "not there")])
    assert "a: too old, b: not there" in caught.value.what
    assert caught.value.code is ExitCode.DENIED


@pytest.mark.parametrize(
    ("version", "container", "reason"),
    [
        (None, False, "not known"),
        ((3, 13), False, "needs Python 3.14"),
        ((3, 99), True, "cannot be run from here"),
    ],
)
def test_remote_exec_explains_itself(
    version: tuple[int, int] | None, container: bool, reason: str
) -> None:
    target = Injectee(1, 1, 0, python=version, executable="/x", container=container)
    ability = RemoteExecBackend().available(target)
    assert not ability.ok
    assert reason in ability.reason


WITH_3_14 = pytest.mark.skipif(
    "3.14" not in INTERPRETERS, reason="no Python 3.14 in KVTOP_PYTHONS, in pyenv or on PATH"
)
REMOTE = (RemoteExecBackend(),)


def requests_left(target: Any) -> list[Path]:
    """Files with code that a target has not run."""
    return list(Path("/tmp").glob(f"kvtop-{target.pid}-*"))


@WITH_3_14
@pytest.mark.usefixtures("may_trace")
class TestRemoteExec:
    @pytest.mark.parametrize("mode", ["steps", "busy", "busy poller"])
    def test_in_and_out_again(self, make_target: Make, mode: str) -> None:
        target = make_target(INTERPRETERS["3.14"], mode)
        threads, descriptors = target.threads(), target.descriptors()
        for _ in range(3):
            done = probe.attach(target.process(), "engine", among=REMOTE, any_process=True)
            assert "remote_exec" in done.text
            process = found(target)
            hello = ask(process.probe_socket)
            assert hello is not None
            assert hello.loaded_by == "attach"
            again = probe.attach(process, "engine", among=REMOTE, any_process=True)
            assert not again.changed
            assert probe.detach(process, "engine", among=REMOTE).changed
            assert not process.probe_socket.exists()
            target.settle(threads, descriptors)
            assert (target.threads(), target.descriptors()) == (threads, descriptors)
        assert target.child.poll() is None
        assert requests_left(target) == []

    def test_a_main_thread_that_waits_is_left_to_the_next_way(
        self, make_target: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(deliver, "WAKE_S", 0.5)
        target = make_target(INTERPRETERS["3.14"], "idle")
        among = (*REMOTE, *way("ptrace"))
        for _ in range(2):
            done = probe.attach(target.process(), "engine", among=among, any_process=True)
            assert "ptrace" in done.text
            done = probe.detach(found(target), "engine", among=among)
            assert done.changed
            assert "ptrace" in done.text
        # The code of the last try is withdrawn: what lies there would only remove itself.
        (left,) = requests_left(target)
        assert len(left.read_text()) < 200
        left.unlink()

    def test_alone_it_says_what_a_waiting_main_thread_needs(
        self, make_target: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(deliver, "DEADLINE_S", 1.0)
        target = make_target(INTERPRETERS["3.14"], "pause")
        with pytest.raises(AttachError, match="has run no Python") as caught:
            probe.attach(target.process(), "engine", among=REMOTE, any_process=True)
        assert "next request" in caught.value.remedy
        # It wakes up: nothing happens, and the file is gone.
        os.kill(target.pid, signal.SIGUSR1)
        for _ in range(200):
            if not requests_left(target):
                break
            time.sleep(0.02)
        assert requests_left(target) == []
        assert "kvtop" not in "".join(target.thread_names())
        assert target.child.poll() is None

    def test_a_stopped_process_is_refused(self, make_target: Make) -> None:
        target = make_target(INTERPRETERS["3.14"], "steps")
        os.kill(target.pid, signal.SIGSTOP)
        for _ in range(100):
            if target.state() == "T":
                break
            time.sleep(0.01)
        with pytest.raises(AttachError, match="stopped"):
            probe.attach(target.process(), "engine", among=REMOTE, any_process=True)
        assert requests_left(target) == []
        os.kill(target.pid, signal.SIGCONT)

    def test_it_is_tried_first(self, make_target: Make) -> None:
        target = make_target(INTERPRETERS["3.14"], "steps")
        done = probe.attach(target.process(), "engine", any_process=True)
        assert "remote_exec" in done.text
        assert probe.detach(found(target), "engine").changed

    def test_a_target_that_does_not_allow_it(self, make_target: Make) -> None:
        target = make_target(
            INTERPRETERS["3.14"], "steps", environ={"PYTHON_DISABLE_REMOTE_DEBUG": "1"}
        )
        with pytest.raises(AttachError, match=r"sys\.remote_exec .* not enabled"):
            probe.attach(target.process(), "engine", among=REMOTE, any_process=True)
        assert requests_left(target) == []
        done = probe.attach(
            target.process(), "engine", among=(*REMOTE, *way("ptrace")), any_process=True
        )
        assert "ptrace" in done.text


@pytest.mark.usefixtures("may_trace")
def test_a_probe_that_finds_nothing_is_taken_out_again(
    make_target: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliver, "DEADLINE_S", 5.0)
    target = make_target(sys.executable, "nothing")
    threads = target.threads()
    with pytest.raises(AttachError, match="nothing to watch") as caught:
        probe.attach(target.process(), "engine", among=way("ptrace"), any_process=True)
    assert caught.value.code is ExitCode.UNREACHABLE
    target.settle(threads, target.descriptors())
    assert target.threads() == threads


@pytest.mark.usefixtures("may_trace")
def test_code_that_begins_too_late_does_nothing(
    make_target: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an engine that is stuck while it holds the GIL, and goes on later."""
    monkeypatch.setattr(deliver, "DEADLINE_S", 2.0)
    target = make_target(sys.executable, "stuck")
    with pytest.raises(AttachError, match="has done nothing in 2 s"):
        probe.attach(target.process(), "engine", among=way("ptrace"), any_process=True)
    os.kill(target.pid, signal.SIGUSR1)
    # Where it stood still before, a method of its engine runs now.
    assert target.child.stdout.readline() == "on\n"
    target.settle(1, target.descriptors())
    assert target.threads() == 1
    assert not found(target).probe_socket
    done = probe.attach(target.process(), "engine", among=way("ptrace"), any_process=True)
    assert done.changed
