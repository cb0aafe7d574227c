"""Whatever a snapshot holds, judging it raises nothing and says the same twice."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtop.detect import own
from kvtop.detect.judge import Judge
from kvtop.detect.rule import SEVERITIES
from kvtop.model.snapshot import Engine, Finding, Snapshot
from tests.model.strategies import of, snapshots


def later(shot: Snapshot, i: int) -> Snapshot:
    """The same machine `i` seconds on, the probes' cuts with it."""
    time_s, mono_s = 1.7e9 + i, 1000.0 + i

    def cut(engine: Engine) -> Engine:
        if engine.probe is None:
            return engine
        probe = replace(engine.probe, cut_time_s=time_s, step=i * 20)
        return replace(engine, probe=probe)

    return replace(
        shot,
        time_s=time_s,
        mono_s=mono_s,
        sources=tuple(replace(s, value_time_s=time_s) for s in shot.sources),
        engines=tuple(cut(engine) for engine in shot.engines),
    )


def judge(story: list[Snapshot]) -> list[tuple[Finding, ...]]:
    one = Judge()
    told = [one.judge(shot) for shot in story]
    # A rule that raises is caught and named; here none may.
    assert not [f.evidence for findings in told for f in findings if f.rule == own.RULE.name]
    return told


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(snapshots(), st.lists(of(Engine), max_size=2), st.integers(1, 40))
def test_the_same_for_a_minute(shot: Snapshot, engines: list[Engine], length: int) -> None:
    shot = replace(shot, engines=shot.engines + tuple(engines))
    story = [later(shot, i) for i in range(length)]
    told = judge(story)
    assert told == judge(story)
    for finding in (f for findings in told for f in findings):
        assert finding.severity in SEVERITIES
        assert finding.summary
        assert math.isfinite(finding.since_s)
        assert "\n" not in finding.summary
        assert all(c.isprintable() for c in finding.summary)
        assert all(isinstance(v, str) for v in finding.evidence.values())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(snapshots(), max_size=5))
def test_a_wild_sequence(story: list[Snapshot]) -> None:
    assert judge(story) == judge(story)
