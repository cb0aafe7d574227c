from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtop.errors import (
    BadDataError,
    DeniedError,
    ExitCode,
    NotFoundError,
    UnreachableError,
    UsageError,
)
from kvtop.flame import capture as module
from kvtop.flame import target
from kvtop.flame.capture import (
    CancelledCaptureError,
    Plan,
    Recording,
    check,
    command,
    warnings_of,
    without_secrets,
)
from kvtop.flame.folded import code_of
from kvtop.flame.tree import build, threads
from kvtop.model.frames import split_frame
from kvtop.sources.stacks import StacksSource
from kvtop.sources.stacks_spy import find_py_spy

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def py_spy() -> str:
    path = find_py_spy()
    if path is None:
        pytest.skip("py-spy is not installed")
    return path


def script(path: Path, text: str) -> Callable[[], str]:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return lambda: str(path)


def children() -> set[int]:
    """Living child processes of this one."""
    return {
        pid for pid in target.tree_of(os.getpid())[1:] if target.state_of(pid) not in (None, "Z")
    }


async def test_a_real_process_and_its_child(py_spy: str, spawn: Spawn) -> None:
    child = spawn("child")
    capture = await Recording(Plan(child.pid, 2.0, 50)).run()
    assert capture.samples > 0
    names = {name.split(" ", 1)[1] for name in threads(capture.folded)}
    assert "MainThread" in names
    assert len({name.split(" ")[0] for name in threads(capture.folded)}) == 2
    labels = build(capture.folded).labels
    assert any(label.startswith("forward (") for label in labels)
    assert any(label.startswith("allocate_slots (") for label in labels)
    text = str(list(capture.folded.stacks))
    assert "sk-very-secret" not in text
    assert "***" in text
    assert str(child.pid) in capture.folded.title
    assert target.state_of(child.pid) not in ("T", "t")


async def test_the_panel_agrees_with_py_spy_on_the_same_seconds(py_spy: str, spawn: Spawn) -> None:
    child = spawn()
    source = StacksSource({child.pid: "engine"})
    running = asyncio.ensure_future(Recording(Plan(child.pid, 7.0, 50)).run())
    while not running.done():
        await source.read()
        await asyncio.sleep(0.2)
    capture = running.result()
    (stacks,) = await source.read()
    await source.close()
    own: dict[str, int] = {}
    for frames, count in capture.folded.stacks:
        function = split_frame(code_of(frames)[-1])[0]
        own[function] = own.get(function, 0) + count
    assert stacks.frames[0].function == max(own, key=lambda name: own[name]) == "forward"
    by_total = max(stacks.frames, key=lambda frame: frame.total_percent)
    assert by_total.function in ("busy_loop", "<module>")


async def test_only_waiting_threads_and_idle(py_spy: str, spawn: Spawn) -> None:
    child = spawn("idle")
    with pytest.raises(BadDataError, match="no stack") as caught:
        await Recording(Plan(child.pid, 1.0, 20)).run()
    assert "--idle shows where" in caught.value.line()
    capture = await Recording(Plan(child.pid, 1.0, 20, idle=True)).run()
    assert build(capture.folded).split().keys() == {"wait"}
    assert any(name.endswith("sleepy; one") for name in threads(capture.folded))


async def test_cancelling_leaves_no_child(py_spy: str, spawn: Spawn) -> None:
    child = spawn()
    before = children()
    recording = Recording(Plan(child.pid, 60.0, 50))
    running = asyncio.ensure_future(recording.run())
    while not children() - before:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    assert 0.0 < recording.progress < 0.5
    recording.cancel()
    with pytest.raises(CancelledCaptureError):
        await running
    assert children() == before


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_task_that_is_cancelled_leaves_no_child(
    py_spy: str, spawn: Spawn, blocking: bool
) -> None:
    child = spawn()
    before = children()
    running = asyncio.ensure_future(Recording(Plan(child.pid, 60.0, 50, blocking=blocking)).run())
    while not children() - before:
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.7)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert children() == before
    assert target.state_of(child.pid) not in ("T", "t", None)


async def test_ended_early_it_keeps_what_it_has(py_spy: str, spawn: Spawn) -> None:
    child = spawn()
    recording = Recording(Plan(child.pid, 60.0, 50))
    running = asyncio.ensure_future(recording.run())
    await asyncio.sleep(2.0)
    recording.finish()
    capture = await running
    assert capture.samples > 0
    assert capture.seconds < 30.0


