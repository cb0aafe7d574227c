"""When a rule itself fails: it is named, and all others go on."""

from __future__ import annotations

from kvtop.detect.rule import Rule, shown
from kvtop.model.snapshot import Finding

RULE = Rule(
    name="kvtop.rule-failed",
    severity="warning",
    title="A rule of kvtop itself has failed",
    explanation="A rule met something that it was not written for. What it looks for is not "
    "found while that lasts; all other rules go on, and nothing is wrong with the engine for this.",
    starts="a rule raises an error",
    clears="it raises none for {clear_s}",
    next_step="Record a session (key R) and report it with that file.",
    disproof="None: it is a fault of kvtop's own.",
    needs="nothing",
)
"""Documentation only: no check belongs to it."""


class Failures:
    """Rules that have failed lately, each named once however many engines it looked at."""

    def __init__(self) -> None:
        self._failed: dict[str, tuple[float, float, str]] = {}

    def note(self, rule: str, error: Exception, *, now_s: float, mono_s: float) -> None:
        """A rule has raised."""
        first_s = self._failed[rule][0] if rule in self._failed else now_s
        # The message can hold text from outside.
        text = shown(f"{type(error).__name__}: {error}", 160)
        self._failed[rule] = (first_s, mono_s, text)

    def findings(self, mono_s: float, clear_s: float) -> list[Finding]:
        """One finding a rule that has failed within the last `clear_s` seconds."""
        for rule in [r for r, (_, at, _) in self._failed.items() if mono_s - at > clear_s]:
            del self._failed[rule]
        return [
            Finding(
                rule=RULE.name,
                severity=RULE.severity,
                since_s=first_s,
                engine_pid=None,
                summary=f"The rule {rule} has failed, a fault of kvtop's own. "
                "What it looks for would not be found now; the others go on.",
                evidence={"rule": rule, "error": text},
                next_step=RULE.next_step,
                disproof=RULE.disproof,
            )
            for rule, (first_s, _, text) in self._failed.items()
        ]
