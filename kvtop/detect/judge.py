"""`Judge`: one snapshot in, the findings that hold now out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvtop.detect.diagnosis import diagnose
from kvtop.detect.engine_track import EngineTrack
from kvtop.detect.own import Failures
from kvtop.detect.rule import Verdict
from kvtop.detect.rules import ENGINE_RULES, GPU_RULES
from kvtop.detect.settle import Settler, order
from kvtop.detect.thresholds import DEFAULTS, Thresholds
from kvtop.detect.track import Track
from kvtop.model.snapshot import Finding, Snapshot

_T = TypeVar("_T")


class Judge:
    """Runs every rule over a growing record, live or replayed alike.

    The outcome is a function of the snapshots given so far and of nothing else: no clock, no
    I/O, no randomness. Memory is bounded.

    Args:
        limits: Thresholds, from `apply_overrides`.
    """

    def __init__(self, limits: Thresholds = DEFAULTS) -> None:
        self._limits = limits
        self.track = Track(limits)
        self._engines: dict[str, Settler] = {}
        self._gpus: dict[int, Settler] = {}
        self._failures = Failures()
        self._last_mono_s: float | None = None

    def judge(self, snapshot: Snapshot) -> tuple[Finding, ...]:
        """Take one snapshot and say what holds.

        Returns:
            First the diagnoses, one an engine (rules named `diagnosis.*`), then the
            findings, worst first and oldest first among equals.
        """
        track = self.track
        if self._last_mono_s is not None and snapshot.mono_s < self._last_mono_s:
            self._engines.clear()
            self._gpus.clear()
        self._last_mono_s = snapshot.mono_s
        track.append(snapshot)
        findings: list[Finding] = []
        diagnoses: list[Finding] = []
        for key, engine in track.engines.items():
            settler = self._engines.get(key)
            if settler is None:
                settler = self._engines[key] = Settler(self._limits)
            here = engine.mono_s == track.mono_s
            for rule in ENGINE_RULES:
                if rule.engine is None:
                    continue
                verdict = self._verdict(rule.name, rule.engine, engine) if here else None
                settler.step(rule, verdict, now_s=track.now_s, mono_s=track.mono_s, dt_s=track.dt_s)
            mine = settler.findings(ENGINE_RULES, engine.engine.pid, track.mono_s)
            findings += mine
            if here:
                diagnosis = self._diagnosis(engine, mine)
                if diagnosis is not None:
                    diagnoses.append(diagnosis)
        for index, gpu in track.gpus.items():
            settler = self._gpus.get(index)
            if settler is None:
                settler = self._gpus[index] = Settler(self._limits)
            here = gpu.mono_s == track.mono_s
            for rule in GPU_RULES:
                if rule.gpu is None:
                    continue
                verdict = self._verdict(rule.name, rule.gpu, gpu) if here else None
                settler.step(rule, verdict, now_s=track.now_s, mono_s=track.mono_s, dt_s=track.dt_s)
            findings += settler.findings(GPU_RULES, None, track.mono_s)
        findings += self._failures.findings(track.mono_s, self._limits.clear_s)
        for key in [key for key in self._engines if key not in track.engines]:
            del self._engines[key]
        for index in [index for index in self._gpus if index not in track.gpus]:
            del self._gpus[index]
        return (*diagnoses, *sorted(findings, key=order))

    def _verdict(
        self, name: str, check: Callable[[Track, _T, Thresholds], Verdict], unit: _T
    ) -> Verdict:
        """What a rule says; a rule that fails cannot tell, and takes no other down with it."""
        try:
            return check(self.track, unit, self._limits)
        except Exception as error:
            self._failed(name, error)
            return None

    def _diagnosis(self, engine: EngineTrack, findings: list[Finding]) -> Finding | None:
        try:
            return diagnose(self.track, engine, findings)
        except Exception as error:
            self._failed("diagnosis", error)
            return None

    def _failed(self, name: str, error: Exception) -> None:
        track = self.track
        self._failures.note(name, error, now_s=track.now_s, mono_s=track.mono_s)
