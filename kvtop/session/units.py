"""Durations, sizes and moments as people type them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo

from kvtop.errors import UsageError

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}(?:\.\d+)?))?")


def parse_duration(text: str) -> float:
    """Seconds of `2h`, `90s`, `1h30m`, `250ms`, or of a bare number of seconds.

    Raises:
        UsageError: Not a duration, or not longer than zero.
    """
    text = text.strip().lower()
    parts = list(_DURATION.finditer(text))
    whole = "".join(part.group(0) for part in parts)
    bare = len(parts) != 1 and any(part.group(2) is None for part in parts)
    if not parts or whole != text or bare:
        raise UsageError(f"'{text}' is not a duration", "write for example 30s, 10m or 2h")
    seconds = sum(float(part.group(1)) * _SECONDS[part.group(2) or "s"] for part in parts)
    if not 0 < seconds < math.inf:
        raise UsageError(f"'{text}' is not a duration", "it must be longer than zero")
    return seconds


def parse_size(text: str) -> int:
    """Bytes of `2G`, `500M`, `64k`, or of a bare number of bytes; 1k is 1024.

    Raises:
        UsageError: Not a size, or zero.
    """
    found = _SIZE.fullmatch(text.strip())
    size = int(float(found.group(1)) * _BYTES[found.group(2).lower()]) if found else 0
    if size <= 0:
        raise UsageError(f"'{text}' is not a size", "write for example 500M or 2G")
    return size


@dataclass(frozen=True, slots=True)
class Span:
    """The part of a session that a moment is looked for in."""

    first_s: float
    """Time of the first tick."""
    last_s: float
    """Time of the last tick."""

    def outside(self, time_s: float) -> bool:
        """Whether a moment is before its start or after its end.

        Moments are shown and typed in whole seconds, so a second more or less is within.
        """
        return not self.first_s - 1 <= time_s <= self.last_s + 1

    def text(self) -> str:
        """Its two ends in UTC, for messages."""
        return f"{utc(self.first_s)} to {utc(self.last_s)}"


def parse_moment(text: str, span: Span, zone: tzinfo | None = timezone.utc) -> float:
    """Unix seconds of a typed moment.

    Understood: `50%`; `+90s` after the start; `-30s` before the end; `12:04` or `12:04:51`
    (the first such time in the session, else the nearest); a full ISO 8601 date and time;
    Unix seconds.

    Args:
        text: What was typed.
        span: The session.
        zone: Of times that do not name one. None: the machine's own.

    Raises:
        UsageError: None of these.
    """
    text = text.strip()
    try:
        if text.endswith("%"):
            share = float(text[:-1])
            if 0 <= share <= 100:
                return span.first_s + (span.last_s - span.first_s) * share / 100
        elif text.startswith("+"):
            return span.first_s + parse_duration(text[1:])
        elif text.startswith("-"):
            return span.last_s - parse_duration(text[1:])
        elif clock := _CLOCK.fullmatch(text):
            return _clock_time(clock, span, zone)
        elif re.fullmatch(r"\d+(\.\d+)?", text):
            return float(text)
        else:
            moment = datetime.fromisoformat(re.sub("[Zz]$", "+00:00", text))
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=zone)
            return moment.timestamp()
    except (ValueError, OverflowError):
        pass
    raise UsageError(f"'{text}' is not a moment", "write for example 12:04:51, 50%, +90s or -30s")


def parse_moment_within(text: str, span: Span) -> float:
    """`parse_moment` where nobody would see that another moment is shown: in UTC.

    Raises:
        UsageError: It is no moment, or not one of the session.
    """
    moment = parse_moment(text, span)
    if span.outside(moment):
        raise UsageError(f"'{text}' is outside the recording, which holds {span.text()}")
    return moment


def _clock_time(clock: re.Match[str], span: Span, zone: tzinfo | None) -> float:
    hour, minute, second = int(clock.group(1)), int(clock.group(2)), float(clock.group(3) or 0)
    if hour > 23 or minute > 59 or second >= 60:
        raise ValueError(clock.group(0))
    day = datetime.fromtimestamp(span.first_s, zone).replace(
        hour=0, minute=0, second=0, microsecond=0
    )
    offset = hour * 3600 + minute * 60 + second
    days = int((span.last_s - span.first_s) // 86400) + 2
    times = [(day + timedelta(days=k - 1)).timestamp() + offset for k in range(days + 2)]
    inside = [time for time in times if span.first_s <= time <= span.last_s]
    if inside:
        return inside[0]
    return min(times, key=lambda time: min(abs(time - span.first_s), abs(time - span.last_s)))


def utc(time_s: float, microseconds: bool = False) -> str:
    """A moment as ISO 8601 in UTC; a dash where it is outside the calendar."""
    try:
        moment = datetime.fromtimestamp(time_s, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return "-"
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if microseconds else "%Y-%m-%dT%H:%M:%SZ")


def span_text(seconds: float) -> str:
    """A length of time in two units at most, for example `1h 05m`."""
    whole = round(abs(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def size_text(size: float) -> str:
    """Bytes with a binary unit, for example `9.4 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
