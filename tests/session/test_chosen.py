"""Which block tables a recording asks for."""

from __future__ import annotations

import dataclasses

from kvtop.model.snapshot import Finding, Phase, Snapshot
from kvtop.session.chosen import EVERY_S, FEW, MOST, Chooser
from tests.session.common import small


def changed(shot: Snapshot, **by_index: dict[str, object]) -> Snapshot:
    """A snapshot with fields of some requests replaced; keys are `r0`, `r1`, ..."""
    (engine,) = shot.engines
    rows = list(engine.requests or ())
    for name, fields in by_index.items():
        at = int(name[1:])
        rows[at] = dataclasses.replace(rows[at], **fields)  # type: ignore[arg-type]
    return dataclasses.replace(shot, engines=(dataclasses.replace(engine, requests=tuple(rows)),))


def ids(shot: Snapshot) -> list[str]:
    return [request.id for request in shot.engines[0].requests or ()]


def test_the_largest_and_the_oldest_twice_a_minute() -> None:
    churn, chooser = small(blocks=900, requests=24), Chooser()
    for _ in range(20):
        shot = churn.tick()
    rows = shot.engines[0].requests or ()
    largest = max(rows, key=lambda request: request.blocks or 0).id
    oldest = max((r for r in rows if r.blocks), key=lambda request: request.age_s or 0).id
    first = [name for _, name in chooser.wanted(shot)]
    assert first == list(dict.fromkeys((largest, oldest)))
    asked = [bool(chooser.wanted(churn.tick())) for _ in range(2 * int(EVERY_S) + 3)]
    assert sum(asked) == 2


def test_held_and_named_ones_come_first_and_a_new_finding_at_once() -> None:
    churn, chooser = small(blocks=900, requests=24), Chooser()
    for _ in range(20):
        shot = churn.tick()
    chooser.wanted(shot)
    shot = changed(
        churn.tick(),
        r2={"phase": Phase.HELD, "held_s": 3.0, "blocks": 2},
        r3={"client": "gone", "client_gone_s": 99.0, "blocks": 2},
        r4={"blocks": 0},
    )
    names = ids(shot)
    assert chooser.wanted(shot) == []
    finding = Finding(
        *("leak.zombie-request", "warning", 1.0, churn.pid, "s"),
        request_ids=(names[5], names[4], "unknown"),
    )
    told = [name for _, name in chooser.wanted(shot, [finding])]
    assert told[:3] == [names[5], names[3], names[2]]
    assert names[4] not in told
    assert len(told) <= MOST
    assert chooser.wanted(shot, [finding]) == []
    info = dataclasses.replace(finding, rule="x", severity="info")
    assert chooser.wanted(shot, [finding, info]) == []


def test_nobody_is_asked_without_a_probe_or_a_process() -> None:
    shot = small().tick()
    (engine,) = shot.engines
    for dead in (dataclasses.replace(engine, probe=None), dataclasses.replace(engine, alive=False)):
        assert Chooser().wanted(dataclasses.replace(shot, engines=(dead,))) == []
    assert Chooser().wanted(dataclasses.replace(shot, engines=())) == []
    none = dataclasses.replace(engine, requests=None)
    assert Chooser().wanted(dataclasses.replace(shot, engines=(none,))) == []


def test_the_first_one_who_holds_blocks_is_not_waited_for() -> None:
    churn, chooser = small(blocks=900, requests=24), Chooser()
    shot = churn.tick()
    (engine,) = shot.engines
    empty = dataclasses.replace(engine, requests=())
    assert chooser.wanted(dataclasses.replace(shot, engines=(empty,))) == []
    assert chooser.wanted(churn.tick()) != []
    assert chooser.wanted(churn.tick()) == []


def test_of_a_small_engine_all_are_kept() -> None:
    churn = small(requests=FEW)
    for _ in range(20):
        shot = churn.tick()
    holding = {r.id for r in shot.engines[0].requests or () if r.blocks}
    assert len(holding) > MOST
    assert {name for _, name in Chooser().wanted(shot)} == holding
    large = changed(shot, r0={"blocks": 1_000})
    assert len(Chooser().wanted(large)) <= MOST
