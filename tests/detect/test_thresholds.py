"""The table of thresholds, its overrides, and the documentation made from it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvtop.commands import explain, findings
from kvtop.detect import own
from kvtop.detect.diagnosis import NAMES, STUCK, TOO_LITTLE
from kvtop.detect.judge import Judge
from kvtop.detect.rule import SEVERITIES
from kvtop.detect.rules import ALL_RULES, BY_NAME
from kvtop.detect.thresholds import DEFAULTS, Thresholds, apply_overrides, table
from kvtop.errors import NotFoundError, UsageError
from tests.detect.build import Sim, first, watch


def test_every_threshold_is_within_its_own_bounds_and_documented() -> None:
    for threshold in table():
        assert threshold.low <= threshold.default <= threshold.high, threshold.name
        assert threshold.meaning


def test_overrides_change_what_a_rule_decides() -> None:
    sim, judge = Sim(), Judge(apply_overrides({"ghost_idle_samples": 3}))
    sim.start("a", blocks=4)
    sim.end_but_lose("a", 2)
    assert first(watch(sim, judge, 6), "leak.ghost-blocks") == 2


def test_no_overrides_are_the_defaults() -> None:
    assert apply_overrides({}) == DEFAULTS == Thresholds()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"ghost_idle_sample": 3}, "did you mean 'ghost_idle_samples'"),
        ({"no such thing": 3}, "no threshold is named"),
        ({"kv_full_percent": "95"}, "is not a number"),
        ({"kv_full_percent": True}, "is not a number"),
        ({"kv_full_percent": float("nan")}, "is not a number"),
        ({"kv_full_percent": 0.95}, "from 50 to 100 %"),
        ({"kv_full_percent": 80}, "kv_full_clear_percent is above kv_full_percent"),
        ({7: 3}, "no threshold is named"),
    ],
)
def test_wrong_overrides_are_usage_errors(overrides: dict, says: str) -> None:
    with pytest.raises(UsageError) as error:
        apply_overrides(overrides)
    assert says in error.value.line()


def test_every_rule_is_complete_and_names_only_thresholds_that_exist() -> None:
    known = {threshold.name for threshold in table()}
    assert len(BY_NAME) == len(ALL_RULES)
    for rule in ALL_RULES:
        assert rule.severity in SEVERITIES
        checks = (rule.engine is not None) + (rule.gpu is not None)
        assert checks == (0 if rule is own.RULE else 1)
        for text in (
            rule.title,
            rule.explanation,
            rule.starts,
            rule.clears,
            rule.next_step,
            rule.disproof,
            rule.needs,
        ):
            assert text, rule.name
        named = set(re.findall(r"\{(\w+)\}", rule.starts + rule.clears))
        assert named <= known, rule.name
        assert named - {"clear_s"} <= set(rule.thresholds), rule.name
        assert set(rule.thresholds) <= known, rule.name
        assert rule.clear_s in known
        assert rule.for_s is None or rule.for_s in known
        assert set(rule.yields_to) <= BY_NAME.keys()
    assert {*STUCK, *TOO_LITTLE} <= BY_NAME.keys()


def test_every_threshold_is_used_by_a_rule_or_by_the_record() -> None:
    used = {name for rule in ALL_RULES for name in rule.thresholds}
    assert {t.name for t in table()} - used == {"gap_s", "stale_s", "clear_s", "unknown_s"}


@pytest.fixture(autouse=True)
def own_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text("[findings]\nghost_idle_samples = 9\n")
    monkeypatch.setenv("KVTOP_CONFIG", str(path))
    return path


def run(command: object, *words: str) -> int:
    import argparse

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)  # type: ignore[attr-defined]
    code: int = command.run(parser.parse_args(words))  # type: ignore[attr-defined]
    return code


def test_findings_lists_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(findings) == 0
    out = capsys.readouterr().out
    assert all(f"{rule.name} " in out and rule.title in out for rule in ALL_RULES)


def test_findings_lists_thresholds_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    run(findings, "--thresholds")
    out = capsys.readouterr().out
    assert re.search(r"ghost_idle_samples +9 readings.*\(default 5\)", out)
    run(findings, "--thresholds", "--json")
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["ghost_idle_samples"]["value"] == 9
    run(findings, "--json")
    assert len(json.loads(capsys.readouterr().out)) == len(ALL_RULES)


@pytest.mark.parametrize("name", [*BY_NAME, *NAMES, "ghost-blocks"])
def test_every_name_can_be_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(explain, name) == 0
    out = capsys.readouterr().out
    assert name in out
    assert "{" not in out
    assert max(len(line) for line in out.splitlines()) <= 120


def test_an_explanation_shows_the_number_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    run(explain, "leak.ghost-blocks")
    assert "9 readings" in capsys.readouterr().out


def test_an_unknown_rule_is_one_plain_line() -> None:
    with pytest.raises(NotFoundError) as error:
        run(explain, "leak.ghost-block")
    assert "did you mean 'leak.ghost-blocks'" in error.value.line()


def test_a_wrong_configuration_stops_the_command(own_config: Path) -> None:
    own_config.write_text("[findings]\nnonsense = 1\n")
    with pytest.raises(UsageError):
        run(findings)
