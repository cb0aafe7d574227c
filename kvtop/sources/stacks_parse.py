"""py-spy's JSON to samples, and samples to top frames. Pure.

Format: `py-spy dump --json` of py-spy 0.4: a list of threads, each with `thread_name`,
`os_thread_id`, `active`, `owns_gil` and `frames`, the innermost frame first.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvtop.model.frames import CATEGORIES, WAIT, stack_category
from kvtop.model.snapshot import Frame, Stacks

MAX_FRAMES = 60
"""Most frames kept in a `Stacks`."""
MAX_DEPTH = 512
"""Most frames of one thread that are read."""
MAIN = "MainThread"
"""Python's own name of the first thread."""


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
    """One thread at one moment."""

    thread: str
    """Name, or `thread N` where it has none."""
    active: bool
    """False: it waits in a system call, or for a lock."""
    owns_gil: bool
    """It ran Python code."""
    calls: tuple[Call, ...]
    """Innermost first."""


@dataclass(frozen=True, slots=True)
class Dump:
    """All threads of one process at one moment."""

    time_s: float
    """Unix time."""
    threads: tuple[ThreadStack, ...]
    """In py-spy's order."""
    cost_s: float | None = None
    """CPU time that py-spy took for it. None: not measured."""


def parse_dump(text: bytes | str, time_s: float) -> Dump:
    """Reads the output of `py-spy dump --json`.

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
    threads: list[ThreadStack] = []
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
        number = row.get("os_thread_id") or row.get("thread_id")
        name = str(row.get("thread_name") or f"thread {number}")
        threads.append(
            ThreadStack(name, row.get("active") is True, row.get("owns_gil") is True, calls)
        )
    return Dump(time_s, tuple(threads))


def active(dump: Dump) -> tuple[ThreadStack, ...]:
    """The threads of a dump that ran; maybe none."""
    return tuple(
        thread for thread in dump.threads if thread.calls and (thread.active or thread.owns_gil)
    )


def waiting(dump: Dump) -> tuple[ThreadStack, ...]:
    """Where a process waits: its main thread, or all threads where there is none by that name."""
    with_calls = tuple(thread for thread in dump.threads if thread.calls)
    main = tuple(thread for thread in with_calls if thread.thread == MAIN)
    return main or with_calls


def category_split(dumps: Sequence[Dump]) -> dict[str, float]:
    """Share of each category in a window, 0-100, adding up to 100; empty for no dumps.

    Each active thread of a dump counts once; a dump without one counts once as `wait`.
    """
    counts: Counter[str] = Counter()
    for dump in dumps:
        threads = active(dump)
        for thread in threads:
            counts[stack_category((call.function, call.file) for call in thread.calls)] += 1
        if not threads:
            counts[WAIT] += 1
    total = sum(counts.values())
    return {name: 100.0 * counts[name] / total for name in CATEGORIES if counts[name]}


def top_frames(dumps: Sequence[Dump], limit: int = MAX_FRAMES) -> tuple[Frame, ...]:
    """Functions by their share of the dumps, hottest first.

    Threads that wait are left out, unless no thread was active in the whole window: then it
    shows where the process hangs. A function counts once a dump and thread name, recursion
    included; shares of different threads can add up to more than 100.
    """
    inner: Counter[tuple[str, str, str]] = Counter()
    total: Counter[tuple[str, str, str]] = Counter()
    lines: dict[tuple[str, str, str], Counter[int]] = {}
    threads_of = active if any(active(dump) for dump in dumps) else waiting
    for dump in dumps:
        inner_here: set[tuple[str, str, str]] = set()
        total_here: set[tuple[str, str, str]] = set()
        for thread in threads_of(dump):
            for depth, call in enumerate(thread.calls):
                key = (call.function, call.file, thread.thread)
                if depth == 0:
                    inner_here.add(key)
                total_here.add(key)
                if call.line is not None:
                    lines.setdefault(key, Counter())[call.line] += 1
        inner.update(inner_here)
        total.update(total_here)
    share = 100.0 / len(dumps) if dumps else 0.0
    order = sorted(total, key=lambda key: (-inner[key], -total[key], key))
    return tuple(
        Frame(
            function=function,
            file=file,
            line=lines[key].most_common(1)[0][0] if key in lines else None,
            thread=thread,
            self_percent=inner[key] * share,
            total_percent=total[key] * share,
        )
        for key in order[:limit]
        for function, file, thread in (key,)
    )


def stacks_of(pid: int, role: str, dumps: Sequence[Dump]) -> Stacks | None:
    """Top frames of a window of dumps, oldest first; None for an empty window."""
    if not dumps:
        return None
    # The median: a capture that ends meanwhile is counted into one of them.
    costs = [dump.cost_s for dump in dumps if dump.cost_s is not None]
    span_s = max(0.0, dumps[-1].time_s - dumps[0].time_s)
    return Stacks(
        pid=pid,
        role=role,
        samples=len(dumps),
        window_s=span_s,
        rate_hz=(len(dumps) - 1) / span_s if span_s > 0 else 0.0,
        frames=top_frames(dumps),
        time_s=dumps[-1].time_s,
        split=category_split(dumps),
        cost_ms=1000.0 * statistics.median(costs) if costs else None,
        stalled=not any(active(dump) for dump in dumps),
    )
