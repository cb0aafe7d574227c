"""What a key asks somebody else to do."""

from __future__ import annotations

from dataclasses import dataclass

from kvtop.draw.view import View
from kvtop.model.snapshot import Engine, Request


@dataclass(frozen=True, slots=True)
class Quit:
    """Leave, and give the terminal back."""


@dataclass(frozen=True, slots=True)
class Suspend:
    """Stop like any job on Ctrl-Z."""


@dataclass(frozen=True, slots=True)
class Redraw:
    """Send the whole screen again: something else has written on the terminal."""


@dataclass(frozen=True, slots=True)
class SetInterval:
    """Ask the feed for another interval."""

    seconds: float
    """Time between two snapshots."""


@dataclass(frozen=True, slots=True)
class SetStacks:
    """Tell the feed whether the top frames are on screen."""

    visible: bool
    """False: nothing need be sampled."""


@dataclass(frozen=True, slots=True)
class FetchDetail:
    """Ask the engine for the block table of a request."""

    engine: Engine
    """The engine that has it."""
    request_id: str
    """The request."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A question or a line of input was answered with yes or enter."""

    action: str
    """From `Dialog.action`."""
    value: str
    """What was typed; empty for a question."""


@dataclass(frozen=True, slots=True)
class Record:
    """Start a recording, or end the one that runs."""


@dataclass(frozen=True, slots=True)
class WriteBlackBox:
    """Write the black box out now."""


@dataclass(frozen=True, slots=True)
class Play:
    """Do something with the replay."""

    what: str
    """`toggle`, `faster`, `slower`, `step` (by `number` ticks), `event` (the next or the one
    before, by the sign of `number`) or `kind` (the next kind of event to jump to)."""
    number: int = 0
    """See `what`."""


@dataclass(frozen=True, slots=True)
class Flame:
    """Do something with flame graphs."""

    what: str
    """`capture` (start one, or cancel the one that runs) or `view` (open the last one)."""


@dataclass(frozen=True, slots=True)
class Act:
    """Ask whether to change an engine, and do it when the answer is yes."""

    what: str
    """`abort` (one request) or `reset` (the prefix cache)."""
    engine: Engine
    """The engine concerned."""
    request: Request | None = None
    """The request to abort. None: `reset`."""
    client_ids: tuple[str, ...] = ()
    """Ids by which its client knows it, and it alone."""


Effect = (
    Quit
    | Suspend
    | Redraw
    | SetInterval
    | SetStacks
    | FetchDetail
    | Answer
    | Record
    | WriteBlackBox
    | Play
    | Flame
    | Act
)
Result = tuple[View, Effect | None]
"""What is on screen then, and at most one thing to do."""
