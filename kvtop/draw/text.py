"""Text in terminal cells: made safe, measured, cut, padded; and numbers as text.

Everything that came from outside (request ids, model names, process names, error
texts) passes through `visible` before it is measured or drawn. The width of a
line is counted in terminal cells, not in characters.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache

from kvtop.draw.view import Line, Run

Field = tuple[int, Line]
"""A part of a line that is drawn whole or not at all: importance (the smallest stays
longest) and runs."""

DASH = "-"
"""How an unknown value is drawn."""

_UNCERTAIN = (
    (0x115F, 0x11FF),
    (0x2630, 0x2637),
    (0x268A, 0x268F),
    (0x3164, 0x3164),
    (0x4DC0, 0x4DFF),
    (0xD7B0, 0xD7FF),
    (0xFFA0, 0xFFA0),
    (0x1D300, 0x1D37F),
    (0x1F3FB, 0x1F3FF),
)
"""Letters and signs without one width: Hangul parts and fillers that join their neighbours,
skin tones, and symbols that became wide in Unicode 16. Terminals disagree on them."""

_MARKS_LIMIT = 2
"""Combining marks kept on one letter; more only hide the letter and flood the line."""


@lru_cache(maxsize=4096)
def visible(text: str) -> str:
    r"""Text from outside, safe to draw: what has no certain place on screen is escaped.

    Control characters, bidi and zero-width characters, separators, lone surrogates,
    private and unassigned code points become `\xNN`, `\uNNNN` or `\UNNNNNNNN`; the
    backslash is doubled, so that no two texts look the same. Letters of all scripts,
    wide ones included, stay.
    """
    if text.isascii() and text.isprintable():
        return text.replace("\\", "\\\\")
    out: list[str] = []
    marks = _MARKS_LIMIT
    for char in text:
        if char == "\\":
            out.append("\\\\")
            marks = 0
            continue
        if char == " ":
            out.append(char)
            marks = _MARKS_LIMIT
            continue
        category = unicodedata.category(char)
        if category == "Mn" and marks < _MARKS_LIMIT and not _is_selector(char):
            out.append(char)
            marks += 1
        elif category[0] in "CZM" or _is_uncertain(ord(char)):
            out.append(_escaped(char))
            marks = _MARKS_LIMIT
        else:
            out.append(char)
            marks = 0
    return "".join(out)


def _is_uncertain(code: int) -> bool:
    return any(first <= code <= last for first, last in _UNCERTAIN)


def _is_selector(char: str) -> bool:
    # Variation selectors change the width of the character before them on some terminals.
    return 0xFE00 <= ord(char) <= 0xFE0F or 0xE0100 <= ord(char) <= 0xE01EF


def _escaped(char: str) -> str:
    code = ord(char)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    if code <= 0xFFFF:
        return f"\\u{code:04x}"
    return f"\\U{code:08x}"


def ascii_only(text: str) -> str:
    """`text` for a terminal without UTF-8: all else as backslash escapes."""
    if text.isascii():
        return text
    return "".join(char if char.isascii() else _escaped(char) for char in text)


def safe(text: str, ascii: bool = False) -> str:  # noqa: A002 - the name of the option
    """`visible`, and ASCII only where the screen asks for that."""
    shown = visible(text)
    return ascii_only(shown) if ascii else shown


def char_width(char: str) -> int:
    """Cells of one character: 0 for combining marks, 2 for wide ones, else 1."""
    if unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


@lru_cache(maxsize=4096)
def _wide_width(text: str) -> int:
    return sum(char_width(char) for char in text)


def cell_width(text: str) -> int:
    """Terminal cells that a text takes."""
    return len(text) if text.isascii() else _wide_width(text)


def cut(text: str, width: int) -> str:
    """The first characters of a text that fit into `width` cells."""
    if text.isascii():
        return text[: max(width, 0)]
    used = 0
    for at, char in enumerate(text):
        used += char_width(char)
        if used > width:
            return text[:at]
    return text


def clip(text: str, width: int, ascii: bool = False) -> str:  # noqa: A002 - as above
    """A text cut to at most `width` cells; a mark at the end says that it was cut."""
    if cell_width(text) <= width:
        return text
    if width <= 0:
        return ""
    return cut(text, width - 1) + ("~" if ascii else "…")


def clip_middle(text: str, width: int, ascii: bool = False) -> str:  # noqa: A002 - as above
    """A text cut in its middle: ids differ at their ends, and often begin alike."""
    if cell_width(text) <= width:
        return text
    if width < 5:
        return clip(text, width, ascii)
    head = cut(text, (width - 1) // 3)
    room = width - 1 - cell_width(head)
    at = len(text)
    while at > 0 and char_width(text[at - 1]) <= room:
        at -= 1
        room -= char_width(text[at])
    # A combining mark would settle on the mark of the cut.
    while at < len(text) and char_width(text[at]) == 0:
        at += 1
    return head + ("~" if ascii else "…") + text[at:]


def pad(text: str, width: int, right: bool = False) -> str:
    """A text filled up with spaces to `width` cells; longer texts are left as they are.

    Args:
        text: What is padded.
        width: Cells wanted.
        right: Align right, as numbers are.
    """
    space = " " * (width - cell_width(text))
    return space + text if right else text + space


def line_width(line: Iterable[Run]) -> int:
    """Cells of a line."""
    return sum(cell_width(text) for text, _ in line)


def fit(line: Iterable[Run], width: int) -> Line:
    """A line of exactly `width` cells: cut or filled up, equal neighbours merged."""
    out: list[Run] = []
    left = max(width, 0)
    for whole, style in line:
        if left <= 0:
            break
        if not whole:
            continue
        text, cells = whole, cell_width(whole)
        if cells > left:
            # A wide character that would cross the edge leaves one empty cell.
            text, cells = pad(cut(whole, left), left), left
        left -= cells
        if out and out[-1][1] == style:
            out[-1] = (out[-1][0] + text, style)
        else:
            out.append((text, style))
    if left > 0:
        if out and out[-1][1] == "":
            out[-1] = (out[-1][0] + " " * left, "")
        else:
            out.append((" " * left, ""))
    return tuple(out)


def blank(width: int, height: int) -> list[Line]:
    """`height` empty lines of `width` cells."""
    return [fit((), width)] * max(height, 0)


def block(lines: Sequence[Iterable[Run]], width: int, height: int) -> list[Line]:
    """Exactly `height` lines of `width` cells: the first ones, or filled up with empty ones."""
    height = max(height, 0)
    out = [fit(line, width) for line in lines[:height]]
    return out + blank(width, height - len(out))


def choose(parts: Sequence[Field], width: int, gap: str = "  ") -> list[Field]:
    """The fields that fit into one line; of the others the least important goes first.

    Args:
        parts: The fields in drawing order.
        width: Cells there are.
        gap: Between two fields.
    """
    kept = [part for part in parts if line_width(part[1]) > 0]
    total = sum(line_width(runs) for _, runs in kept) + len(gap) * max(len(kept) - 1, 0)
    while kept and total > width:
        # Of equals the last one goes.
        worst = max(range(len(kept)), key=lambda at: (kept[at][0], at))
        total -= line_width(kept[worst][1]) + (len(gap) if len(kept) > 1 else 0)
        del kept[worst]
    return kept


def fields(parts: Sequence[Field], width: int, gap: str = "  ") -> Line:
    """Fields in one line; those that do not fit are left out whole, never cut."""
    out: list[Run] = []
    for at, (_, runs) in enumerate(choose(parts, width, gap)):
        if at:
            out.append((gap, ""))
        out.extend(runs)
    return tuple(out)


def wrap(text: str, width: int) -> list[str]:
    """A text broken at spaces into lines of at most `width` cells; long words are broken too."""
    if width <= 0:
        return []
    lines: list[str] = []
    now = ""
    for word in text.split(" "):
        rest = word
        joined = f"{now} {rest}" if now else rest
        if cell_width(joined) <= width:
            now = joined
            continue
        if now:
            lines.append(now)
        while cell_width(rest) > width:
            head = cut(rest, width) or rest[:1]
            if cell_width(head) > width:  # a wide character in a column of one cell
                head, rest = "?", rest[1:]
            else:
                rest = rest[len(head) :]
            lines.append(head)
        now = rest
    if now or not lines:
        lines.append(now)
    return lines
