"""Lines of the screen as an SVG picture: one cell of text is one cell of the picture."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvtop.draw.style import StyleSpec, resolve
from kvtop.draw.text import cell_width
from kvtop.draw.view import Line

CELL_W, CELL_H, MARGIN = 8.0, 17.0, 10.0
# Ordinary spaces in a row are drawn as one.
NBSP = "\u00a0"
BACK, FORE = "#15181e", "#d5d8de"
BASIC = (
    *("#1d1f21", "#cc6666", "#8abd68", "#d8b45f", "#6c99bb", "#b294bb", "#7ac0b8", "#c5c8c6"),
    *("#666a73", "#e07070", "#a5d27a", "#f0c95f", "#81b0dd", "#c8a5d3", "#8ad8d0", "#ffffff"),
)


def xterm(index: int) -> str:
    """A colour of xterm's palette as `#rrggbb`."""
    if index < 16:
        return BASIC[index]
    if index >= 232:
        grey = 8 + 10 * (index - 232)
        return f"#{grey:02x}{grey:02x}{grey:02x}"
    steps = (0, 95, 135, 175, 215, 255)
    index -= 16
    parts = (steps[index // 36], steps[index // 6 % 6], steps[index % 6])
    return "#" + "".join(f"{part:02x}" for part in parts)


def colours(spec: StyleSpec) -> tuple[str, str | None]:
    """Foreground and background; None: the picture's own background."""
    fore = xterm(spec.fg.index) if spec.fg else FORE
    back = xterm(spec.bg.index) if spec.bg else None
    if spec.reverse:
        fore, back = back or BACK, fore
    return fore, back


def picture(lines: Sequence[Line], title: str) -> str:
    """An SVG document.

    Args:
        lines: Lines of one width, as `draw.screen.screen` gives them.
        title: Its accessible title.
    """
    columns = max((sum(cell_width(text) for text, _ in line) for line in lines), default=0)
    width = columns * CELL_W + 2 * MARGIN
    height = len(lines) * CELL_H + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="DejaVu Sans Mono, Menlo, '
        f'Consolas, monospace" font-size="13" xml:space="preserve">',
        f"<title>{escape(title)}</title>",
        f'<rect width="100%" height="100%" rx="6" fill="{BACK}"/>',
    ]
    for row, line in enumerate(lines):
        x, y = MARGIN, MARGIN + row * CELL_H
        for text, style in line:
            cells = cell_width(text)
            parts += _run(text, resolve(style), x, y, cells * CELL_W)
            x += cells * CELL_W
    return "\n".join([*parts, "</svg>", ""])


def _run(text: str, spec: StyleSpec, x: float, y: float, width: float) -> list[str]:
    fore, back = colours(spec)
    parts = []
    if back is not None:
        parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{CELL_H}" fill="{back}"/>'
        )
    if text and set(text) == {"\u2580"}:
        # As shapes: half-block glyphs of most fonts leave gaps between the cells.
        half = CELL_H / 2
        parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{half}" fill="{fore}"/>')
    elif text.strip():
        start = len(text) - len(text.lstrip())
        word = text.strip()
        left = x + start * CELL_W
        long = cell_width(word) * CELL_W
        more = ' font-weight="bold"' if spec.bold else ""
        more += ' opacity="0.6"' if spec.dim else ""
        more += ' text-decoration="underline"' if spec.underline else ""
        shown = escape(word).replace(" ", NBSP)
        parts.append(
            f'<text x="{left:g}" y="{y + 13:g}" textLength="{long:g}" '
            f'lengthAdjust="spacingAndGlyphs" fill="{fore}"{more}>{shown}</text>'
        )
    return parts
