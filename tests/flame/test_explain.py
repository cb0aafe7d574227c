from __future__ import annotations

import pytest

from kvtop.flame.explain import balance, key_of, sites, split, table, wanted
from kvtop.flame.folded import parse
from kvtop.model.snapshot import Finding

MARKS = 'process 7:"x";thread (7): Main;'
CORE = "vllm/v1/core"
STEP = f"{MARKS}EngineCore.step (vllm/v1/engine/core.py:4);"
SLOTS = f"KVCacheManager.allocate_slots ({CORE}/kv_cache_manager.py:9)"
SCHEDULE = f"{STEP}Scheduler.schedule ({CORE}/sched/scheduler.py:5)"
ABORT = f"{STEP}EngineCore.abort_requests (vllm/v1/engine/core.py:7)"
FOLDED = parse(
    f"""\
{SCHEDULE};{SLOTS} 2
{SCHEDULE};{SLOTS};popleft_n ({CORE}/kv_cache_utils.py:1) 10
{ABORT};finish_requests ({CORE}/sched/scheduler.py:8) 4
{STEP}other (x.py:1) 4
"""
)
GHOST = Finding(
    "leak.ghost-blocks",
    "critical",
    100.0,
    7,
    "12 blocks have no owner.",
    next_step="restart",
    block_ids=tuple(range(12)),
    request_ids=("req-\x1b[1m", "req-2"),
)


def test_only_leaks_are_explained() -> None:
    other = Finding("pressure.hog", "info", 1.0, 7, "s")
    assert wanted((other, GHOST)) == [GHOST]


def test_shares_add_up() -> None:
    shares = split(FOLDED)
    assert shares == {"allocate": 60.0, "abort": 20.0, "other": 20.0}


def test_sites_are_the_outermost_frames_with_their_callers() -> None:
    first, second = sites(FOLDED)
    assert (first.category, first.count) == ("allocate", 12)
    assert first.label.startswith("KVCacheManager.allocate_slots")
    assert first.callers == ("Scheduler.schedule", "EngineCore.step")
    assert (second.category, second.count) == ("abort", 4)


def test_the_table_puts_findings_beside_what_the_code_does() -> None:
    rates = {"allocated": 100.0, "freed": 40.0, "touched": 10.0, "evicted": None}
    text = "\n".join(table([GHOST], split(FOLDED), sites(FOLDED), rates, 20, 220.0))
    for part in (
        "critical leak.ghost-blocks engine 7, for 2 min",
        "req-2",
        "0, 1, 2, 3, 4, 5 and 6 more",
        "allocated 100.0   freed 40.0   touched 10.0   evicted -",
        "allocate    60.0%",
        "free       none seen",
        "< Scheduler.schedule < EngineCore.step",
        "70.0 blocks a second more are taken than given back.",
    ):
        assert part in text


def test_a_leak_that_is_over_is_told_as_such() -> None:
    over = {key_of(GHOST): 160.0}
    text = "\n".join(table([GHOST], {}, [], {}, 0, 220.0, until_s=over))
    assert "leak.ghost-blocks engine 7, for 1 min; over since 1 min" in text


def test_what_is_not_known_is_said() -> None:
    text = "\n".join(table([], {}, [], {}, 0, 0.0))
    assert "No ghost, zombie or other leak was found." in text
    assert "allocated -   freed -" in text
    assert "nothing was sampled" in text
    assert "none seen" not in text


@pytest.mark.parametrize(
    ("rates", "text"),
    [
        ({}, ""),
        ({"allocated": 5.0, "freed": None}, ""),
        ({"allocated": 0.0, "freed": 0.0}, "No block was taken"),
        ({"allocated": 100.0, "freed": 99.0}, "As many"),
        ({"allocated": 1.0, "freed": 9.0}, "8.0 blocks a second more are given back than taken."),
    ],
)
def test_the_balance(rates: dict[str, float | None], text: str) -> None:
    assert balance(rates).startswith(text)
    assert bool(balance(rates)) == bool(text)
