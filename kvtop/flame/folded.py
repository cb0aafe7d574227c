"""Folded stacks: one line a stack, frames from the outside in, and how often it was seen.

The format of Brendan Gregg's `stackcollapse` and of `py-spy record --format raw`:
`outer (file.py:1);inner (file.py:2) 17`. py-spy with `--threads --subprocesses` puts
`process 4740:"command line"` and `thread (4741): name` before the frames.
"""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtop.errors import BadDataError, NotFoundError, StorageError

MAX_BYTES = 512 * 1024 * 1024
"""Largest file that is read."""
MAX_LINES = 2_000_000
"""Most lines that are read."""
MAX_DEPTH = 1000
"""Most frames of a stack; deeper ones are cut at the inside and counted as their parent."""
MAX_COUNT = 1 << 53
"""Largest count of one line."""

MAX_TOTAL = 1 << 62
"""Largest sum of all counts."""

_PROCESS = re.compile(r'process \d+:"')
_THREAD = re.compile(r"thread \((?:\d+|0x[0-9A-Fa-f]+)\)")


@dataclass(frozen=True, slots=True)
class Folded:
    """Stacks and their counts."""

    rows: Sequence[tuple[str | tuple[str, ...], int]]
    """Stacks, as frames or as the text of a line, and their counts; each stack once. As text a
    big file takes a fifth of the memory, and most of the time goes into memory."""
    unit: str = "samples"
    """What the counts count: `samples`, or a unit of time or size."""
    skipped: int = 0
    """Lines that could not be read."""
    title: str = ""
    """Where they come from, for headings."""
    ordered: bool = False
    """True: stacks that begin alike stand together, so a tree needs no sorting."""

    @property
    def stacks(self) -> Iterator[tuple[tuple[str, ...], int]]:
        """Frames from the outside in, and samples or weight; each stack once."""
        for stack, count in self.rows:
            yield (_frames(stack) if isinstance(stack, str) else stack), count

    @property
    def total(self) -> int:
        """All counts together."""
        return sum(count for _, count in self.rows)


def parse(text: str, title: str = "") -> Folded:
    """Folded stacks from text; lines that are not are skipped and counted.

    Raises:
        BadDataError: It holds no stack at all, or far too many lines.
    """
    with no_collector():
        return _parse(text, title)


def _parse(text: str, title: str) -> Folded:
    if "\0" in text:
        raise BadDataError("this is a binary file", "pack it out first, if it is packed")
    merged: dict[str, int] = {}
    skipped = 0
    lines = text.split("\n")
    if len(lines) > MAX_LINES:
        raise BadDataError(
            f"{len(lines):,} lines of stacks are too many", f"the most is {MAX_LINES:,}"
        )
    for line in lines:
        stack, _, number = line.rstrip().rpartition(" ")
        # isdecimal alone would take digits of other scripts.
        if stack and number.isascii() and number.isdecimal() and len(number) < 17:
            merged[stack] = merged.get(stack, 0) + int(number)
        elif line.strip() and not line.startswith("#"):
            skipped += 1
    out = [
        (stack, merged[stack])
        # The `;` keeps stacks that begin with the same frames together.
        for stack in sorted(merged, key=lambda stack: stack + ";")
        if 0 < merged[stack] <= MAX_COUNT
    ]
    if not out:
        reason = "it holds no line `frame;frame count`" if text.strip() else "it is empty"
        raise BadDataError(f"these are no folded stacks: {reason}")
    check_total(out)
    return Folded(tuple(out), skipped=skipped, title=title, ordered=True)


def check_total(rows: Iterable[tuple[object, int]]) -> None:
    """Refuse counts that do not fit into the numbers of a tree.

    Raises:
        BadDataError: Together they are too large.
    """
    if sum(count for _, count in rows) > MAX_TOTAL:
        raise BadDataError("its counts are too large", f"together at most {MAX_TOTAL:,}")


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Python's cycle collector off for a while.

    Among a million new objects it finds nothing, and takes as long as the work itself.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _frames(stack: str) -> tuple[str, ...]:
    parts = stack.split(";", MAX_DEPTH + 64)
    if stack.startswith(("process ", "thread (")):
        parts = _mend(parts)
    return tuple(parts[:MAX_DEPTH])


