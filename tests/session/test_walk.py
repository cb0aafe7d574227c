"""Findings and charts at any tick are those of an unbroken look at what came before."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtop.detect.judge import Judge
from kvtop.model.history import History, engine_key
from kvtop.model.snapshot import Finding, Snapshot
from kvtop.session.walk import Scan, Walk
from tests.session.common import recorded


class Counting:
    """Finds something in every third snapshot that it is given."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, snapshot: Snapshot) -> tuple[Finding, ...]:
        self.seen.append(snapshot.time_s)
        third = len(self.seen) % 3 == 0
        fine = Finding("diagnosis.memory-fine", "info", 0.0, 1, "All is well.")
        return (fine, Finding("leak.x", "warning", 0.0, 1, "It leaks.")) if third else (fine,)


@pytest.fixture
def session(tmp_path: Path) -> tuple[Path, list[Snapshot]]:
    path = tmp_path / "a.kvtop"
    return path, recorded(path, 120)


def go(walk: Walk, tick: int) -> list[int]:
    return list(walk.to(tick))


def test_it_walks_from_what_came_before(session: tuple[Path, list[Snapshot]]) -> None:
    path, live = session
    judges: list[Counting] = []

    def make() -> Counting:
        judges.append(Counting())
        return judges[-1]

    walk = Walk(path, make, back_s=30.0)
    assert go(walk, 100)[-1] == walk.tick == 100
    assert judges[-1].seen[-1] == pytest.approx(live[99].time_s)
    assert judges[-1].seen[0] == pytest.approx(live[99].time_s - 30.0, abs=1.5)
    made = len(judges)
    assert go(walk, 100) == []
    assert go(walk, 103) == [101, 102, 103]
    assert len(judges) == made
    go(walk, 50)
    assert len(judges) == made + 1
    assert len(walk.history) == len(judges[-1].seen) == len(judges[-1].seen)
    assert judges[-1].seen[-1] == pytest.approx(live[49].time_s)
    walk.close()


def test_it_stays_inside_the_file(session: tuple[Path, list[Snapshot]]) -> None:
    walk = Walk(session[0], Counting, back_s=5.0)
    assert go(walk, 10_000)[-1] == 120
    assert go(walk, -5) == [1]
    walk.close()


def test_charts_and_findings_are_those_of_the_live_screen(
    session: tuple[Path, list[Snapshot]],
) -> None:
    path, live = session
    walk = Walk(path, lambda: Judge().judge)
    go(walk, 90)
    judge, history = Judge(), History()
    for snapshot in live[:90]:
        history.append(snapshot)
        findings = judge.judge(snapshot)
    assert walk.findings == findings
    key = engine_key(live[0].engines[0])
    assert walk.history.series(key, "used")[1] == history.series(key, "used")[1]
    walk.close()


def test_a_scan_tells_when_each_finding_began(session: tuple[Path, list[Snapshot]]) -> None:
    path, live = session
    scan = Scan(path, Counting)
    while scan.step():
        pass
    assert scan.tick == 120
    assert [event.tick for event, _ in scan.events] == list(range(3, 121, 3))
    assert scan.share == 1.0
    event, severity = scan.events[0]
    assert (event.kind, severity) == ("finding", "warning")
    assert event.time_s == pytest.approx(live[2].time_s)
    assert event.text == "warning leak.x: It leaks."
    scan.close()


def test_a_long_file_is_looked_over_first(session: tuple[Path, list[Snapshot]]) -> None:
    path, _ = session
    scan = Scan(path, Counting, rough_ticks=40)
    assert scan.looking_over
    for _ in range(20):
        assert scan.step()
    assert 0.4 < scan.share < 0.6
    while scan.looking_over:
        assert scan.step()
    assert scan.share == 1.0
    assert scan.tick < 1
    # Every third judged tick begins one, and every third tick was judged.
    rough = [event.tick for event, _ in scan.events]
    assert rough == list(range(7, 121, 9))
    before = scan.version
    for _ in range(12):
        assert scan.step()
    assert scan.version != before
    assert [event.tick for event, _ in scan.events] == [
        *range(3, 13, 3),
        *(tick for tick in rough if tick > 12),
    ]
    while scan.step():
        pass
    assert [event.tick for event, _ in scan.events] == list(range(3, 121, 3))
    scan.close()
