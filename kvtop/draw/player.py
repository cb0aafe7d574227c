"""The line at the bottom of a replay: where it is, how fast, and what happened when."""

from __future__ import annotations

import math

from kvtop.draw.numbers import clock, percent
from kvtop.draw.text import Field, choose, fit, line_width, safe
from kvtop.draw.view import Line, Mark, Player, Run

_LETTERS = {"finding": "!", "marker": "M", "restart": "R", "preemption": "p", "stacks": "F"}
"""What stands on the bar; other kinds of events are not on it."""
_LEAST_BAR = 8


def _weight(mark: Mark) -> int:
    """0 wins where several marks share a cell."""
    if mark.kind == "finding":
        return 0 if mark.severity == "critical" else 2
    return {"marker": 1, "restart": 3, "stacks": 4}.get(mark.kind, 5)


def _style(mark: Mark) -> str:
    if mark.kind == "finding":
        return {"critical": "crit", "warning": "warn"}.get(mark.severity, "label")
    return {"marker": "key", "stacks": "key", "restart": "crit"}.get(mark.kind, "phase.preempted")


def share(player: Player, time_s: float) -> float:
    """Where a moment lies in the session, 0 to 1."""
    length = player.last_s - player.first_s
    part = (time_s - player.first_s) / length if length > 0 else 1.0
    return min(max(part, 0.0), 1.0) if math.isfinite(part) else 1.0


def timeline_line(player: Player, width: int, ascii: bool = False) -> Line:  # noqa: A002 - the option
    """State, speed, moment, the bar with its marks, and the end of the session.

    Args:
        player: Where the replay is.
        width: Cells.
        ascii: Only ASCII characters.
    """
    word = "PLAY" if player.playing else "PAUSED"
    if player.playing and player.at_end:
        word = "FOLLOW" if player.growing else "END"
    left: list[Field] = [
        (0, ((f" {word} ", "paused" if word == "PAUSED" else "key.label"),)),
        (3, ((f"{player.speed:g}x", "value"),)),
        (1, ((clock(player.time_s), "value"),)),
        (4, ((percent(100.0 * share(player, player.time_s)), ""),)),
    ]
    end = clock(player.last_s) + (" growing" if player.growing else "")
    right: list[Field] = [
        (5, ((end, "label"),)),
        (6, ((f"n: {safe(player.kind, ascii)}", "label"),)),
    ]
    if player.judged < 1.0 and not player.growing:
        right.append((7, ((f"findings {percent(100.0 * player.judged)}", "label"),)))
    kept = choose([*left, *right], max(width - _LEAST_BAR - 4, 0))
    head, tail = _joined(kept, left), _joined(kept, right)
    room = width - line_width(head) - line_width(tail) - 1 - (2 if tail else 0)
    bar = _bar(player, room, ascii) if room >= _LEAST_BAR else ()
    return fit((*head, (" ", ""), *bar, ("  " if tail else "", ""), *tail), width)


def _joined(kept: list[Field], parts: list[Field]) -> Line:
    runs: list[Run] = []
    for part in parts:
        if part in kept:
            runs += [(" ", ""), *part[1]] if runs else list(part[1])
    return tuple(runs)


def _bar(player: Player, width: int, ascii: bool) -> Line:  # noqa: A002 - the option
    over, ahead, here = "=-#" if ascii else "━─█"
    at = min(int(share(player, player.time_s) * width), width - 1)
    cells: list[Run] = [
        (over, "border.focus") if cell < at else (ahead, "bar.empty") for cell in range(width)
    ]
    weights = [9] * width
    for mark in player.marks:
        if mark.kind not in _LETTERS:
            continue
        cell = min(int(share(player, mark.time_s) * width), width - 1)
        if _weight(mark) < weights[cell]:
            weights[cell] = _weight(mark)
            cells[cell] = (_LETTERS[mark.kind], _style(mark))
    # A mark under the cursor stays readable.
    letter = cells[at][0] if weights[at] < 9 else here
    cells[at] = (letter, "cursor" if weights[at] < 9 else "value")
    return tuple(cells)
