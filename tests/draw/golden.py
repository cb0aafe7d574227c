"""Compares drawn lines with a text file that a reviewer can read.

`KVTOP_GOLDEN=write pytest tests/draw` writes the files anew; look at the diff before
it is committed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvtop.draw.text import line_width
from kvtop.draw.view import Line

_FOLDER = Path(__file__).parent / "golden"


def text_of(line: Line) -> str:
    return "".join(text for text, _ in line)


def styles_of(line: Line) -> set[str]:
    return {style for text, style in line if text.strip()}


def exact(lines: Sequence[Line], width: int, height: int) -> Sequence[Line]:
    """The lines, after checking that they fill the space asked for to the cell."""
    assert len(lines) == height
    assert [line_width(line) for line in lines] == [width] * height
    return lines


class Golden:
    """Collects what one test draws and compares it at the end."""

    def __init__(self, name: str) -> None:
        self._path = _FOLDER / f"{name}.txt"
        self._parts: list[str] = []

    def add(self, heading: str, lines: Sequence[Line], title: str | None = None) -> None:
        self._parts.append(f"== {heading}" + ("" if title is None else f"  [{title}]"))
        self._parts.extend(f"|{text_of(line)}|" for line in lines)

    def check(self) -> None:
        drawn = "\n".join(self._parts) + "\n"
        if os.environ.get("KVTOP_GOLDEN") == "write":
            self._path.parent.mkdir(exist_ok=True)
            self._path.write_text(drawn, encoding="utf-8")
        assert drawn == self._path.read_text(encoding="utf-8")
