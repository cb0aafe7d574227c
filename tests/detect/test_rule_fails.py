"""A rule that raises takes no other down, and is named once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtop.detect import judge as judging
from kvtop.detect import own
from kvtop.detect.judge import Judge
from kvtop.detect.rules import BY_NAME, ENGINE_RULES, GPU_RULES
from kvtop.model.snapshot import Finding
from tests.detect.build import Sim, gpu, names, watch


def broken(monkeypatch: pytest.MonkeyPatch, name: str) -> dict[str, bool]:
    """Let one rule raise while `on`."""
    switch = {"on": True}

    def wrap(check):  # type: ignore[no-untyped-def]
        def failing(*args):  # type: ignore[no-untyped-def]
            if switch["on"]:
                raise ZeroDivisionError("of \x1b[2J a request's\nown")
            return check(*args)

        return failing

    def swapped(rules):  # type: ignore[no-untyped-def]
        return tuple(
            replace(r, engine=r.engine and wrap(r.engine), gpu=r.gpu and wrap(r.gpu))
            if r.name == name
            else r
            for r in rules
        )

    monkeypatch.setattr(judging, "ENGINE_RULES", swapped(ENGINE_RULES))
    monkeypatch.setattr(judging, "GPU_RULES", swapped(GPU_RULES))
    return switch


def failed(findings: tuple[Finding, ...]) -> list[Finding]:
    return [f for f in findings if f.rule == own.RULE.name]


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - {own.RULE.name, "leak.ghost-blocks"}))
def test_a_rule_that_raises_is_named_once_and_the_others_go_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = broken(monkeypatch, name)
    sim, judge = Sim(), Judge()
    sim.gpus = (gpu(50), replace(gpu(50), index=1))
    sim.start("a", blocks=4)
    sim.end_but_lose("a", 2)
    history = watch(sim, judge, 8)
    assert "leak.ghost-blocks" in names(history[-1])
    (finding,) = failed(history[-1])
    assert finding.since_s == failed(history[0])[0].since_s
    assert name in finding.summary
    assert finding.evidence["error"].startswith("ZeroDivisionError")
    assert all(c.isprintable() for c in finding.evidence["error"])
    switch["on"] = False
    assert not failed(watch(sim, judge, 8)[-1])


def test_a_failing_diagnosis_leaves_the_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(judging, "diagnose", failing)
    sim, judge = Sim(), Judge()
    sim.start("a", blocks=4)
    sim.end_but_lose("a", 2)
    history = watch(sim, judge, 8)
    assert {"leak.ghost-blocks", own.RULE.name} <= names(history[-1])
    assert not [f for f in history[-1] if f.rule.startswith("diagnosis.")]


def test_what_was_found_stays_while_its_rule_fails_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switch = broken(monkeypatch, "leak.ghost-blocks")
    switch["on"] = False
    sim, judge = Sim(), Judge()
    sim.start("a", blocks=4)
    sim.end_but_lose("a", 2)
    assert "leak.ghost-blocks" in names(watch(sim, judge, 8)[-1])
    switch["on"] = True
    # It cannot be told now: what was found stays for as long as for any unread source.
    assert "leak.ghost-blocks" in names(watch(sim, judge, 3)[-1])
