"""Every style of the screen in one table: one colour a state, everywhere.

Drawing names styles; who paints them (`ui`, or the plain-ANSI first frame) asks
`resolve` what a name means. Colours are given twice, as an index into the 256
colours of xterm and as one of the 16 basic ones, so that each screen shows the best
it can. Nothing is said by colour alone: states have letters, severities are words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from kvtop.model import frames
from kvtop.model.blocks import LETTERS, BlockState
from kvtop.model.snapshot import Phase


@dataclass(frozen=True, slots=True)
class Colour:
    """One colour in two depths."""

    index: int
    """Index into xterm's 256 colours."""
    basic: int
    """The nearest of the 16 basic colours, 0-15."""


@dataclass(frozen=True, slots=True)
class StyleSpec:
    """What a style name means; None and False: the terminal's own default."""

    fg: Colour | None = None
    """Colour of the text."""
    bg: Colour | None = None
    """Colour behind it."""
    bold: bool = False
    """Bold."""
    dim: bool = False
    """Faint."""
    underline: bool = False
    """Underlined."""
    reverse: bool = False
    """Foreground and background exchanged; readable without colours too."""


_GREY = Colour(245, 7)
_BLACK = Colour(16, 0)
_WHITE = Colour(231, 15)
_GREEN = Colour(71, 2)
_CYAN = Colour(80, 14)
_BLUE = Colour(67, 4)
_YELLOW = Colour(220, 11)
_RED = Colour(203, 9)
_MAGENTA = Colour(176, 13)

STATE_COLOURS = {
    BlockState.FREE: Colour(239, 8),
    BlockState.CACHED: _BLUE,
    BlockState.USED: _GREEN,
    BlockState.SHARED: _CYAN,
    BlockState.HELD: _YELLOW,
    BlockState.GHOST: _RED,
    BlockState.NULL: Colour(235, 0),
}
"""The colour of each block state, on the map, in counts, tables and charts."""

LIT_LETTER = "L"
"""Letter of a block that is lit up, in `map:` styles."""
FOUND_LETTER = "!"
"""Letter of a block that a finding is about and whose state looks healthy, in `map:` styles."""
NO_LETTER = "-"
"""Letter of a half cell without a block, in `map:` styles."""

_LIT = _WHITE
_FOUND = Colour(208, 13)
_BY_LETTER: dict[str, Colour | None] = {
    **{letter: STATE_COLOURS[state] for state, letter in LETTERS.items()},
    LIT_LETTER: _LIT,
    FOUND_LETTER: _FOUND,
    NO_LETTER: None,
}

STYLES: dict[str, StyleSpec] = {
    "": StyleSpec(),
    "dim": StyleSpec(fg=_GREY, dim=True),
    "label": StyleSpec(fg=_GREY),
    "value": StyleSpec(bold=True),
    "ok": StyleSpec(fg=_GREEN),
    "warn": StyleSpec(fg=_YELLOW, bold=True),
    "crit": StyleSpec(fg=_RED, bold=True),
    "header": StyleSpec(bold=True),
    "demo": StyleSpec(reverse=True, bold=True),
    "rec": StyleSpec(fg=_RED, reverse=True, bold=True),
    "paused": StyleSpec(fg=_YELLOW, reverse=True, bold=True),
    "border": StyleSpec(fg=Colour(240, 8)),
    "border.focus": StyleSpec(fg=_CYAN, bold=True),
    "title": StyleSpec(bold=True),
    "title.focus": StyleSpec(fg=_CYAN, bold=True),
    "table.head": StyleSpec(fg=_GREY, underline=True),
    "table.sort": StyleSpec(bold=True, underline=True),
    "cursor": StyleSpec(reverse=True),
    "cursor.idle": StyleSpec(underline=True),
    "key": StyleSpec(bold=True),
    "key.label": StyleSpec(reverse=True),
    "message": StyleSpec(fg=_YELLOW, bold=True),
    "search": StyleSpec(fg=_CYAN, bold=True),
    "bar.empty": StyleSpec(fg=Colour(239, 8)),
    "bar.weights": StyleSpec(fg=_MAGENTA),
    "bar.mem": StyleSpec(fg=_GREEN),
    "chart.axis": StyleSpec(fg=_GREY),
    "chart.util": StyleSpec(fg=_GREEN),
    "chart.mem": StyleSpec(fg=_MAGENTA),
    **{
        f"flame.{name}": StyleSpec(fg=_BLACK, bg=colour)
        for name, colour in {
            frames.SCHEDULE: Colour(74, 6),
            frames.ALLOCATE: Colour(71, 2),
            frames.FREE: Colour(116, 14),
            frames.PREEMPT: Colour(176, 13),
            frames.CONNECTOR: Colour(141, 5),
            frames.ABORT: Colour(203, 9),
            frames.SAMPLING: Colour(221, 11),
            frames.MODEL: Colour(215, 3),
            frames.WAIT: Colour(247, 7),
            frames.OTHER: Colour(187, 7),
            "grown": Colour(203, 9),
            "shrunk": Colour(75, 12),
            "same": Colour(250, 7),
        }.items()
    },
    "flame.hit": StyleSpec(fg=_WHITE, bg=Colour(90, 5), bold=True, underline=True),
    "flame.cursor": StyleSpec(reverse=True, bold=True),
    "map.lit": StyleSpec(fg=_LIT, bold=True, reverse=True),
    "map.found": StyleSpec(fg=_FOUND, bold=True, underline=True),
    **{
        f"state.{state.name.lower()}": StyleSpec(
            fg=colour, bold=state in (BlockState.HELD, BlockState.GHOST)
        )
        for state, colour in STATE_COLOURS.items()
    },
    f"phase.{Phase.WAITING.value}": StyleSpec(fg=_GREY),
    f"phase.{Phase.PREFILL.value}": StyleSpec(fg=_CYAN),
    f"phase.{Phase.DECODE.value}": StyleSpec(fg=_GREEN),
    f"phase.{Phase.PREEMPTED.value}": StyleSpec(fg=_MAGENTA, bold=True),
    f"phase.{Phase.HELD.value}": StyleSpec(fg=_YELLOW, bold=True),
}
"""All fixed styles by name; the `map:` styles are made by `resolve`."""


def state_style(state: BlockState) -> str:
    """Name of the style of a block state, for example `state.cached`."""
    return f"state.{state.name.lower()}"


@lru_cache(maxsize=256)
def resolve(name: str) -> StyleSpec:
    """What a style name means.

    `map:<upper><lower>` is a cell of the block map, drawn as an upper half block: the
    first letter gives the foreground, the second the background. The letters are
    those of the block states, `L` (lit), `!` (in a finding) and `-` (no block). A name
    that is not known is the default style, so that a fault in a name never takes the
    screen down.
    """
    if name.startswith("map:") and len(name) == 6:
        return StyleSpec(fg=_BY_LETTER.get(name[4]), bg=_BY_LETTER.get(name[5]))
    return STYLES.get(name, STYLES[""])


def without_colour(spec: StyleSpec) -> StyleSpec:
    """The style on a screen that shows no colours (NO_COLOR)."""
    return replace(spec, fg=None, bg=None)
