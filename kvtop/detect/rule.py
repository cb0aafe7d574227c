"""What a rule is, and what its check hands back."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtop.detect.thresholds import Thresholds, table

if TYPE_CHECKING:
    from kvtop.detect.engine_track import EngineTrack
    from kvtop.detect.gpu_track import GpuTrack
    from kvtop.detect.track import Track

SEVERITIES = ("info", "warning", "critical")
"""From the least to the worst."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The condition of a rule, met at this moment by one subject."""

    summary: str
    """Two plain sentences at most, with the deciding numbers."""
    subject: str = ""
    """What it is about inside the engine: a request id, a pid, a pool. Findings of one rule
    are told apart by it."""
    start: bool = True
    """True: the start condition holds. False: only the weaker one that keeps a finding that is
    already there (hysteresis)."""
    evidence: dict[str, str] = field(default_factory=dict)
    """Numbers and ids, by name."""
    severity: str | None = None
    """None: the rule's own."""
    next_step: str | None = None
    """None: the rule's own."""
    since_s: float | None = None
    """Wall clock at which it began. None: when the condition was first seen."""
    block_ids: tuple[int, ...] = ()
    """Blocks concerned."""
    request_ids: tuple[str, ...] = ()
    """Requests concerned."""


Verdict = tuple[Candidate, ...] | None
"""What holds now: nothing is an empty tuple; None is "cannot be told from this data"."""
EngineCheck = Callable[["Track", "EngineTrack", Thresholds], Verdict]
"""Looks at one engine."""
GpuCheck = Callable[["Track", "GpuTrack", Thresholds], Verdict]
"""Looks at one GPU."""

NOTHING: tuple[Candidate, ...] = ()
"""All is well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing that can be wrong, or worth knowing."""

    name: str
    """`family.what`, for example `leak.ghost-blocks`."""
    severity: str
    """Its usual severity; a candidate may say otherwise."""
    title: str
    """One line for lists."""
    explanation: str
    """What it means, for `kvtop explain`."""
    starts: str
    """When it starts, in words, with the names of its thresholds in braces."""
    clears: str
    """When it ends, in words."""
    next_step: str
    """What to do."""
    disproof: str
    """What would show that it is wrong."""
    needs: str
    """Which data it needs: `probe`, `metrics`, `nvml`, `process table`, or several."""
    thresholds: tuple[str, ...] = ()
    """Names in `Thresholds` that it decides by."""
    for_s: str | None = None
    """Threshold: how long the start condition must hold without a gap. None: at once, the
    check looks at time itself."""
    clear_s: str = "clear_s"
    """Threshold: how long the condition must be away before the finding ends."""
    yields_to: tuple[str, ...] = ()
    """Rules that explain it better: while one of them holds for the same engine, and for five
    minutes after, this one is not shown."""
    engine: EngineCheck | None = None
    """The check, when it looks at engines."""
    gpu: GpuCheck | None = None
    """The check, when it looks at GPUs."""

    @property
    def family(self) -> str:
        """The part of the name before the dot."""
        return self.name.partition(".")[0]


def some(items: Sequence[object], most: int = 12) -> str:
    """The first few of a list in words: `3, 4, 5 and 17 more`."""
    head = ", ".join(str(item) for item in items[:most])
    return head if len(items) <= most else f"{head} and {len(items) - most} more"


def blocks_text(blocks: tuple[int, ...], most: int = 8) -> str:
    """Block ids with runs joined: `3-7, 12 and 40 more`."""
    runs: list[str] = []
    told = 0
    i = 0
    while i < len(blocks) and len(runs) < most:
        # Ids ascend, so a run goes on for as long as they are as far apart as their places.
        j, beyond = i, len(blocks)
        while beyond - j > 1:
            middle = (j + beyond) // 2
            if blocks[middle] - blocks[i] == middle - i:
                j = middle
            else:
                beyond = middle
        runs.append(str(blocks[i]) if i == j else f"{blocks[i]}-{blocks[j]}")
        told += j - i + 1
        i = j + 1
    text = ", ".join(runs)
    return text if told == len(blocks) else f"{text} and {len(blocks) - told} more"


def duration(seconds: float) -> str:
    """`12 s`, `4 min`, `3.2 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def size(count: float) -> str:
    """Bytes in words: `812 kB`, `3.1 GB` (powers of ten)."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def count(number: float, one: str, many: str | None = None) -> str:
    """`1 block`, `3 blocks`."""
    return f"{number:,.0f} {one if number == 1 else many or one + 's'}"


def shown(request_id: str, most: int = 48) -> str:
    """A request id fit for a sentence: it comes from outside and may hold anything."""
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in request_id[:most])
    return text + "..." if len(request_id) > most else text


def in_words(text: str, limits: Thresholds) -> str:
    """A rule's condition with the values of its thresholds in place of their names."""
    units = {threshold.name: threshold.unit for threshold in table()}

    def value(name: str) -> str:
        number, unit = float(getattr(limits, name)), units[name]
        if unit in ("B", "B/s"):
            return size(number) + unit[1:]
        if unit in ("sigma", "ratio", ""):
            return f"{number:g}" + (" sigma" if unit == "sigma" else "")
        return f"{number:g} {unit}"

    return re.sub(r"\{(\w+)\}", lambda match: value(match[1]), text)
