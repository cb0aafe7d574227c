"""Numbers as text: short, never cut, and a dash for what is not known.

Unknown is None, NaN or infinite; it is never drawn as 0. A number too large for its
place is written shorter (`1.2M`), not clipped; where even that does not fit, `#`
fills the place, as in a spreadsheet.
"""

from __future__ import annotations

import math
import time
from typing import TypeGuard

from kvtop.draw.text import DASH

Number = float | int | None

_HUGE = 10**18
_SCALES = ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k"))
_BINARY = ((1 << 50, "P"), (1 << 40, "T"), (1 << 30, "G"), (1 << 20, "M"), (1 << 10, "k"))


def known(value: Number) -> TypeGuard[float]:
    """Whether there is a number to draw."""
    return value is not None and (isinstance(value, int) or math.isfinite(value))


def count(value: Number) -> str:
    """A whole number with thousands separators: `20,480`."""
    if not known(value):
        return DASH
    if abs(value) >= _HUGE:
        return _huge(value)
    return f"{round(value):,}"


def _huge(value: float) -> str:
    return ">1e18" if value > 0 else "<-1e18"


def short(value: Number, cells: int = 5) -> str:
    """A number in at most `cells` cells: `20480`, `1.2M`, `123G`."""
    if not known(value):
        return DASH if cells >= 1 else ""
    return _scaled(value, _SCALES, cells)


def size(value: Number) -> str:
    """Bytes with a binary unit: `2.5 GiB`."""
    if not known(value):
        return DASH
    if abs(value) >= _HUGE * 1024:
        return _huge(value) + " B"
    for unit, letter in _BINARY:
        if abs(value) >= unit:
            name = "KiB" if letter == "k" else f"{letter}iB"
            return f"{value / unit:,.1f} {name}"
    return f"{round(value)} B"


def size_short(value: Number, cells: int = 6) -> str:
    """Bytes in at most `cells` cells: `2.5G`, binary units."""
    if not known(value):
        return DASH if cells >= 1 else ""
    return _scaled(value, _BINARY, cells)


def _scaled(value: float, scales: tuple[tuple[int, str], ...], cells: int) -> str:
    whole = abs(value) < _HUGE
    # Plain bytes say nothing at a glance; plain counts do.
    if scales is _SCALES or abs(value) < scales[-1][0]:
        plain = f"{round(value)}" if whole else _huge(value)
        if len(plain) <= cells:
            return plain
    if whole:
        for unit, letter in scales:
            if abs(value) >= unit:
                for digits in (1, 0):
                    text = f"{value / unit:.{digits}f}{letter}"
                    if len(text) <= cells:
                        return text
                break
    elif len(_huge(value)) <= cells:
        return _huge(value)
    return "#" * max(cells, 0)


def gib(value: Number) -> str:
    """Bytes as GiB without the unit: `68.1`."""
    if not known(value):
        return DASH
    if abs(value) >= _HUGE * 1024:
        return _huge(value)
    return f"{value / (1 << 30):,.1f}"


def percent(value: Number) -> str:
    """A share: `34%`. What is not quite 0 or 100 is not drawn as 0 or 100."""
    if not known(value):
        return DASH
    if abs(value) >= _HUGE:
        return _huge(value) + "%"
    if 0 < value < 1:
        return "<1%"
    if 99 < value < 100:
        return ">99%"
    return f"{round(value):,}%"


def duration(seconds: Number) -> str:
    """A time span in at most 6 cells up to 999 days: `1.0s`, `42s`, `3m05s`, `2h10m`, `3d04h`."""
    # Two clocks can disagree by a little; a span that is truly negative is not a span.
    if not known(seconds) or seconds < -5:
        return DASH
    seconds = max(seconds, 0)
    if seconds >= _HUGE:
        return ">1e18s"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    if whole < 100 * 86400:
        return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
    days = whole // 86400
    return f"{days}d" if days < 100_000 else f"{short(days, 5)}d"


def rate(value: Number) -> str:
    """Per second: `0.2/s`, `1,234/s`."""
    if not known(value):
        return DASH
    if abs(value) < 99.95:
        text = f"{value:.1f}"
        return "<0.1/s" if text == "0.0" and value > 0 else f"{text}/s"
    return f"{count(value)}/s"


def clock(time_s: Number) -> str:
    """Unix seconds as local time of day: `12:04:51`."""
    if not known(time_s):
        return DASH
    try:
        return time.strftime("%H:%M:%S", time.localtime(time_s))
    except (OverflowError, ValueError, OSError):
        return DASH
