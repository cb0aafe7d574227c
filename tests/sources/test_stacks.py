from __future__ import annotations

import asyncio
import contextlib
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtop.model.snapshot import Stacks
from kvtop.sources import stacks as module
from kvtop.sources.base import SourceError
from kvtop.sources.stacks import StacksSource
from kvtop.sources.stacks_child import OUTPUT, run
from kvtop.sources.stacks_parse import (
    Call,
    Slice,
    ThreadStack,
    category_split,
    parse_dump,
    parse_record,
    stacks_of,
    top_frames,
)
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


def recorded(name: str, time_s: float = 1.0) -> Slice:
    return parse_dump((DUMPS / name).read_bytes(), time_s)


def thread(name: str, *functions: str, count: int = 1, number: str = "") -> ThreadStack:
    calls = tuple(Call(function, "f.py", at) for at, function in enumerate(functions, 1))
    return ThreadStack(name, calls, number, count)


def slice_of(*active: ThreadStack, samples: int = 1, time_s: float = 0.0) -> Slice:
    return Slice(time_s, 0.0, samples, active)


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
    assert (stacks.samples, stacks.window_s, stacks.time_s) == (4, 3.0, 3.0)
    assert stacks.rate_hz == pytest.approx(4 / 3)


def test_when_nothing_ran_of_late_it_shows_where_it_waits_now() -> None:
    busy = recorded("engine-busy.json", 0.0)
    idle = replace(recorded("engine-idle.json", 20.0), samples=19, span_s=9.5)
    stacks = stacks_of(9, "engine", [busy, idle])
    assert stacks is not None
    assert stacks.stalled
    assert stacks.frames[0].function == "Condition.wait"
    assert stacks.frames[0].self_percent == 100.0
    assert stacks.split == {"wait": 100.0}
    assert (stacks.samples, stacks.window_s) == (19, 9.5)
    back = stacks_of(9, "engine", [busy, idle, replace(busy, time_s=21.0)])
    assert back is not None
    assert not back.stalled
    assert back.samples == 21
    assert back.split["wait"] > 85.0


def test_the_cost_is_that_of_a_sample() -> None:
    one = replace(recorded("engine-busy.json"), cost_s=0.013)
    many = replace(one, samples=19, cost_s=0.027, unread=1)
    unknown = replace(one, cost_s=None)
    stacks = stacks_of(9, "engine", [one, many, unknown])
    assert stacks is not None
    assert stacks.cost_ms == pytest.approx(40.0 / 20)
    assert stacks.unread == 1
    unmeasured = stacks_of(9, "engine", [unknown])
    assert unmeasured is not None
    assert unmeasured.cost_ms is None


def test_recursion_counts_once_a_sample() -> None:
    frames = top_frames([slice_of(thread("t", "a", "b", "a", "b"))])
    assert {f.function: (f.self_percent, f.total_percent) for f in frames} == {
        "a": (100.0, 100.0),
        "b": (0.0, 100.0),
    }


def test_waiting_threads_do_not_count_beside_an_active_one() -> None:
    both = Slice(0.0, 0.0, 1, (thread("x", "run"),), (thread("w", "wait"),))
    assert [frame.function for frame in top_frames([both])] == ["run"]
    nameless = Slice(0.0, 0.0, 1, (), (thread("w", "wait"), thread("v", "park")))
    assert {frame.function for frame in top_frames([nameless])} == {"wait", "park"}


def test_threads_of_one_name_are_not_added_up() -> None:
    pair = [thread("t", "f", count=8, number=number) for number in ("1", "2")]
    frames = top_frames([slice_of(*pair, samples=10)])
    assert [frame.self_percent for frame in frames] == [80.0, 80.0]


def test_where_the_main_thread_did_not_run_it_waited() -> None:
    main = thread("MainThread", "schedule", count=3)
    other = thread("t", "f", count=7)
    share = category_split([slice_of(main, other, samples=10)])
    assert share == {"wait": pytest.approx(100 * 7 / 17), "other": pytest.approx(100 * 10 / 17)}


def test_the_line_is_the_one_most_often_seen() -> None:
    found = [
        slice_of(ThreadStack("t", (Call("f", "a.py", line),), "", count), samples=9)
        for line, count in ((5, 2), (7, 3), (None, 4))
    ]
    (frame,) = top_frames(found)
    assert frame.line == 7
    assert frame.self_percent == pytest.approx(100 * 9 / 27)


def test_hottest_first_and_bounded() -> None:
    slices = [slice_of(thread("t", f"f{n % 3}", "root")) for n in range(9)]
    slices.append(slice_of(thread("t", "f2", "root")))
    frames = top_frames(slices, limit=2)
    assert [frame.function for frame in frames] == ["f2", "f0"]
    assert stacks_of(1, "engine", []) is None


SAID = "py-spy> Wrote raw flamegraph data to 'x'. Samples: 12 Errors: 2"


