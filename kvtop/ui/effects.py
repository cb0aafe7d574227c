"""What a key asks somebody else to do."""

from __future__ import annotations

from dataclasses import dataclass

from kvtop.draw.view import View
from kvtop.model.snapshot import Engine


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


Effect = Quit | Suspend | Redraw | SetInterval | SetStacks | FetchDetail | Answer
Result = tuple[View, Effect | None]
"""What is on screen then, and at most one thing to do."""