async def test_a_target_that_ends_meanwhile(py_spy: str, spawn: Spawn) -> None:
    child = spawn()
    running = asyncio.ensure_future(Recording(Plan(child.pid, 30.0, 50)).run())
    await asyncio.sleep(2.0)
    child.kill()
    child.wait()
    # py-spy writes what it has when its target ends.
    capture = await running
    assert capture.samples > 0
    assert capture.seconds < 25.0
    assert any("ended meanwhile" in warning for warning in capture.warnings)


async def test_a_target_that_ends_before_a_stack_was_seen_did_not_wait(
    spawn: Spawn, tmp_path: Path
) -> None:
    child = spawn("idle")
    spy = 'for word; do [ "$before" = --output ] && : > "$word"; before=$word; done'
    fake = script(tmp_path / "spy", f"{spy}; kill -9 {child.pid}; echo 'Samples: 0 Errors: 0'")
    with pytest.raises(NotFoundError) as caught:
        await Recording(Plan(child.pid, 1.0, 10), fake).run()
    assert f"process {child.pid} ended before" in caught.value.line()
    assert "waited" not in caught.value.line()


async def test_denied_ptrace_names_the_remedy(py_spy: str, spawn: Spawn, tmp_path: Path) -> None:
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("setpriv is not installed: no way to drop a capability in a child")
    if os.geteuid() != 0:
        pytest.skip("not root: there is no CAP_SYS_PTRACE to drop")
    child = spawn()
    run = await asyncio.create_subprocess_exec(
        *(setpriv, "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"),
        *(sys.executable, "-m", "kvtop", "flame", str(child.pid), "--for", "1s"),
        *("-o", str(tmp_path / "x.svg")),
        stderr=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    _, err = await run.communicate()
    assert run.returncode == ExitCode.DENIED
    text = err.decode()
    assert f"py-spy may not read process {child.pid}" in text
    assert "SYS_PTRACE" in text
    assert "ptrace_scope" in text
    assert len(text.splitlines()) == 1
    assert not (tmp_path / "x.svg").exists()


async def test_not_python(py_spy: str) -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        with pytest.raises(BadDataError, match=f"Python of process {child.pid}"):
            # Long enough for py-spy to say so itself on a busy machine.
            await Recording(Plan(child.pid, 15.0, 10)).run()
        child.kill()


async def test_py_spy_is_missing_or_broken(spawn: Spawn, tmp_path: Path) -> None:
    child = spawn("idle")
    plan = Plan(child.pid, 1.0, 10)
    with pytest.raises(NotFoundError, match="not installed"):
        await Recording(plan, lambda: None).run()
    with pytest.raises(NotFoundError, match="cannot be started"):
        await Recording(plan, lambda: str(tmp_path / "none")).run()
    with pytest.raises(UnreachableError, match="without writing"):
        await Recording(plan, script(tmp_path / "quiet", "exit 0")).run()
    with pytest.raises(UnreachableError, match="boom"):
        await Recording(plan, script(tmp_path / "loud", "echo boom; exit 3")).run()
    refused = 'echo "Permission Denied: Try running again with elevated permissions"; exit 1'
    with pytest.raises(DeniedError, match="may not read") as caught:
        await Recording(plan, script(tmp_path / "refused", refused)).run()
    assert "SYS_PTRACE" in caught.value.remedy


async def test_a_target_left_standing_is_named(spawn: Spawn, tmp_path: Path) -> None:
    child = spawn("idle")
    fake = script(tmp_path / "spy", f"kill -STOP {child.pid}; sleep 0.2; exit 3")
    with pytest.raises(UnreachableError) as caught:
        await Recording(Plan(child.pid, 1.0, 10), fake).run()
    assert f"process {child.pid} is stopped (state T) now" in caught.value.line()
    assert f"kill -CONT {child.pid}" in caught.value.line()
    # Without blocking it cannot have been this run: nobody else's stop is undone.
    assert target.state_of(child.pid) == "T"
    os.kill(child.pid, signal.SIGCONT)


async def test_a_blocking_run_that_is_killed_lets_its_target_go_on(
    spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "END_S", 0.3)
    child = spawn("idle")
    fake = script(
        tmp_path / "spy", f"trap '' INT; kill -STOP {child.pid}; while :; do sleep 1; done"
    )
    recording = Recording(Plan(child.pid, 60.0, 10, blocking=True), fake)
    running = asyncio.ensure_future(recording.run())
    while target.state_of(child.pid) != "T":
        await asyncio.sleep(0.05)
    recording.cancel()
    with pytest.raises(CancelledCaptureError) as caught:
        await running
    assert "told to go on" in caught.value.line()
    deadline = time.monotonic() + 10
    while target.state_of(child.pid) == "T" and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert target.state_of(child.pid) != "T"


async def test_a_target_that_stood_before_is_not_our_doing(spawn: Spawn, tmp_path: Path) -> None:
    child = spawn("idle")
    os.kill(child.pid, signal.SIGSTOP)
    while target.state_of(child.pid) != "T":
        await asyncio.sleep(0.02)
    body = 'while [ "$1" != --output ]; do shift; done; echo "a;b 3" > "$2"'
    capture = await Recording(Plan(child.pid, 1.0, 10), script(tmp_path / "spy", body)).run()
    assert capture.warnings == (
        f"process {child.pid} was stopped (state T) before the capture began",
    )
    assert target.state_of(child.pid) == "T"


async def test_a_run_that_falls_behind_ends_when_its_time_is_over(
    spawn: Spawn, tmp_path: Path
) -> None:
    # As py-spy does on a busy machine: it goes on, until it is told to end, and then writes.
    child = spawn("idle")
    body = (
        'while [ "$1" != --output ]; do shift; done; out="$2"\n'
        'trap \'echo "a;b 3" > "$out"; exit 0\' INT\n'
        "echo Sampling process 10 times a second; while :; do sleep 0.1; done"
    )
    capture = await Recording(Plan(child.pid, 0.5, 10), script(tmp_path / "spy", body)).run()
    assert capture.folded.total == 3
    assert capture.seconds < 20.0


async def test_a_run_that_never_begins_is_ended(
    spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "START_S", 0.2)
    child = spawn("idle")
    fake = script(tmp_path / "spy", "trap 'exit 3' INT; while :; do sleep 0.1; done")
    with pytest.raises(UnreachableError, match="gave no reason"):
        await Recording(Plan(child.pid, 60.0, 10), fake).run()


async def test_a_run_that_never_ends_is_killed(
    spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "END_S", 0.2)
    before = children()
    child = spawn("idle")
    fake = script(
        tmp_path / "spy", "trap '' INT; echo Sampling process; while :; do sleep 0.2; done"
    )
    with pytest.raises(UnreachableError, match="was killed"):
        await Recording(Plan(child.pid, 0.5, 10), fake).run()
    assert children() - {child.pid} <= before | children()
    assert not [p for p in children() - before - {child.pid} if "spy" in target.command_of(p)]


def test_numbers_are_bounded(spawn: Spawn) -> None:
    me = os.getpid()
    for plan in (Plan(me, 0.0), Plan(me, 1e6), Plan(me, 1.0, 0), Plan(me, 1.0, 100_000)):
        with pytest.raises(UsageError):
            check(plan)
    with pytest.raises(NotFoundError):
        check(Plan(2**22 + 1))


def test_what_stops_the_target_is_chosen_and_warned_of(spawn: Spawn) -> None:
    pid = spawn().pid
    assert warnings_of(Plan(pid)) == ()
    assert "--nonblocking" in command("py-spy", Plan(pid), Path("x"))
    for plan in (Plan(pid, blocking=True), Plan(pid, native=True)):
        assert "--nonblocking" not in command("py-spy", plan, Path("x"))
        (text,) = warnings_of(plan)
        assert "stops all 2 threads in 1 processes" in text
    (text,) = warnings_of(Plan(pid, gil=True))
    assert "only the one of 2 threads in 1 processes" in text
    assert "nothing is stopped" in text
    assert {"--gil", "--nonblocking"} <= set(command("py-spy", Plan(pid, gil=True), Path("x")))


def test_secrets_do_not_reach_a_file() -> None:
    line = 'process 1:"serve --api-key sk-1 --hf-token=abc --max-tokens 5 --port 1";f (a.py:1) 3'
    assert without_secrets(line) == (
        'process 1:"serve --api-key *** --hf-token=*** --max-tokens 5 --port 1";f (a.py:1) 3'
    )
