from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtop.sources.base import SourceError
from kvtop.sources.stacks import StacksSource
from kvtop.sources.stacks_parse import Call, Dump, ThreadStack, parse_dump, stacks_of, top_frames
from kvtop.sources.stacks_spy import (
    GoneError,
    TransientError,
    dump,
    explain,
    find_py_spy,
)

DUMPS = Path(__file__).with_name("dumps")
CHILD = """
import threading, time
def hot():
    total = 0
    while True:
        total += sum(range(50))
def outer():
    hot()
threading.Thread(target=threading.Event().wait, name="sleeper", daemon=True).start()
print("up", flush=True)
outer()
"""


@pytest.fixture
def busy_child() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child
        child.kill()


@pytest.fixture
def py_spy() -> str:
    path = find_py_spy()
    if path is None:
        pytest.skip("py-spy is not installed")
    return path


def recorded(name: str, time_s: float = 1.0) -> Dump:
    return parse_dump((DUMPS / name).read_bytes(), time_s)


def thread(name: str, *functions: str, active: bool = True) -> ThreadStack:
    calls = tuple(Call(function, "f.py", at) for at, function in enumerate(functions, 1))
    return ThreadStack(name, active, False, calls)


def test_an_engine_that_waits_shows_where_its_main_thread_waits() -> None:
    frames = top_frames([recorded("engine-idle.json")])
    assert {frame.thread for frame in frames} == {"MainThread"}
    assert frames[0].self_percent == 100.0
    assert "EngineCoreProc.run_busy_loop" in {frame.function for frame in frames}


def test_an_engine_that_works_shows_only_what_works() -> None:
    frames = top_frames([recorded("engine-gil.json")])
    assert {frame.thread for frame in frames} == {"MainThread"}
    assert (frames[0].function, frames[0].self_percent) == ("Socket.send", 100.0)
    assert frames[0].file.startswith("zmq/")


def test_shares_over_a_window_of_recorded_dumps() -> None:
    names = ["engine-idle.json", "engine-busy.json", "engine-busy.json", "engine-gil.json"]
    dumps = [recorded(name, float(at)) for at, name in enumerate(names)]
    stacks = stacks_of(9, "engine", dumps)
    assert stacks is not None
    share = {frame.function: frame.self_percent for frame in stacks.frames}
    assert share["sched_yield"] == 50.0
    assert share["Socket.send"] == 25.0
    assert "Condition.wait" not in share
    total = {frame.function: frame.total_percent for frame in stacks.frames}
    assert total["EngineCoreProc.run_busy_loop"] == 75.0
    assert not stacks.stalled
    # Two dumps busy-wait for the worker, one idles, one sends to the worker.
    assert stacks.split == {"model": 25.0, "wait": 75.0}
    assert (stacks.samples, stacks.window_s, stacks.rate_hz, stacks.time_s) == (4, 3.0, 1.0, 3.0)


def test_only_a_window_without_any_work_shows_where_it_waits() -> None:
    idle = [recorded("engine-idle.json", float(at)) for at in range(3)]
    stacks = stacks_of(9, "engine", idle)
    assert stacks is not None
    assert stacks.stalled
    assert stacks.frames[0].function == "Condition.wait"
    assert stacks.split == {"wait": 100.0}


def test_the_cost_is_the_median_of_what_was_measured() -> None:
    dumps = [replace(recorded("engine-busy.json"), cost_s=cost) for cost in (0.01, None, 0.02, 9.0)]
    stacks = stacks_of(9, "engine", dumps)
    assert stacks is not None
    assert stacks.cost_ms == pytest.approx(20.0)
    unmeasured = stacks_of(9, "engine", [recorded("engine-busy.json")])
    assert unmeasured is not None
    assert unmeasured.cost_ms is None


def test_recursion_counts_once_a_dump() -> None:
    frames = top_frames([Dump(0.0, (thread("t", "a", "b", "a", "b"),))])
    assert {f.function: (f.self_percent, f.total_percent) for f in frames} == {
        "a": (100.0, 100.0),
        "b": (0.0, 100.0),
    }