def test_a_run_of_samples() -> None:
    text = (
        "thread (7): MainThread;main (a.py:1);Block.hot (v1/b.py:2) 9\n"
        "thread (7);main (a.py:3) 1\n"
        "thread (8): a; b;run (c.py:5) 2\n"
        "thread (9);<module> (x.py) 1\n"
    )
    found = parse_record(text.encode(), SAID, 7, 19, (10.0, 20.0))
    assert (found.samples, found.unread, found.time_s, found.span_s) == (17, 2, 20.0, 10.0)
    assert [(t.thread, t.number, t.count) for t in found.active] == [
        ("MainThread", "7", 9),
        ("MainThread", "7", 1),
        ("a; b", "8", 2),
        ("thread 9", "9", 1),
    ]
    assert found.active[0].calls == (Call("Block.hot", "v1/b.py", 2), Call("main", "a.py", 1))
    assert found.active[3].calls == (Call("<module>", "x.py", None),)
    stacks = stacks_of(7, "engine", [found])
    assert stacks is not None
    top = stacks.frames[0]
    assert (top.function, top.line) == ("Block.hot", 2)
    assert top.self_percent == pytest.approx(100 * 9 / 17)


def test_a_run_in_which_nothing_ran_or_could_be_read() -> None:
    assert parse_record(b"", "Samples: 0 Errors: 0", 7, 19, (0.0, 9.0)).active == ()
    with pytest.raises(ValueError, match="none of 19 samples of process 7"):
        parse_record(b"", "Samples: 0 Errors: 19", 7, 19, (0.0, 9.0))
    # A share can never be more than all.
    more = parse_record(b"thread (7): t;f (a.py:1) 20", "Samples: 20 Errors: 0", 7, 19, (0.0, 9.0))
    assert more.samples == 20


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"thread (7);f (a.py:1) 1", "something else"),
        (b"hello world", SAID),
        (b"\xff\x00", SAID),
    ],
)
def test_a_run_of_something_else(text: bytes, said: str) -> None:
    with pytest.raises(ValueError, match="py-spy"):
        parse_record(text, said, 7, 19, (0.0, 1.0))


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"frames": 3}]', "[null]", "\x00"])
def test_output_that_is_not_py_spys(text: str) -> None:
    with pytest.raises(ValueError, match="py-spy answered"):
        parse_dump(text, 0.0)


def test_missing_fields_are_unknown_and_not_invented() -> None:
    found = parse_dump('[{"os_thread_id": 7, "frames": [{"line": 0}, 5]}]', 0.0)
    (one,) = found.waiting
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


async def until(source: StacksSource, true: Callable[[tuple[Stacks, ...]], bool]) -> Stacks:
    """Reads until what is wanted holds of it; the first process."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        stacks = await source.read()
        if true(stacks):
            return stacks[0]
        await asyncio.sleep(0.05)
    raise AssertionError(f"never came: {stacks}")


async def test_a_real_process(py_spy: str, busy_child: subprocess.Popen[str]) -> None:
    source = StacksSource({busy_child.pid: "engine"}, locate=lambda: py_spy)
    try:
        (first,) = await source.read()
        assert (first.pid, first.role, first.samples) == (busy_child.pid, "engine", 1)
        one = await until(source, lambda stacks: stacks[0].samples >= 4)
    finally:
        await source.close()
    frames = {frame.function: frame for frame in one.frames}
    assert frames["outer"].total_percent == 100.0
    assert frames["hot"].thread == "MainThread"
    assert frames["hot"].self_percent > 0.0
    assert "wait" not in frames
    assert one.cost_ms is not None
    assert one.cost_ms > 0.0
    assert children() <= {busy_child.pid}


async def test_a_process_that_waits(py_spy: str) -> None:
    code = "import threading; print('up', flush=True); threading.Event().wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        source = StacksSource({child.pid: "worker"}, locate=lambda: py_spy)
        try:
            one = await until(source, lambda stacks: stacks[0].samples >= 3)
        finally:
            await source.close()
            child.kill()
    assert one.stalled
    assert one.split == {"wait": 100.0}
    assert (one.frames[0].function, one.frames[0].self_percent) == ("Condition.wait", 100.0)


async def test_a_process_that_ends_hides_no_other(
    py_spy: str, busy_child: subprocess.Popen[str]
) -> None:
    source = StacksSource({busy_child.pid: "worker", 2**22 + 1: "engine"}, locate=lambda: py_spy)
    assert [one.pid for one in await source.read()] == [busy_child.pid]
    busy_child.kill()
    busy_child.wait()
    with pytest.raises(SourceError, match="is gone"):
        await until(source, lambda stacks: not stacks)
    await source.close()


async def test_not_python(py_spy: str) -> None:
    with subprocess.Popen(["sleep", "30"]) as child:
        source = StacksSource({child.pid: "engine"}, locate=lambda: py_spy)
        with pytest.raises(SourceError, match="does not know the Python"):
            await source.read()
        await source.close()
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


BODY = '[{"thread_name": "MainThread", "active": true, "frames": [{"name": "f"}]}]'
RECORD = """
if [ "$1" = record ]; then
  while [ "$1" != --output ]; do shift; done
  echo "thread (5): MainThread;f (a.py:1) 2" > "$2"; echo "Samples: 2 Errors: 0"; exit 0
