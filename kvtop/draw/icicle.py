"""A call tree as an icicle: callers above, callees below, as wide as their share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtop.draw.numbers import count, percent
from kvtop.draw.text import Field, block, cell_width, clip, clip_middle, fields, fit, pad, safe
from kvtop.draw.view import Line, Run
from kvtop.model.frames import CATEGORIES


class CallTree(Protocol):
    """What is drawn; nodes are numbers in depth-first order, 0 is the root."""

    @property
    def own(self) -> Sequence[int]:
        """Counts that end at each node."""

    @property
    def total(self) -> Sequence[int]:
        """Counts of each node and all below it."""

    @property
    def parent(self) -> Sequence[int]:
        """Each node's parent; -1 for the root."""

    @property
    def end(self) -> Sequence[int]:
        """One past the last node below each node."""

    @property
    def label(self) -> Sequence[int]:
        """Number of each node's frame."""

    @property
    def unit(self) -> str:
        """What the counts count."""

    @property
    def inverted(self) -> bool:
        """True: callees at the root."""

    def name(self, node: int) -> str:
        """The frame of a node; text from outside."""

    def path(self, node: int) -> list[int]:
        """The node and those above it, the root first."""

    def category(self, node: int) -> str:
        """Its category."""

    def split(self) -> dict[str, int]:
        """Counts by category."""


@dataclass(frozen=True, slots=True)
class IcicleView:
    """What the user chose."""

    title: str = ""
    """What is shown; may come from outside."""
    zoom: int = 0
    """The node that has the whole width."""
    cursor: int = 0
    """The selected node, at or below `zoom`."""
    top: int = 0
    """Rows below the zoomed node that are scrolled away."""
    search: str = ""
    """Text searched for. Empty: none."""
    typing: bool = False
    """True while it is being typed."""
    hits: frozenset[int] = frozenset()
    """Numbers of the frames that were found."""
    hit_total: int = 0
    """Counts of the stacks that hold one of them."""
    thread: str = ""
    """Only this thread. Empty: all."""
    category: str = ""
    """Only this category. Empty: all."""
    change: Sequence[float] | None = None
    """Change of each node in percent points, when two captures are compared."""
    message: str = ""
    """Shown instead of the keys."""
    ascii: bool = False
    """True: only ASCII characters."""


@dataclass(frozen=True, slots=True)
class Box:
    """One frame on the screen."""

    node: int
    """Its node."""
    start: int
    """First cell."""
    end: int
    """One past its last cell."""


KEYS = (
    ("Esc", "out"), ("Enter", "zoom"), ("/", "search"), ("n", "next"), ("i", "callers"),
    ("t", "thread"), ("c", "category"), ("d", "difference"), ("q", "close"),
)  # fmt: skip
"""Keys of the viewer and their short names."""
_HEAD = 2
_TAIL = 2


def graph_rows(height: int) -> int:
    """Rows of the icicle itself in a drawing of `height` rows."""
    return max(height - _HEAD - _TAIL, 0) if height >= 7 else max(height - 1, 0)


def _first_row(height: int) -> int:
    return _HEAD if height >= 7 else 0


