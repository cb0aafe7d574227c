"""What the user chose: everything a drawing depends on besides the snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtop.model.blocks import BlockCounts
from kvtop.model.detail import Detail
from kvtop.model.history import History
from kvtop.model.snapshot import Finding

__all__ = ["Baseline", "Detail", "Dialog", "Line", "Mark", "Player", "Run", "View"]

Run = tuple[str, str]
"""Text and the name of its style in `draw.style.STYLES`."""
Line = tuple[Run, ...]
"""One line of the screen; its texts add up to the width asked for."""


@dataclass(frozen=True, slots=True)
class Dialog:
    """Something drawn over the panels until it is answered or closed."""

    kind: str
    """`help`, `sources`, `findings`, `finding` (these three are drawn live), `message`,
    `confirm`, `danger` (a question whose answer is no unless `y` is pressed) or `input`."""
    title: str
    """Title of its box."""
    lines: tuple[Line, ...] = ()
    """What it says; longer lines are cut, more lines are scrolled. For `finding` what its
    rule means, a paragraph a line; those are wrapped."""
    action: str = ""
    """What the answer is for; only questions and `input` have one."""
    value: str = ""
    """Text typed so far; only `input` has one."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment of a replay that is worth a look."""

    time_s: float
    """When."""
    kind: str
    """`marker`, `finding`, `preemption`, `restart`, or another kind that is not drawn."""
    severity: str = ""
    """Of a finding."""


@dataclass(frozen=True, slots=True)
class Player:
    """Where a replay is."""

    time_s: float
    """The moment shown."""
    first_s: float
    """Begin of the session."""
    last_s: float
    """Its end, as far as it is written."""
    playing: bool = True
    """False: paused."""
    speed: float = 1.0
    """1 is as it was recorded."""
    at_end: bool = False
    """True: nothing comes after it (yet)."""
    growing: bool = False
    """True: the file is still being written."""
    marks: tuple[Mark, ...] = ()
    """What stands on the timeline."""
    kind: str = "any"
    """Kind of event that the keys jump to."""
    judged: float = 1.0
    """Share of the session whose findings are on the timeline, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A pinned moment."""

    time_s: float
    """When."""
    counts: Mapping[str, BlockCounts] = field(default_factory=dict)
    """Counts of the first pool, by `model.history.engine_key`."""


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
    stacks_role: str = ""
    """Role of the only process whose frames are shown. Empty: all of them."""
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
    findings: tuple[Finding, ...] = ()
    """What holds at the snapshot on screen, in the order of the judge. Empty: not judged yet."""
    finding_key: str = ""
    """`draw.findings.key_of` of the finding under the cursor of their list."""
    finding: Finding | None = None
    """The finding that is open, as it was when it was opened. None: none is."""
    recording: str = ""
    """For the header while a session is recorded, for example `REC 1.2 MiB`. Empty: none is."""
    player: Player | None = None
    """Where the replay is. None: this is live."""
    allow_actions: bool = False
    """True: kvtop was started with `--allow-actions`; keys may change an engine."""
    baseline: Baseline | None = None
    """The pinned moment. None: none is."""