def _mend(parts: list[str]) -> list[str]:
    """Joins again what a `;` in a command line or in a thread name has taken apart."""
    out: list[str] = []
    at = 0
    while at < len(parts):
        part = parts[at]
        at += 1
        if _PROCESS.match(part):
            while not (part.endswith('"') and part.count('"') > 1) and at < len(parts):
                part += ";" + parts[at]
                at += 1
        elif _THREAD.match(part):
            # Behind a thread come frames, and py-spy ends those with their file.
            first = next((n for n in range(at, len(parts)) if parts[n].endswith(")")), at)
            out.append(";".join((part, *parts[at:first])))
            out += parts[first:]
            break
        out.append(part)
    return out


def merge(stacks: Iterable[tuple[tuple[str, ...], int]], like: Folded | None = None) -> Folded:
    """Stacks with equal ones added up.

    Args:
        stacks: Frames from the outside in, and counts.
        like: Unit and title are taken from it.
    """
    merged: dict[tuple[str, ...], int] = {}
    for frames, count in stacks:
        merged[frames] = merged.get(frames, 0) + count
    rows: list[tuple[str | tuple[str, ...], int]] = list(merged.items())
    return Folded(rows, like.unit, like.skipped, like.title) if like else Folded(rows)


def format_folded(folded: Folded) -> str:
    """The text of a `.folded` file, in a stable order.

    Line breaks in frames become spaces, so that one stack stays one line.
    """
    lines = []
    for frames, count in folded.stacks:
        stack = ";".join(frames)
        if "\n" in stack or "\r" in stack:
            stack = stack.replace("\n", " ").replace("\r", " ")
        lines.append(f"{stack} {count}\n")
    lines.sort()
    return "".join(lines)


def is_process(frame: str) -> bool:
    """Whether a frame is py-spy's mark of a process."""
    return _PROCESS.match(frame) is not None


def is_thread(frame: str) -> bool:
    """Whether a frame is py-spy's mark of a thread."""
    return _THREAD.match(frame) is not None


def process_pid(frame: str) -> int | None:
    """The pid in py-spy's mark of a process. None: it is none."""
    return int(frame[8:].partition(":")[0]) if is_process(frame) else None


def thread_of(frames: tuple[str, ...]) -> str:
    """Process and thread of a stack, for filters: `4740 MainThread`. Empty: not marked."""
    pid, thread = "", ""
    for frame in frames[:8]:
        if is_process(frame):
            pid = frame[8:].partition(":")[0]
        elif is_thread(frame):
            number, _, name = frame[8:].partition(")")
            thread = name.removeprefix(": ") or f"thread {number}"
            break
    return f"{pid} {thread}".strip()


def unnumbered(frames: tuple[str, ...]) -> tuple[str, ...]:
    """A stack whose marks of processes and threads hold names and no numbers."""
    out = list(frames)
    for at, frame in enumerate(frames[:8]):
        if is_process(frame):
            out[at] = "process " + frame.partition(":")[2]
        elif is_thread(frame):
            name = frame.partition("): ")[2]
            out[at] = f"thread {name}" if name else "thread"
            break
    return tuple(out)


def code_of(frames: tuple[str, ...]) -> tuple[str, ...]:
    """The frames of a stack without the marks of processes and threads."""
    at = 0
    while at < len(frames) and (is_process(frames[at]) or is_thread(frames[at])):
        at += 1
    return frames[at:]


def read_text(path: Path) -> str:
    """The text of a file of stacks, bounded.

    Raises:
        NotFoundError: There is no such file.
        StorageError: It cannot be read.
        BadDataError: It is too large.
    """
    try:
        if path.is_dir():
            raise StorageError(f"{path} is a folder", "name a file")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {path}") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise StorageError(f"{path} cannot be read: {reason}") from None
    if len(data) > MAX_BYTES:
        raise BadDataError(f"{path} is too large", f"at most {MAX_BYTES >> 20} MiB are read")
    return data.decode("utf-8", "replace")
