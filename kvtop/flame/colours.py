"""One colour a category, for SVG and HTML; the terminal has its own table in `draw.style`."""

from __future__ import annotations

from kvtop.model import frames

COLOURS = {
    frames.SCHEDULE: "#5fafd7",
    frames.ALLOCATE: "#5faf5f",
    frames.FREE: "#87d7d7",
    frames.PREEMPT: "#d787d7",
    frames.CONNECTOR: "#af87ff",
    frames.ABORT: "#ff5f5f",
    frames.SAMPLING: "#ffd75f",
    frames.MODEL: "#ffaf5f",
    frames.WAIT: "#bcbcbc",
    frames.OTHER: "#e4d7c5",
}
"""Fill of a frame; dark text can be read on each."""


def percent(count: int, whole: int) -> str:
    """A share for a legend: `34%`. What is not quite nothing or all does not look like it."""
    share = 100.0 * count / max(whole, 1)
    if 0 < share < 1:
        return "<1%"
    return ">99%" if 99 < share < 100 else f"{share:.0f}%"
