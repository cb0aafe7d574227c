from __future__ import annotations

import pytest

from kvtop.detect.rules import BY_NAME
from kvtop.errors import UsageError
from kvtop.flame.auto import KINDS, AutoCapture, parse_kinds
from kvtop.model.snapshot import Finding


def finding(rule: str, since_s: float = 0.0, pid: int = 7) -> Finding:
    return Finding(rule, "critical", since_s, pid, "s")


def test_every_word_means_rules_that_exist() -> None:
    assert set(KINDS) == {"stall", "leak", "preempt-storm"}
    assert {rule for rules in KINDS.values() for rule in rules} <= set(BY_NAME)


def test_words_become_rules() -> None:
    assert parse_kinds("stall, leak") == frozenset(KINDS["stall"] + KINDS["leak"])
    assert parse_kinds("pressure.hog") == {"pressure.hog"}
    for text in ("", ",", "bogus", "stall,bogus"):
        with pytest.raises(UsageError, match="--flame-on"):
            parse_kinds(text)


def test_one_capture_as_a_finding_starts_and_no_more_for_ten_minutes() -> None:
    auto = AutoCapture(parse_kinds("leak,preempt-storm"))
    ghost, storm = finding("leak.ghost-blocks", 10.0), finding("pressure.preemption-storm", 20.0)
    assert auto.wanted((), 0.0) is None
    assert auto.wanted((finding("pressure.hog"),), 1.0) is None
    assert auto.wanted((ghost,), 2.0) is ghost
    # It goes on, and another one starts.
    assert auto.wanted((ghost,), 3.0) is None
    assert auto.wanted((ghost, storm), 4.0) is None
    # It still goes on when the pause is over: it did not start now.
    assert auto.wanted((ghost, storm), 700.0) is None
    assert auto.wanted((), 701.0) is None
    again = finding("leak.ghost-blocks", 702.0)
    assert auto.wanted((again,), 702.0) is again


def test_the_same_rule_on_another_engine_is_another_start() -> None:
    auto = AutoCapture(parse_kinds("leak"), pause_s=1.0)
    one, two = finding("leak.orphan-table", 1.0, 7), finding("leak.orphan-table", 1.0, 8)
    assert auto.wanted((one,), 0.0) is one
    assert auto.wanted((one, two), 5.0) is two
