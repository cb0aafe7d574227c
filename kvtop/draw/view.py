"""What the user chose: everything a drawing depends on besides the snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtop.model.detail import Detail
from kvtop.model.history import History

__all__ = ["Detail", "Dialog", "Line", "Run", "View"]

Run = tuple[str, str]
"""Text and the name of its style in `draw.style.STYLES`."""
Line = tuple[Run, ...]
"""One line of the screen; its texts add up to the width asked for."""


@dataclass(frozen=True, slots=True)
class Dialog:
    """Something drawn over the panels until it is answered or closed."""

    kind: str
    """`help`, `sources` (drawn live from the snapshot), `message`, `confirm` or `input`."""
    title: str
    """Title of its box."""
    lines: tuple[Line, ...] = ()
    """What it says; longer lines are cut, more lines are scrolled."""
    action: str = ""
    """What the answer is for; only `confirm` and `input` have one."""
    value: str = ""
    """Text typed so far; only `input` has one."""


@dataclass(frozen=True, slots=True)
class View:
    """What the user chose. The cursor follows the request id, not the row."""

    now_s: float = 0.0
    """Time of the drawing by the clock of the stream; ages are taken against it."""
    engine: int = 0
    """Index into `Snapshot.engines`, taken modulo their number."""
    gpu: int = 0
    """Index into `Snapshot.gpus`, taken modulo their number."""
    focus: str = "requests"
    """Panel with the focus: `gpu`, `kv`, `requests`, `stacks` or `trend`."""
    sort: str = "BLOCKS"
    """Column title the requests are sorted by."""
    reverse: bool = True
    """True: largest first."""
    search: str = ""
    """Requests whose id or status contains this text, case ignored."""
    search_open: bool = False
    """True while the search text is being typed."""
    cursor_id: str | None = None
    """Selected request. None: the first row."""
    scroll: Mapping[str, int] = field(default_factory=dict)
    """First line shown, by panel."""
    lit_blocks: frozenset[int] = frozenset()
    """Blocks to light up on the map."""
    detail: Detail | None = None
    """Request detail that is open. None: closed."""
    stacks_on: bool = True
    """False: the top-frames panel is hidden and nothing is sampled."""
    paused: bool = False
    """True: the screen is frozen on purpose."""
    interval_s: float = 1.0
    """Time between two snapshots."""
    ascii: bool = False
    """True: only ASCII characters."""
    message: str = ""
    """A short message for the footer. Empty: the keys are shown."""
    history: History | None = None
    """What the charts are drawn from. None: no charts yet."""
    zoom: bool = False
    """True: the focused panel has the whole screen."""
    mono: bool = False
    """True: the terminal shows no colours, so block states are drawn as letters."""
    dialog: Dialog | None = None
    """What is drawn over the panels. None: nothing."""
