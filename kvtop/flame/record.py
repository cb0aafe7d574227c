"""Captures on their way into a recording, and back out of it."""

from __future__ import annotations

from kvtop.errors import KvtopError
from kvtop.flame.capture import Capture, Plan
from kvtop.flame.folded import Folded, format_folded, parse, process_pid
from kvtop.model.capture import OK, StackCapture

MAX_RECORDED = 8 * 2**20
"""Characters of stacks that go into a recording; of more, the most frequent stay."""
_MARKS = 8
"""Frames at the outside of a stack that may be marks of processes."""


def recorded(capture: Capture, why: str = "") -> StackCapture:
    """A capture as a recording keeps it; takes as long as writing the file does.

    Args:
        capture: What py-spy brought.
        why: Rule of the finding that asked for it. Empty: a key did.
    """
    folded, left_out = _bounded(capture.folded)
    pids: set[int] = set()
    for frames, _ in folded.stacks:
        pids.update(pid for frame in frames[:_MARKS] if (pid := process_pid(frame)) is not None)
    return StackCapture(
        time_s=capture.started_s,
        pid=capture.plan.pid,
        # A process without children bears no mark.
        pids=tuple(sorted(pids)) or (capture.plan.pid,),
        seconds=capture.seconds,
        rate_hz=capture.plan.rate_hz,
        mode=mode_of(capture.plan),
        why=why,
        outcome=OK,
        samples=capture.samples,
        errors=capture.errors,
        left_out=left_out,
        folded=format_folded(folded),
    )


def failed(plan: Plan, started_s: float, error: KvtopError, why: str = "") -> StackCapture:
    """A capture that brought nothing: that it was tried is a fact as well."""
    return StackCapture(
        time_s=started_s,
        pid=plan.pid,
        rate_hz=plan.rate_hz,
        mode=mode_of(plan),
        why=why,
        outcome=error.line(),
    )


def mode_of(plan: Plan) -> str:
    """`non-blocking`, `blocking`, and what else was chosen."""
    words = ["blocking" if plan.stops else "non-blocking"]
    words += [word for word in ("native", "gil", "idle") if getattr(plan, word)]
    return ", ".join(words)


def folded_of(capture: StackCapture, title: str) -> Folded:
    """The stacks of a recorded capture.

    Raises:
        BadDataError: There are none in it.
    """
    return parse(capture.folded, title)


def _bounded(folded: Folded) -> tuple[Folded, int]:
    """The most frequent stacks that fit, and how many do not."""
    sizes = [
        len(stack) + 8 if isinstance(stack, str) else sum(map(len, stack)) + len(stack) + 8
        for stack, _ in folded.rows
    ]
    if sum(sizes) <= MAX_RECORDED:
        return folded, 0
    order = sorted(range(len(sizes)), key=lambda at: -folded.rows[at][1])
    kept: set[int] = set()
    room = MAX_RECORDED
    for at in order:
        room -= sizes[at]
        if room < 0:
            break
        kept.add(at)
    rows = [row for at, row in enumerate(folded.rows) if at in kept]
    return Folded(rows, folded.unit, folded.skipped, folded.title), len(sizes) - len(kept)
