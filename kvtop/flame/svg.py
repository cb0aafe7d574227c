"""A flame graph as a picture: one SVG file without scripts, icicle-shaped, colours by category."""

from __future__ import annotations

from xml.sax.saxutils import escape

from kvtop.flame.colours import COLOURS, percent
from kvtop.flame.tree import Tree

WIDTH = 1200
"""Pixels."""
_ROW = 17
_TOP = 62
_TITLE_Y, _NOTE_Y, _LEGEND_Y = 18, 33, 51
_MIN_PIXELS = 0.3
_CHAR = 6.7
"""Width of a character at 11 pixels; that of the usual monospace fonts is at most 0.61 of it."""
_TITLE_SIZE = 14
_ROOM = WIDTH - 16
_MOST_FRAMES = 40_000


def write(tree: Tree, title: str, note: str = "", least: float = _MIN_PIXELS) -> str:
    """The picture.

    Args:
        tree: The merged stacks.
        title: First line, cut to the width; may come from outside.
        note: Second line: samples, rate, mode; cut as well.
        least: Frames narrower than so many of the 1200 pixels are left out.
    """
    boxes, deepest = _boxes(tree, least)
    height = _TOP + (deepest + 1) * _ROW + 12
    parts = [
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
        f' viewBox="0 0 {WIDTH} {height}" font-family="monospace" font-size="11">\n'
        '<rect width="100%" height="100%" fill="#ffffff"/>\n'
        f'<text x="8" y="{_TITLE_Y}" font-size="{_TITLE_SIZE}">'
        f"{_text(_cut(title, _ROOM / (_CHAR * _TITLE_SIZE / 11)))}</text>\n",
        f'<text x="8" y="{_NOTE_Y}">{_text(_cut(note, _ROOM / _CHAR))}</text>\n' if note else "",
        _legend(tree),
    ]
    whole = max(tree.total[0], 1)
    for node, depth, x, width in boxes:
        name = tree.name(node)
        share = 100.0 * tree.total[node] / whole
        own = 100.0 * tree.own[node] / whole
        category = tree.category(node)
        y = _TOP + depth * _ROW
        room = int((width - 4) / _CHAR)
        label = _cut(name, room)
        parts.append(
            f"<g><title>{_text(name)}: {tree.total[node]:,} {_text(tree.unit)}, {share:.2f} %,"
            f" self {own:.2f} %, {category}</title>"
            f'<rect x="{x:.2f}" y="{y}" width="{max(width - 0.4, 0.2):.2f}" height="{_ROW - 1}"'
            f' fill="{COLOURS[category]}"/>'
        )
        if room >= 3:
            parts.append(f'<text x="{x + 2:.2f}" y="{y + 12}">{_text(label)}</text>')
        parts.append("</g>\n")
    parts.append("</svg>\n")
    return "".join(parts)


def _boxes(tree: Tree, least: float) -> tuple[list[tuple[int, int, float, float]], int]:
    """Node, depth, left edge and width of every frame that can be seen; and the deepest row."""
    scale = WIDTH / max(tree.total[0], 1)
    out: list[tuple[int, int, float, float]] = []
    deepest = 0
    queue: list[tuple[int, int, float]] = [(0, 0, 0.0)]
    at = 0
    while at < len(queue) and len(out) < _MOST_FRAMES:
        node, depth, x = queue[at]
        at += 1
        out.append((node, depth, x, tree.total[node] * scale))
        deepest = max(deepest, depth)
        for child in tree.children(node):
            width = tree.total[child] * scale
            if width >= least:
                queue.append((child, depth + 1, x))
            x += width
    return out, deepest


def _cut(text: str, room: float) -> str:
    """Text of at most so many characters."""
    return text if len(text) <= room else text[: max(int(room) - 1, 0)] + "…"


def _legend(tree: Tree) -> str:
    whole = max(tree.total[0], 1)
    x = 8.0
    out = []
    shares = {} if tree.inverted else tree.split()
    for name, count in sorted(shares.items(), key=lambda item: -item[1]):
        label = f"{name} {percent(count, whole)}"
        out.append(
            f'<rect x="{x:.0f}" y="{_LEGEND_Y - 9}" width="10" height="10" fill="{COLOURS[name]}"/>'
            f'<text x="{x + 13:.0f}" y="{_LEGEND_Y}">{_text(label)}</text>\n'
        )
        x += 24 + len(label) * _CHAR
    return "".join(out)


def _text(text: str) -> str:
    """Text from outside for XML: no markup, and none of the characters XML 1.0 forbids."""
    kept = "".join(char if char.isprintable() else "�" for char in text)
    return escape(kept, {'"': "&quot;"})
