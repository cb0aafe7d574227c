"""From conditions to findings: how long before it starts, how long before it ends.

One mechanism for every rule. Time is added up only between two snapshots in which the
condition could be told and held; a gap, a source that failed, a restart add none, so that
nothing ever starts from what was not seen.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtop.detect.rule import SEVERITIES, Candidate, Rule, Verdict
from kvtop.detect.thresholds import Thresholds
from kvtop.model.snapshot import Finding

YIELD_S = 300.0
"""How long after its cause a symptom stays hidden: its window still holds the cause."""


@dataclass(slots=True)
class _State:
    """One rule about one subject."""

    since_s: float
    """Wall clock of the first snapshot in which the start condition held."""
    held_s: float = 0.0
    """Seconds for which it was seen to hold."""
    active: bool = False
    """The finding has started."""
    candidate: Candidate | None = None
    """The newest one."""
    away_s: float = 0.0
    """Seconds for which the condition was seen to be away."""
    unknown_s: float = 0.0
    """Seconds for which it could not be told."""


class Settler:
    """Keeps the state of every rule about every subject of one unit (engine or GPU).

    Args:
        limits: Thresholds.
    """

    def __init__(self, limits: Thresholds) -> None:
        self._limits = limits
        self._states: dict[str, dict[str, _State]] = {}
        self._last_active: dict[str, float] = {}

    def step(
        self, rule: Rule, verdict: Verdict, *, now_s: float, mono_s: float, dt_s: float | None
    ) -> None:
        """Take one rule's verdict of this snapshot.

        Args:
            rule: The rule.
            verdict: What its check says.
            now_s: Wall clock.
            mono_s: Monotonic clock.
            dt_s: Seconds since the last snapshot. None: there is none, or a gap between.
        """
        states = self._states.get(rule.name)
        if not verdict and not states:
            return
        if states is None:
            states = self._states[rule.name] = {}
        if verdict is None:
            self._unknown(states, dt_s)
        else:
            here = {candidate.subject for candidate in verdict}
            for candidate in verdict:
                self._holds(rule, states, candidate, now_s, dt_s)
            for subject in [subject for subject in states if subject not in here]:
                self._away(rule, states, subject, dt_s)
        if any(state.active for state in states.values()):
            self._last_active[rule.name] = mono_s
        if not states:
            del self._states[rule.name]

    def _limit(self, name: str | None) -> float:
        return 0.0 if name is None else float(getattr(self._limits, name))

    def _holds(
        self,
        rule: Rule,
        states: dict[str, _State],
        candidate: Candidate,
        now_s: float,
        dt_s: float | None,
    ) -> None:
        subject = candidate.subject
        state = states.get(subject)
        if state is None or (dt_s is None and not state.active):
            if not candidate.start:
                states.pop(subject, None)
                return
            state = states[subject] = _State(since_s=now_s)
        elif not state.active:
            if not candidate.start:
                del states[subject]
                return
            state.held_s += dt_s or 0.0 if state.unknown_s == 0.0 else 0.0
        state.candidate = candidate
        state.away_s = state.unknown_s = 0.0
        if not state.active and state.held_s >= self._limit(rule.for_s) - 1e-6:
            state.active = True

    def _away(
        self, rule: Rule, states: dict[str, _State], subject: str, dt_s: float | None
    ) -> None:
        state = states[subject]
        if not state.active:
            del states[subject]
            return
        state.away_s += dt_s or 0.0
        state.unknown_s = 0.0
        if state.away_s >= self._limit(rule.clear_s) - 1e-6:
            del states[subject]

    def _unknown(self, states: dict[str, _State], dt_s: float | None) -> None:
        for subject, state in list(states.items()):
            # At least a trace, so that the next snapshot adds no time across the hole.
            state.unknown_s += max(dt_s or 0.0, 1e-9)
            hole = not state.active and dt_s is None
            if hole or state.unknown_s >= self._limits.unknown_s:
                del states[subject]

    def findings(
        self, rules: tuple[Rule, ...], engine_pid: int | None, mono_s: float
    ) -> list[Finding]:
        """What holds now, symptoms of another finding left out."""
        found: list[Finding] = []
        for rule in rules:
            states = self._states.get(rule.name)
            if not states:
                continue
            if any(
                mono_s - self._last_active[cause] <= YIELD_S
                for cause in rule.yields_to
                if cause in self._last_active
            ):
                continue
            found.extend(
                _finding(rule, state, state.candidate, engine_pid)
                for state in states.values()
                if state.active and state.candidate is not None
            )
        return found


def _finding(rule: Rule, state: _State, candidate: Candidate, engine_pid: int | None) -> Finding:
    since_s = state.since_s if candidate.since_s is None else candidate.since_s
    return Finding(
        rule=rule.name,
        severity=candidate.severity or rule.severity,
        since_s=since_s,
        engine_pid=engine_pid,
        summary=candidate.summary,
        evidence=candidate.evidence,
        next_step=rule.next_step if candidate.next_step is None else candidate.next_step,
        disproof=rule.disproof,
        block_ids=candidate.block_ids,
        request_ids=candidate.request_ids,
    )


def order(finding: Finding) -> tuple[int, float, str]:
    """Sort key: worst first, then longest."""
    return (-SEVERITIES.index(finding.severity), finding.since_s, finding.rule)
