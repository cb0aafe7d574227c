"""Whole stacks of an engine over some seconds, as they go into a recording."""

from __future__ import annotations

from dataclasses import dataclass

OK = "ok"
"""Outcome of a capture that has stacks."""


@dataclass(frozen=True, slots=True)
class StackCapture:
    """One flame graph: what was asked for, how it went, and the stacks."""

    time_s: float
    """When it began, Unix seconds."""
    pid: int
    """The process at the top."""
    pids: tuple[int, ...] = ()
    """Processes that stacks were seen of; empty when there are none."""
    seconds: float = 0.0
    """How long it ran."""
    rate_hz: int = 0
    """Samples a second that were asked for."""
    mode: str = "non-blocking"
    """`non-blocking` or `blocking`, and what else was chosen: `native`, `gil`, `idle`."""
    why: str = ""
    """The rule of the finding that asked for it. Empty: a key did."""
    outcome: str = OK
    """`ok`, or one plain line: why there are no stacks."""
    samples: int = 0
    """Stacks taken, as py-spy counts them."""
    errors: int = 0
    """Stacks that could not be read."""
    left_out: int = 0
    """Rare stacks that were left out to keep the recording small."""
    folded: str = ""
    """The stacks, a line each: `outer (a.py:1);inner (b.py:2) 17`. Empty: there are none, or
    only the description was asked for."""
    tick: int = 0
    """Tick of the recording at which it ended. 0: not from a recording."""
