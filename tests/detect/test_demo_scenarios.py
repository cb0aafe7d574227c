"""The demo's simulated engine, judged in simulated time: each story its own rule and no other."""

from __future__ import annotations

import pytest

from kvtop.demo.clock import FreeClock
from kvtop.demo.engine import EngineCore
from kvtop.demo.scenario import SCENARIOS
from kvtop.detect.judge import Judge
from kvtop.model.snapshot import Finding
from tests.demo.observer import Observer

PRESSURE = {"pressure.kv-full", "pressure.alloc-failures", "pressure.preemption-storm"}
OWN = {
    "healthy": set(),
    "leak": {"leak.ghost-blocks"},
    "preempt-storm": PRESSURE,
    "disconnect": {"leak.zombie-request"},
    "wedge": {"pressure.admission-wedged"},
}
"""Rules above info that each scenario is for."""
DIAGNOSES = {
    "healthy": "diagnosis.memory-fine",
    "leak": "diagnosis.memory-held-badly",
    "preempt-storm": "diagnosis.too-little-memory",
    "disconnect": "diagnosis.memory-held-badly",
    "wedge": "diagnosis.engine-stuck",
}


def judged(scenario: str, seed: int, seconds: int, blocks: int | None = None) -> list[tuple]:
    """A look a second."""
    engine = EngineCore(SCENARIOS[scenario], seed, blocks, FreeClock())
    observer, judge = Observer(engine), Judge()
    out: list[tuple[Finding, ...]] = []
    for _ in range(seconds):
        engine.run_steps(1.0)
        out.append(judge.judge(observer.snapshot()))
    observer.close()
    return out


def loud(history: list[tuple]) -> set[str]:
    return {
        f.rule
        for findings in history
        for f in findings
        if f.severity != "info" and "diagnosis" not in f.rule
    }


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_engine_has_no_warning(seed: int) -> None:
    assert loud(judged("healthy", seed, 90, 4096)) == set()


@pytest.mark.parametrize("scenario", OWN)
def test_each_scenario_has_its_own_findings_and_no_other(scenario: str) -> None:
    history = judged(scenario, 1, 150)
    assert loud(history) == OWN[scenario]
    assert history[-1][0].rule == DIAGNOSES[scenario]


def test_the_scenarios_are_all_judged() -> None:
    assert set(OWN) == set(SCENARIOS)
