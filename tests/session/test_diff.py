from __future__ import annotations

import dataclasses

from kvtop.session.diff import difference
from tests.session.common import small


def test_the_same_moment_has_no_difference() -> None:
    snapshot = small().tick()
    assert difference(snapshot, snapshot) == []


def test_numbers_that_moved() -> None:
    churn = small()
    before = churn.tick()
    for _ in range(20):
        after = churn.tick()
    changes = {(c.subject, c.name): c for c in difference(before, after)}
    steps = changes["engine 0", "steps"]
    old, new = before.engines[0].counters, after.engines[0].counters
    assert old is not None
    assert new is not None
    assert steps.change == (new.steps or 0) - (old.steps or 0)
    assert ("engine 0", "blocks_total") not in changes
    assert all(c.before != c.after for c in changes.values())


def test_requests_that_came_and_went() -> None:
    churn = small()
    before = churn.tick()
    for _ in range(30):
        after = churn.tick()
    was = {r.id: r.blocks for r in before.engines[0].requests or ()}
    now = {r.id: r.blocks for r in after.engines[0].requests or ()}
    for change in difference(before, after):
        if change.subject.startswith("request "):
            name = change.subject.removeprefix("request ")
            assert (change.before, change.after) == (was.get(name), now.get(name))


def test_counters_of_another_process_are_not_compared() -> None:
    churn = small()
    before = churn.tick()
    churn.pid += 1
    after = churn.tick()
    names = {c.name for c in difference(before, after) if c.subject == "engine 0"}
    assert "steps" not in names
    assert "generation_tokens_total" in names


def test_what_is_unknown_has_no_change() -> None:
    churn = small()
    before, after = churn.tick(), churn.tick()
    gone = dataclasses.replace(after, engines=())
    changes = [c for c in difference(before, gone) if c.name == "blocks_used"]
    assert changes[0].after is None
    assert changes[0].change is None
