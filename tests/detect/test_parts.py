"""The parts that rules are made of, each against a plain way of doing the same."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvtop.detect.rule import (
    Candidate,
    Rule,
    blocks_text,
    count,
    duration,
    in_words,
    shown,
    size,
    some,
)
from kvtop.detect.series import Buckets, CounterLog, steady_growth, trend
from kvtop.detect.settle import Settler
from kvtop.detect.thresholds import DEFAULTS
from kvtop.detect.watch import BlockWatch, both, positions, xor

MASKS = st.lists(st.integers(0, 1), min_size=1, max_size=40).map(bytes)


@given(st.lists(st.lists(st.integers(0, 1), min_size=12, max_size=12).map(bytes), max_size=30))
def test_watch_follows_each_block_like_a_table_of_first_times(masks: list[bytes]) -> None:
    watch = BlockWatch()
    first: dict[int, int] = {}
    for now, mask in enumerate(masks):
        watch.update(mask, time_s=100.0 + now, mono_s=float(now), step=now * 10, idle=True)
        for block in range(12):
            if not mask[block]:
                first.pop(block, None)
            else:
                first.setdefault(block, now)
        settled = watch.settled(mono_s=float(now), step=now * 10, for_s=3.0, steps=0)
        want = tuple(block for block in range(12) if block in first and now - first[block] >= 3)
        assert (settled.blocks if settled else ()) == want
        if settled:
            assert settled.since_s == 100.0 + min(first[block] for block in want)


def test_watch_is_bounded_and_never_early() -> None:
    watch = BlockWatch()
    mask = bytearray(4096)
    for now in range(300):
        mask[now] = 1
        watch.update(bytes(mask), time_s=0.0, mono_s=float(now), step=now, idle=False)
    assert len(watch.cohorts) <= 64
    settled = watch.settled(mono_s=299.0, step=299, for_s=100.0, steps=0)
    assert settled is not None
    assert max(settled.blocks) <= 199


def test_watch_begins_anew_when_the_pool_changes_its_size() -> None:
    watch = BlockWatch()
    watch.update(b"\1\1", time_s=0.0, mono_s=0.0, step=0, idle=True)
    watch.update(b"\1\1\1", time_s=9.0, mono_s=9.0, step=0, idle=True)
    assert [c.mono_s for c in watch.cohorts] == [9.0]


@given(MASKS, MASKS)
def test_byte_operations(a: bytes, b: bytes) -> None:
    a, b = a[: len(b)], b[: len(a)]
    assert xor(a, b) == bytes(x ^ y for x, y in zip(a, b, strict=True))
    assert both(a, b) == bytes(x & y for x, y in zip(a, b, strict=True))
    assert positions(a) == [i for i, x in enumerate(a) if x]


@given(st.sets(st.integers(0, 60)))
def test_block_ids_in_words_name_every_run(ids: set[int]) -> None:
    told: set[int] = set()
    text = blocks_text(tuple(sorted(ids)), most=100)
    for part in text.split(", ") if text else []:
        low, _, high = part.partition("-")
        told |= set(range(int(low), int(high or low) + 1))
    assert told == ids


def test_block_ids_in_words_are_cut() -> None:
    assert blocks_text((1, 2, 3, 7, 9, 11), most=2) == "1-3, 7 and 2 more"


def test_words() -> None:
    assert some([1, 2, 3], most=2) == "1, 2 and 1 more"
    assert [duration(s) for s in (5, 300, 9000)] == ["5 s", "5 min", "2.5 h"]
    assert [size(b) for b in (10, 5e6, 2.5e9)] == ["10 B", "5 MB", "2.5 GB"]
    assert [count(n, "block") for n in (1, 2)] == ["1 block", "2 blocks"]
    assert shown("a\x1b[2J\n" + "x" * 90) == "a\\x1b[2J\\x0a" + "x" * 42 + "..."
    assert in_words("{kv_full_percent} for {kv_full_s}", DEFAULTS) == "95 % for 10 s"


def test_counters_are_never_compared_over_more_than_the_width_nor_over_a_reset() -> None:
    log = CounterLog(300.0)
    for i in range(1000):
        log.append(float(i), (float(i), None))
    assert log.delta(0, 30.0) == 30.0
    assert log.delta(1, 30.0) is None
    log.append(1000.0, (3.0, None))
    assert log.delta(0, 30.0) is None
    log.append(1001.0, (5.0, None))
    assert log.delta(0, 30.0) == 2.0
    log.append(1500.0, (9.0, None))
    assert log.delta(0, 30.0) is None


def test_trends_are_robust_against_single_points() -> None:
    level = [(float(i), 100.0) for i in range(12)]
    level[5] = (5.0, 0.0)
    found = trend(level)
    assert found is not None
    assert found.slope_s == 0
    assert abs(found.sigma) < 1.5
    falling = trend([(float(i), 100.0 - i) for i in range(8)])
    assert falling is not None
    assert falling.slope_s == -1.0
    assert falling.sigma < -3
    assert trend([(0.0, 1.0)] * 3) is None
    assert trend([(0.0, 1.0)] * 9) is None


def test_a_random_walk_is_rarely_steady_growth_and_a_leak_always() -> None:
    rng = random.Random(7)
    walks = leaks = 0
    for _ in range(400):
        walk, leak, at = [], [], 0.0
        for i in range(24):
            at += rng.gauss(0.0, 1.0)
            walk.append((float(i), at))
            leak.append((float(i), i + rng.gauss(0.0, 0.3)))
        walks += steady_growth(walk) is not None
        leaks += steady_growth(leak) is not None
    assert walks == 0
    assert leaks == 400


def test_buckets_keep_the_least_of_each_complete_piece() -> None:
    buckets = Buckets(10.0, 3)
    for i in range(45):
        buckets.append(float(i), float(i % 7) + i)
    assert [start for start, _ in buckets.lows()] == [20.0, 30.0]
    assert buckets.lows()[0][1] == min(i % 7 + i for i in range(20, 30))


def rule(**fields: object) -> Rule:
    words = dict.fromkeys(
        ("title", "explanation", "starts", "clears", "next_step", "disproof", "needs"), "x"
    )
    return Rule(name="a.b", severity="warning", **{**words, **fields})  # type: ignore[arg-type]


def active(settler: Settler, *rules: Rule, mono_s: float) -> list[str]:
    return [f.rule for f in settler.findings(rules, None, mono_s)]


def test_time_is_added_only_between_looks_that_saw_the_condition() -> None:
    slow = rule(for_s="kv_full_s")  # 10 s
    settler = Settler(DEFAULTS)
    here, now = (Candidate("x"),), 0.0
    story = [here] * 8 + [None] + [here] * 20
    started = None
    for i, verdict in enumerate(story):
        now += 1.0
        settler.step(slow, verdict, now_s=now, mono_s=now, dt_s=1.0 if i else None)
        if started is None and active(settler, slow, mono_s=now):
            started = i
    # Seven seconds before the hole; the look after it adds none.
    assert started == 12


def test_a_weaker_condition_keeps_a_finding_and_does_not_start_one() -> None:
    settler = Settler(DEFAULTS)
    plain = rule()
    weak, strong = (Candidate("x", start=False),), (Candidate("x"),)
    settler.step(plain, weak, now_s=0.0, mono_s=0.0, dt_s=None)
    assert not active(settler, plain, mono_s=0.0)
    settler.step(plain, strong, now_s=1.0, mono_s=1.0, dt_s=1.0)
    for now in range(2, 100):
        settler.step(plain, weak, now_s=now, mono_s=now, dt_s=1.0)
        assert active(settler, plain, mono_s=now)


def test_a_symptom_stays_hidden_while_its_cause_holds_and_for_a_while_after() -> None:
    settler = Settler(DEFAULTS)
    cause = rule()
    symptom = Rule(**{**_fields(rule()), "name": "c.d", "yields_to": ("a.b",)})
    here = (Candidate("x"),)
    for now in range(400):
        there = here if now < 50 else ()
        settler.step(cause, there, now_s=now, mono_s=now, dt_s=1.0)
        settler.step(symptom, here, now_s=now, mono_s=now, dt_s=1.0)
        shown_rules = active(settler, cause, symptom, mono_s=now)
        assert ("c.d" in shown_rules) == (now > 50 + 3 + 300)


def _fields(one: Rule) -> dict:
    return {name: getattr(one, name) for name in Rule.__dataclass_fields__}