def levels(tree: CallTree, view: IcicleView, width: int, rows: int) -> list[list[Box]]:
    """The boxes of each row: nearest callers of the zoomed node, itself, and all below it.

    Frames narrower than a cell are left out, so this looks at no more nodes than are shown
    and their children.

    Args:
        tree: What is drawn.
        view: Zoom and scrolling.
        width: Cells.
        rows: Rows there are.
    """
    if width < 1 or rows < 1:
        return []
    above = tree.path(view.zoom)[:-1]
    above = above[len(above) - min(len(above), rows // 4) :]
    out = [[Box(node, 0, width)] for node in above]
    total, end = tree.total, tree.end
    whole = max(total[view.zoom], 1)
    # Node, and the counts to the left of it: cells come from those, so no rounding adds up.
    now: list[tuple[int, int]] = [(view.zoom, 0)]
    depth = 0
    while now and len(out) < rows:
        if depth >= view.top:
            out.append(
                [
                    Box(node, x * width // whole, max((x + total[node]) * width // whole, 1))
                    for node, x in now
                ]
            )
        below: list[tuple[int, int]] = []
        for node, first in now:
            at = first
            cell = at * width // whole
            child, last = node + 1, end[node]
            while child < last:
                after = at + total[child]
                cell_after = after * width // whole
                if cell_after > cell:
                    below.append((child, at))
                    cell = cell_after
                at = after
                child = end[child]
        now = below
        depth += 1
    return out


def node_at(
    tree: CallTree, view: IcicleView, size: tuple[int, int], at: tuple[int, int]
) -> int | None:
    """The node under a cell. None: there is none.

    Args:
        tree: What is drawn.
        view: As drawn.
        size: Columns and rows of the drawing.
        at: Column and row.
    """
    rows = levels(tree, view, size[0], graph_rows(size[1]))
    row = at[1] - _first_row(size[1])
    if not 0 <= row < len(rows):
        return None
    return next((box.node for box in rows[row] if box.start <= at[0] < box.end), None)


def icicle(tree: CallTree, view: IcicleView, width: int, height: int) -> list[Line]:
    """The whole viewer: exactly `height` lines of exactly `width` cells."""
    if width < 1 or height < 1:
        return [()] * max(height, 0)
    rows = graph_rows(height)
    graph = [_row(tree, view, boxes, width) for boxes in levels(tree, view, width, rows)]
    if tree.total[0] <= 0:
        graph = [(("no stacks here: take away a filter", "dim"),)]
    body = block(graph, width, rows)
    selected = _selected(tree, view, width)
    if height < 7:
        return block([*body, selected], width, height)
    head = [_heading(tree, view, width), _legend(tree, view, width)]
    return block([*head, *body, selected, _footer(view, width)], width, height)


def _heading(tree: CallTree, view: IcicleView, width: int) -> Line:
    kind = "Callers" if tree.inverted else "Flame graph"
    parts: list[Field] = [(0, ((kind, "header"),))]
    if view.change is not None:
        parts.append((1, (("difference", "message"),)))
    else:
        parts.append((1, ((f"{count(tree.total[0])} {safe(tree.unit, view.ascii)}", "value"),)))
    if view.thread:
        parts.append((2, ((f"thread {safe(view.thread, view.ascii)}", "search"),)))
    if view.category:
        parts.append((3, ((f"only {view.category}", "search"),)))
    if view.search and not view.typing:
        share = 100.0 * view.hit_total / max(tree.total[0], 1)
        found = f"{percent(share)} found" if view.hits else "not found"
        parts.append((4, ((f"/{safe(view.search, view.ascii)}: {found}", "search"),)))
    used = sum(cell_width(text) + 2 for _, line in parts for text, _ in line)
    room = width - used
    if room >= 8 and view.title:
        text = clip(safe(view.title, view.ascii), room, view.ascii)
        parts.append((5, ((text, "label"),)))
    return fit(fields(parts, width), width)


def _legend(tree: CallTree, view: IcicleView, width: int) -> Line:
    if view.change is not None:
        words: list[Field] = [
            (0, ((" grown + ", "flame.grown"),)),
            (0, ((" shrunk - ", "flame.shrunk"),)),
            (1, (("percent points of all samples, the newer against the older", "label"),)),
        ]
        return fit(fields(words, width, " "), width)
    whole = max(tree.total[0], 1)
    if tree.inverted:
        return fit((("innermost frames first, their callers below", "label"),), width)
    shares = sorted(tree.split().items(), key=lambda item: (-item[1], item[0]))
    parts: list[Field] = [
        (at, ((f" {name} {percent(100.0 * number / whole)} ", f"flame.{name}"),))
        for at, (name, number) in enumerate(shares)
    ]
    return fit(fields(parts, width, " "), width)


def _row(tree: CallTree, view: IcicleView, boxes: Iterable[Box], width: int) -> Line:
    runs: list[Run] = []
    at = 0
    for box in boxes:
        # Rounding can let two neighbours share a cell; the first one keeps it.
        start, end = max(box.start, at), min(box.end, width)
        if start >= end:
            continue
        if start > at:
            runs.append((" " * (start - at), ""))
        runs.append((_label(tree, view, box.node, end - start), _style(tree, view, box.node)))
        at = end
    return tuple(runs)


def _label(tree: CallTree, view: IcicleView, node: int, cells: int) -> str:
    edge = "|" if view.ascii else "▏"
    if cells < 2:
        return edge
    name = safe(tree.name(node), view.ascii)
    if view.change is not None and abs(view.change[node]) >= 0.05:
        name = f"{view.change[node]:+.1f} {name}"
    # Two cells of a name say nothing.
    text = clip(name, cells - 1, view.ascii) if cells > 3 else ""
    return edge + pad(text, cells - 1)


def _style(tree: CallTree, view: IcicleView, node: int) -> str:
    if node == view.cursor:
        return "flame.cursor"
    if tree.label[node] in view.hits:
        return "flame.hit"
    if view.change is not None:
        if view.change[node] >= 0.05:
            return "flame.grown"
        return "flame.shrunk" if view.change[node] <= -0.05 else "flame.same"
    return f"flame.{tree.category(node)}"


def _selected(tree: CallTree, view: IcicleView, width: int) -> Line:
    node = view.cursor
    whole = tree.total[0] or math.nan
    share, own = 100.0 * tree.total[node] / whole, 100.0 * tree.own[node] / whole
    parts: list[Field] = []
    if view.change is None:
        parts.append((1, ((f"{percent(share)} total", "value"),)))
        parts.append((2, ((f"{percent(own)} self", ""),)))
        parts.append((4, ((f"{count(tree.total[node])} {safe(tree.unit, view.ascii)}", "label"),)))
        if not tree.inverted:
            parts.append((3, ((tree.category(node), f"flame.{tree.category(node)}"),)))
    else:
        change = view.change[node]
        word, style = ("grew", "crit") if change >= 0.05 else ("shrank", "search")
        if abs(change) < 0.05:
            word, style = "unchanged", "label"
        text = word if word == "unchanged" else f"{word} by {abs(change):.1f} points"
        parts.append((1, ((text, style),)))
    room = width - sum(cell_width(line[0][0]) + 2 for importance, line in parts if importance < 4)
    name = clip_middle(safe(tree.name(node), view.ascii), max(room, 12), view.ascii)
    return fit(fields([(0, ((name, "title"),)), *parts], width), width)


def _footer(view: IcicleView, width: int) -> Line:
    if view.typing:
        text = safe(view.search, view.ascii)
        return fit((("/", "key"), (text, "search"), (" ", "cursor")), width)
    if view.message:
        return fit(((clip(safe(view.message, view.ascii), width, view.ascii), "message"),), width)
    parts: list[Field] = [
        (at, ((key, "key"), (f" {name}", "key.label"))) for at, (key, name) in enumerate(KEYS)
    ]
    wide = sum(len(key) + len(name) + 3 for key, name in KEYS) <= width
    return fit(fields(parts, width, "  " if wide else " "), width)


STYLED = (*CATEGORIES, "grown", "shrunk", "same", "hit", "cursor")
"""Every `flame.` style that is used here."""
