"""py-spy's output to samples, and samples to top frames. Pure.

Formats of py-spy 0.4: `dump --json` is a list of threads, each with `thread_name`,
`os_thread_id`, `active`, `owns_gil` and `frames`, the innermost frame first. `record
--format raw --threads` is a line a stack, `thread (4740): MainThread;outer (a.py:1);inner
(b.py:2) 17`, of threads that were active, and says `Samples: 153 Errors: 0` at its end.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtop.model.frames import CATEGORIES, WAIT, split_frame, stack_category
from kvtop.model.snapshot import Frame, Stacks

MAX_FRAMES = 60
"""Most frames kept in a `Stacks`."""
MAX_DEPTH = 512
"""Most frames of one thread that are read."""
MAX_STACKS = 20_000
"""Most different stacks that are read from one run."""
MAIN = "MainThread"
"""Python's own name of the first thread."""

_THREAD = re.compile(r"thread \((\w+)\)(?:: (.*))?", re.DOTALL)
_COUNTS = re.compile(r"Samples: (\d+) Errors: (\d+)")


@dataclass(frozen=True, slots=True)
class Call:
    """One frame of one stack."""

    function: str
    """Function name, with its class where Python knows it (3.11+)."""
    file: str
    """Short file name."""
    line: int | None
    """Line being run."""


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """One thread with one stack."""

    thread: str
    """Name, or `thread N` where it has none."""
    calls: tuple[Call, ...]
    """Innermost first."""
    number: str = ""
    """The kernel's number of the thread, as py-spy writes it; tells threads of one name apart."""
    count: int = 1
    """How often it was seen."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Some samples of one process, one after the other."""

    time_s: float
    """Unix time of the last one."""
    span_s: float
    """From the first to the last."""
    samples: int
    """How many were taken; those that could not be read are not counted."""
    active: tuple[ThreadStack, ...]
    """Threads that ran."""
    waiting: tuple[ThreadStack, ...] = ()
    """Where threads waited, where that was looked at: those of one moment."""
    cost_s: float | None = None
    """CPU time that py-spy took for it. None: not measured."""
    unread: int = 0
    """Samples that could not be read."""


def parse_dump(text: bytes | str, time_s: float) -> Slice:
    """Reads the output of `py-spy dump --json`: one sample of all threads.

    Args:
        text: The output.
        time_s: When it was taken, Unix seconds.

    Raises:
        ValueError: It is not that; the message is one plain line.
    """
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise ValueError("py-spy answered with something that is not JSON") from error
    active: list[ThreadStack] = []
    waiting: list[ThreadStack] = []
    for row in rows if isinstance(rows, list) else [None]:
        if not (isinstance(row, dict) and isinstance(row.get("frames"), list)):
            raise ValueError("py-spy answered with JSON of another shape")  # noqa: TRY004
        calls = tuple(
            Call(
                function=str(frame.get("name") or "?"),
                file=str(frame.get("short_filename") or frame.get("filename") or "?"),
                line=line if isinstance(line := frame.get("line"), int) and line > 0 else None,
            )
            for frame in row["frames"][:MAX_DEPTH]
            if isinstance(frame, dict)
        )
        if not calls:
            continue
        number = str(row.get("os_thread_id") or row.get("thread_id") or "")
        stack = ThreadStack(str(row.get("thread_name") or f"thread {number}"), calls, number)
        ran = row.get("active") is True or row.get("owns_gil") is True
        (active if ran else waiting).append(stack)
    return Slice(time_s, 0.0, 1, tuple(active), tuple(waiting))


def parse_record(
    text: bytes | str,
    said: str,
    pid: int,
    wanted: int,
    times_s: tuple[float, float],
) -> Slice:
    """Reads the output of `py-spy record --format raw --threads`.

    Args:
        text: The file it has written.
        said: What it has said meanwhile.
        pid: The process.
        wanted: Samples that it has taken, those that failed included.
        times_s: Begin and end, Unix seconds.

    Raises:
        ValueError: It is not that, or no sample could be read; the message is one plain line.
    """
    counts = _COUNTS.search(said)
    if counts is None:
        raise ValueError("py-spy did not say how many samples it took")
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    stacks = [_stack(line, pid) for line in text.split("\n")[:MAX_STACKS] if line]
    active = tuple(stack for stack in stacks if stack.calls)
    seen: Counter[str] = Counter()
    for stack in active:
        seen[stack.number] += stack.count
    # No thread is seen more often than it was looked at.
    samples = max([wanted - int(counts[2]), *seen.values()])
    if samples < 1:
        raise ValueError(f"py-spy could read none of {wanted} samples of process {pid}")
    return Slice(times_s[1], times_s[1] - times_s[0], samples, active, unread=int(counts[2]))