fi"""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that are short."""
    monkeypatch.setattr(module, "REST_S", 0.05)
    monkeypatch.setattr(module, "LONG_REST_S", 0.05)


async def test_one_look_and_then_runs_of_many_samples(tmp_path: Path, quick: None) -> None:
    log = tmp_path / "log"
    fake = script(tmp_path / "spy", f"echo $* >> {log}\n{RECORD}\necho '{BODY}'")
    source = StacksSource({os.getpid(): "engine"}, locate=lambda: fake)
    await until(source, lambda stacks: stacks[0].samples >= 12)
    await source.close()
    lines = log.read_text().splitlines()
    assert lines[0].startswith("dump --json --nonblocking")
    assert all(line.startswith("record") and "--nonblocking" in line for line in lines[1:])
    lengths = [re.search(r"--duration (\d+)", line)[1] for line in lines[1:4]]  # type: ignore[index]
    assert lengths == ["2", "4", "8"]
    assert "--rate 2" in lines[1]


async def test_only_what_is_looked_at_is_sampled(tmp_path: Path, quick: None) -> None:
    log = tmp_path / "log"
    fake = script(tmp_path / "spy", f"echo $* >> {log}\n{RECORD}\necho '{BODY}'")
    with subprocess.Popen(["sleep", "60"]) as other:
        source = StacksSource({os.getpid(): "engine", other.pid: "api"}, locate=lambda: fake)
        assert [one.role for one in await source.read()] == ["engine", "api"]
        source.only = [other.pid]
        assert [one.role for one in await source.read()] == ["api"]
        log.write_text("")
        await until(source, lambda stacks: stacks[0].samples >= 8)
        asked = {line.rpartition(" ")[2] for line in log.read_text().splitlines()}
        assert asked == {str(other.pid)}
        source.only = ()
        assert len(await source.read()) == 2
        await source.close()
        other.kill()


async def test_switched_off_it_ends_its_runs(tmp_path: Path) -> None:
    fake = script(tmp_path / "spy", f"[ \"$1\" = record ] && exec sleep 60\necho '{BODY}'")
    before = children()
    source = StacksSource({os.getpid(): "engine"}, locate=lambda: fake)
    await source.read()
    while not children() - before:
        await asyncio.sleep(0.01)
    source.enabled = False
    assert await source.read() == ()
    assert children() <= before


async def test_a_run_that_the_process_outran_is_made_again(tmp_path: Path) -> None:
    marker = tmp_path / "tried"
    fake = script(
        tmp_path / "spy",
        f"if [ -e {marker} ]; then echo '{BODY}'; else touch {marker}; echo bad >&2; exit 1; fi",
    )
    source = StacksSource({os.getpid(): "engine"}, locate=lambda: fake)
    assert len(await source.read()) == 1
    await source.close()


async def test_old_samples_are_dropped_when_a_process_cannot_be_read_any_more(
    tmp_path: Path, quick: None
) -> None:
    broken = tmp_path / "broken"
    fake = script(tmp_path / "spy", f"if [ -e {broken} ]; then exit 1; fi\n{RECORD}\necho '{BODY}'")
    source = StacksSource({os.getpid(): "engine"}, locate=lambda: fake)
    assert len(await source.read()) == 1
    broken.touch()
    with pytest.raises(SourceError, match="gave no reason"):
        await until(source, lambda stacks: not stacks)
    broken.unlink()
    while True:
        with contextlib.suppress(SourceError):
            await until(source, lambda stacks: stacks[0].samples >= 3)
            break
    await source.close()


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


async def test_a_child_tells_what_it_has_cost_and_written() -> None:
    code = "import sys; sum(range(3_000_000)); open(sys.argv[1], 'w').write('x'); print('said')"
    ended = await run([sys.executable, "-c", code, OUTPUT], 60.0)
    assert (ended.code, ended.written, ended.said) == (0, b"x", "said\n")
    assert 0.01 < ended.cpu_s < 30.0
    plain = await run(["sh", "-c", "echo out; echo err >&2; exit 3"], 60.0)
    assert (plain.code, plain.written, plain.said) == (3, b"out\n", "err\n")
    late = await run(["sleep", "60"], 0.05)
    assert late.timed_out
    assert late.code == -9
    with pytest.raises(FileNotFoundError):
        await run(["/nowhere/py-spy"], 1.0)
    files = os.listdir("/proc/self/fd")
    await run(["true"], 60.0)
    assert len(os.listdir("/proc/self/fd")) == len(files)
