"""When a capture starts by itself: as a finding begins, and seldom."""

from __future__ import annotations

from collections.abc import Iterable

from kvtop.errors import UsageError
from kvtop.model.snapshot import Finding

PAUSE_S = 600.0
"""Least time between two captures."""
KINDS: dict[str, tuple[str, ...]] = {
    "stall": ("health.stalled", "pressure.admission-wedged", "pressure.idle-pool-blocked"),
    "leak": (
        "leak.ghost-blocks",
        "leak.orphan-table",
        "leak.zombie-request",
        "leak.held-past-lease",
        "leak.fence-stuck",
    ),
    "preempt-storm": ("pressure.preemption-storm", "pressure.thrash"),
}
"""Word of `--flame-on` to the rules it means."""


def parse_kinds(text: str) -> frozenset[str]:
    """Rules from `stall,leak`; a full rule name is taken as well.

    Raises:
        UsageError: A word means no rule.
    """
    rules: set[str] = set()
    for word in filter(None, (word.strip() for word in text.split(","))):
        if "." in word:
            rules.add(word)
        elif word in KINDS:
            rules.update(KINDS[word])
        else:
            raise UsageError(f"--flame-on: {word!r} means nothing", "use " + ", ".join(KINDS))
    if not rules:
        raise UsageError("--flame-on: nothing is named", "use " + ", ".join(KINDS))
    return frozenset(rules)


class AutoCapture:
    """Says when a capture is due.

    Args:
        rules: Names of the rules that start one.
        pause_s: Least time between two.
    """

    def __init__(self, rules: Iterable[str], pause_s: float = PAUSE_S) -> None:
        self._rules = frozenset(rules)
        self._pause_s = pause_s
        self._last_s: float | None = None
        self._known: set[tuple[str, int | None, float]] = set()

    def wanted(self, findings: Iterable[Finding], mono_s: float) -> Finding | None:
        """The finding that has just begun and asks for a capture. None: no capture now.

        A finding that begins during the pause gets none later: what it was about is over.

        Args:
            findings: All that hold now.
            mono_s: Monotonic time.
        """
        here = {
            (finding.rule, finding.engine_pid, finding.since_s): finding
            for finding in findings
            if finding.rule in self._rules
        }
        new = [finding for key, finding in here.items() if key not in self._known]
        self._known = set(here)
        if not new:
            return None
        if self._last_s is not None and mono_s - self._last_s < self._pause_s:
            return None
        self._last_s = mono_s
        return new[0]