def _stack(line: str, pid: int) -> ThreadStack:
    stack, _, number = line.rpartition(" ")
    if not number.isdecimal():
        raise ValueError("py-spy wrote something that is no stack")
    parts = stack.split(";")
    first = 0
    if parts[0].startswith("thread ("):
        # A thread's name may hold a `;`; frames end with their file.
        first = next((at for at in range(1, len(parts)) if parts[at].endswith(")")), len(parts))
    mark = _THREAD.fullmatch(";".join(parts[:first]))
    thread = mark[1] if mark else ""
    # py-spy learns the names of threads late; the first one is known by its number.
    name = (mark[2] if mark else "") or (MAIN if thread == str(pid) else f"thread {thread}")
    calls = tuple(Call(*split_frame(label)) for label in parts[first:][:MAX_DEPTH][::-1])
    return ThreadStack(name, calls, thread, int(number[:15]))


def _waits_here(slices: Iterable[Slice]) -> tuple[ThreadStack, ...]:
    """Where a process waits: its main thread, or all threads where there is none by that name."""
    threads = [thread for one in slices for thread in one.waiting]
    return tuple(thread for thread in threads if thread.thread == MAIN) or tuple(threads)


def category_split(slices: Sequence[Slice]) -> dict[str, float]:
    """Share of each category in a window, 0-100, adding up to 100; empty for no samples.

    Each active thread of a sample counts once; where the main thread was not active, it
    counts as `wait`.
    """
    counts: Counter[str] = Counter()
    for one in slices:
        main = 0
        for thread in one.active:
            pairs = ((call.function, call.file) for call in thread.calls)
            counts[stack_category(pairs)] += thread.count
            main += thread.count if thread.thread == MAIN else 0
        counts[WAIT] += max(one.samples - main, 0)
    total = sum(counts.values())
    return {name: 100.0 * counts[name] / total for name in CATEGORIES if counts[name]}


def top_frames(slices: Sequence[Slice], limit: int = MAX_FRAMES) -> tuple[Frame, ...]:
    """Functions by their share of the samples, hottest first.

    Threads that wait are left out, unless no thread was active in all of them: then it
    shows where the process hangs. A function counts once a sample and thread, recursion
    included; shares of different threads can add up to more than 100.
    """
    ran = any(one.active for one in slices)
    looked = slices if ran else [one for one in slices if one.waiting]
    stacks = (
        [thread for one in slices for thread in one.active] if ran else list(_waits_here(looked))
    )
    inner: Counter[tuple[str, str, str, str]] = Counter()
    total: Counter[tuple[str, str, str, str]] = Counter()
    lines: dict[tuple[str, str, str, str], Counter[int]] = {}
    for thread in stacks:
        seen: set[tuple[str, str, str, str]] = set()
        for depth, call in enumerate(thread.calls):
            key = (call.function, call.file, thread.thread, thread.number)
            if depth == 0:
                inner[key] += thread.count
            if key not in seen:
                seen.add(key)
                total[key] += thread.count
            if call.line is not None:
                lines.setdefault(key, Counter())[call.line] += thread.count
    # Where a process waits was looked at once a slice, not at each sample.
    number = sum(one.samples for one in slices) if ran else len(looked)
    share = 100.0 / number if number else 0.0
    order = sorted(total, key=lambda key: (-inner[key], -total[key], key))
    return tuple(
        Frame(
            function=function,
            file=file or "?",
            line=lines[key].most_common(1)[0][0] if key in lines else None,
            thread=thread,
            self_percent=inner[key] * share,
            total_percent=total[key] * share,
        )
        for key in order[:limit]
        for function, file, thread, _ in (key,)
    )


def stacks_of(pid: int, role: str, slices: Sequence[Slice]) -> Stacks | None:
    """Top frames of a window, oldest first; None for an empty window.

    When nothing ran in the newest slice, where it waits now says more than what it did
    before: only that slice is shown.
    """
    if not slices:
        return None
    stalled = not slices[-1].active
    shown = slices[-1:] if stalled else slices
    samples = sum(one.samples for one in shown)
    # From the first sample on; the window holds no gaps worth speaking of.
    span_s = max(0.0, shown[-1].time_s - (shown[0].time_s - shown[0].span_s))
    known = [(one.cost_s, one.samples) for one in slices if one.cost_s is not None]
    cost_s = sum(cost for cost, _ in known)
    return Stacks(
        pid=pid,
        role=role,
        samples=samples,
        window_s=span_s,
        rate_hz=samples / span_s if span_s > 0 else 0.0,
        frames=top_frames(shown),
        time_s=shown[-1].time_s,
        split=category_split(shown),
        cost_ms=1000.0 * cost_s / max(sum(n for _, n in known), 1) if known else None,
        stalled=stalled,
        unread=sum(one.unread for one in shown),
    )