def test_idle_threads_do_not_count_beside_an_active_one() -> None:
    both = Dump(0.0, (thread("w", "wait", active=False), thread("x", "run")))
    assert [frame.function for frame in top_frames([both])] == ["run"]
    nameless = Dump(0.0, (thread("w", "wait", active=False), thread("v", "park", active=False)))
    assert {frame.function for frame in top_frames([nameless])} == {"wait", "park"}


def test_the_line_is_the_one_most_often_seen() -> None:
    dumps = [
        Dump(0.0, (ThreadStack("t", True, False, (Call("f", "a.py", line),)),))
        for line in (5, 7, 7, None)
    ]
    (frame,) = top_frames(dumps)
    assert frame.line == 7


def test_hottest_first_and_bounded() -> None:
    dumps = [Dump(float(n), (thread("t", f"f{n % 3}", "root"),)) for n in range(9)]
    dumps.append(Dump(9.0, (thread("t", "f2", "root"),)))
    frames = top_frames(dumps, limit=2)
    assert [frame.function for frame in frames] == ["f2", "f0"]
    assert stacks_of(1, "engine", []) is None


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"frames": 3}]', "[null]", "\x00"])
def test_output_that_is_not_py_spys(text: str) -> None:
    with pytest.raises(ValueError, match="py-spy answered"):
        parse_dump(text, 0.0)


def test_missing_fields_are_unknown_and_not_invented() -> None:
    found = parse_dump('[{"os_thread_id": 7, "frames": [{"line": 0}, 5]}]', 0.0)
    (one,) = found.threads
    assert one.thread == "thread 7"
    assert one.calls == (Call("?", "?", None),)


@pytest.mark.parametrize(
    ("err", "exists", "kind", "words"),
    [
        ("Error: Permission denied (os error 13)", True, SourceError, "may not read process 7"),
        ("Error: Operation not permitted (os error 1)", True, SourceError, "may not read"),
        ("Error: Failed to find python version from target process", True, SourceError, "not know"),
        ("Error: No such file or directory (os error 2)", False, GoneError, "gone"),
        (
            "Error: Failed to copy PyFrameObject\n  Bad address (os error 14)",
            True,
            TransientError,
            "7",
        ),
        ("", True, TransientError, "no reason"),
    ],
)
def test_what_failures_mean(err: str, exists: bool, kind: type[Exception], words: str) -> None:
    error = explain(err, 7, exists=exists)
    assert isinstance(error, kind)
    assert words in str(error)
    if "os error 1)" in err or "os error 13" in err:
        assert isinstance(error, SourceError)
        assert "SYS_PTRACE" in error.remedy
        assert "ptrace_scope" in error.remedy


async def test_a_real_process(py_spy: str, busy_child: subprocess.Popen[str]) -> None:
    source = StacksSource({busy_child.pid: "engine"}, locate=lambda: py_spy)
    source.period_s = 0.0
    for _ in range(6):
        stacks = await source.read()
    (one,) = stacks
    assert (one.pid, one.role) == (busy_child.pid, "engine")
    frames = {frame.function: frame for frame in one.frames}
    assert frames["outer"].total_percent == 100.0
    assert frames["hot"].thread == "MainThread"
    assert frames["hot"].self_percent > 0.0
    assert "wait" not in frames
    assert one.cost_ms is not None
    assert one.cost_ms > 0.0
    await source.close()


async def test_a_process_that_ends_hides_no_other(
    py_spy: str, busy_child: subprocess.Popen[str]
) -> None:
    source = StacksSource({busy_child.pid: "worker", 2**22 + 1: "engine"}, locate=lambda: py_spy)
    source.period_s = 0.0
    assert [one.pid for one in await source.read()] == [busy_child.pid]
    busy_child.kill()
    busy_child.wait()
    with pytest.raises(SourceError, match="is gone"):
        await source.read()


