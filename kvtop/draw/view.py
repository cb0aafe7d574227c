"""What the user chose: everything a drawing depends on besides the snapshot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvtop.model.history import History

Run = tuple[str, str]
"""Text and the name of its style in `draw.style.STYLES`."""
Line = tuple[Run, ...]
"""One line of the screen; its texts add up to the width asked for."""


@dataclass(frozen=True, slots=True)
class Detail:
    """The block table of one request, as its engine's probe gave it."""

    request_id: str
    """The request asked for."""
    step: int | None = None
    """Scheduler step of the answer. None: no answer yet, or it failed."""
    tables: tuple[tuple[int, int | None, tuple[int, ...]], ...] = ()
    """A group: its index, its block size in tokens, its physical block ids in logical order."""
    refs: tuple[tuple[int, ...], ...] = ()
    """Ref count of each entry, the same shape as the tables."""
    shared_with: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Other requests that hold a block, by block id."""
    error: str = ""
    """Why there is no answer. Empty: there is one, or it is awaited."""


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