async def test_not_python(py_spy: str) -> None:
    with subprocess.Popen(["sleep", "30"]) as child:
        source = StacksSource({child.pid: "engine"}, locate=lambda: py_spy)
        with pytest.raises(SourceError, match="does not know the Python"):
            await source.read()
        child.kill()


async def test_off_starts_nothing() -> None:
    def never() -> str:
        raise AssertionError("py-spy was looked for")

    source = StacksSource({os.getpid(): "engine"}, locate=never)
    source.enabled = False
    assert await source.read() == ()
    source.enabled = True
    source.targets = {}
    assert await source.read() == ()


async def test_py_spy_is_missing() -> None:
    source = StacksSource({os.getpid(): "engine"}, locate=lambda: None)
    with pytest.raises(SourceError, match="not installed") as caught:
        await source.read()
    assert "pip install" in caught.value.remedy


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


async def test_at_most_once_a_second(tmp_path: Path) -> None:
    log = tmp_path / "log"
    body = '[{"thread_name": "MainThread", "active": true, "frames": [{"name": "f"}]}]'
    fake = script(tmp_path / "spy", f"echo run >> {log}\necho '{body}'")
    source = StacksSource({os.getpid(): "engine"}, locate=lambda: fake)
    first = await source.read()
    assert await source.read() == first
    assert log.read_text().split() == ["run"]


async def test_a_run_that_the_process_outran_is_made_again(tmp_path: Path) -> None:
    marker = tmp_path / "tried"
    body = '[{"thread_name": "MainThread", "active": true, "frames": [{"name": "f"}]}]'
    fake = script(
        tmp_path / "spy",
        f"if [ -e {marker} ]; then echo '{body}'; else touch {marker}; echo bad >&2; exit 1; fi",
    )
    source = StacksSource({os.getpid(): "engine"}, locate=lambda: fake)
    assert len(await source.read()) == 1


async def test_old_samples_are_dropped_when_a_process_cannot_be_read_any_more(
    tmp_path: Path,
) -> None:
    broken = tmp_path / "broken"
    body = '[{"thread_name": "MainThread", "active": true, "frames": [{"name": "f"}]}]'
    fake = script(tmp_path / "spy", f"if [ -e {broken} ]; then exit 1; fi\necho '{body}'")
    source = StacksSource({os.getpid(): "engine"}, locate=lambda: fake)
    source.period_s = 0.0
    assert len(await source.read()) == 1
    broken.touch()
    assert len(await source.read()) == 1
    assert len(await source.read()) == 1
    with pytest.raises(SourceError):
        await source.read()


def children() -> set[int]:
    """Child processes of all threads of this process; threads may end while it looks."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/self/task/{task}/children").read_text()
            found |= {int(pid) for pid in text.split()}
    return found


async def test_a_run_that_hangs_is_killed_and_collected(tmp_path: Path) -> None:
    fake = script(tmp_path / "spy", "exec sleep 60")
    before = children()
    with pytest.raises(TransientError, match="did not finish"):
        await dump(fake, os.getpid(), 0.1)
    assert children() <= before


async def test_cancelling_kills_and_collects_too(tmp_path: Path) -> None:
    fake = script(tmp_path / "spy", "exec sleep 60")
    before = children()
    task = asyncio.ensure_future(dump(fake, os.getpid(), 60.0))
    while not children() - before:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert children() <= before


async def test_the_target_runs_on_when_py_spy_is_killed(
    py_spy: str, busy_child: subprocess.Popen[str]
) -> None:
    for at in range(20):
        try:
            await dump(py_spy, busy_child.pid, 0.001 * at)
        except TransientError:
            continue
    await asyncio.sleep(0.05)
    text = Path(f"/proc/{busy_child.pid}/stat").read_text().rpartition(")")[2].split()
    assert text[0] in "RS"
    status = Path(f"/proc/{busy_child.pid}/status").read_text()
    assert "TracerPid:\t0" in status
