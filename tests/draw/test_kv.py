from __future__ import annotations

from dataclasses import replace

from kvtop.draw.kv import alarm_lines, kv_panel, refs_off, state_line
from kvtop.draw.view import Line, View
from kvtop.model.blocks import BlockState, count_states
from kvtop.model.snapshot import Group, Pool, SourceState
from kvtop.model.tokens import token_use_percent
from tests.draw import samples
from tests.draw.golden import styles_of, text_of


def texts(lines: list[Line]) -> str:
    return "\n".join(text_of(line) for line in lines)


def test_sound_pools_raise_no_alarm() -> None:
    assert alarm_lines(samples.ENGINE, 80) == []


def test_a_broken_identity_names_both_sides_in_red() -> None:
    lines = alarm_lines(samples.BROKEN.engines[0], 100)
    assert "add up to 2,000, the pool has 2,010" in texts(lines)
    assert "free + cached = 1,325, vLLM's free queue holds 1,200" in texts(lines)
    assert "10 blocks have a ref count" in texts(lines)
    assert {style for line in lines for _, style in line} == {"crit"}


def test_alarms_come_first_even_in_one_line() -> None:
    assert "BROKEN" in text_of(kv_panel(samples.BROKEN, View(), 80, 1)[0])


def test_references_to_the_null_block_are_not_counted() -> None:
    states = samples.column(used=3)
    pool = samples.pool(states, refs=bytes([7, 1, 1, 1]), tables=bytes([0, 1, 1, 1]))
    assert refs_off(pool) == 0
    assert refs_off(replace(pool, tables=bytes([0, 1, 2, 0]))) == 2
    assert refs_off(replace(pool, tables=None)) is None
    ghost = bytes([BlockState.GHOST, *pool.states[1:]])
    assert refs_off(replace(pool, tables=bytes([9, *pool.tables[1:]]), states=ghost)) == 0


def test_use_of_blocks_and_of_token_slots_differ() -> None:
    # Two thirds of the blocks, and most of each last block is empty.
    request = replace(samples.REQUESTS[0], blocks=20, slack_tokens=145)
    engine = replace(
        samples.ENGINE,
        pools=(samples.pool(samples.column(used=20, free=10)),),
        requests=(request,),
        metrics=None,
    )
    percent = token_use_percent(engine, engine.pools[0])
    assert percent is not None
    assert round(percent, 1) == 36.5
    panel = kv_panel(replace(samples.HEALTHY, engines=(engine,)), View(), 80, 8)
    assert "in use 67% of blocks   36% of token slots" in texts(panel)


def test_token_use_is_unknown_when_a_request_or_a_group_does_not_tell() -> None:
    pool = samples.ENGINE.pools[0]
    untold = replace(samples.REQUESTS[0], slack_tokens=None)
    assert token_use_percent(replace(samples.ENGINE, requests=(untold,)), pool) is None
    assert token_use_percent(replace(samples.ENGINE, requests=None), pool) is None
    hybrid = replace(samples.ENGINE, groups=(Group(0, "A", 16), Group(1, "B", 32)))
    assert token_use_percent(hybrid, pool) is None


def test_held_and_ghost_are_quiet_at_zero_and_loud_above() -> None:
    quiet = dict(state_line(count_states(samples.column(used=5, free=5)), 100))
    assert quiet["0"] == "dim"
    loud = state_line(count_states(samples.column(used=5, held=2, ghost=3)), 100)
    assert ("2", "state.held") in loud
    assert ("3", "state.ghost") in loud


def test_ghosts_are_the_last_to_be_left_out() -> None:
    counts = count_states(samples.column(used=50, ghost=3, free=50))
    assert text_of(state_line(counts, 4)) == "G 3"


def test_unknown_debts_are_dashes() -> None:
    owing = replace(samples.REQUESTS[1], owed_blocks=None)
    snap = samples.with_engine(requests=(owing,), metrics=None, counters=None)
    bottom = text_of(kv_panel(snap, View(), 80, 8)[-1])
    assert "preempted 1 req, owe - blocks   preempt -   hit -/-" in bottom


def test_no_probe_shows_metrics_and_what_to_do() -> None:
    text = texts(kv_panel(samples.NO_PROBE, View(), 80, 10))
    assert "used 34% of blocks (from /metrics)" in text
    assert "kvtop attach 4740" in text
    frozen = replace(samples.ENGINE.metrics, gauges_frozen_s=95.0)
    snap = replace(
        samples.NO_PROBE, engines=(replace(samples.NO_PROBE.engines[0], metrics=frozen),)
    )
    assert "STALE for 1m35s" in texts(kv_panel(snap, View(), 80, 10))


def test_series_that_do_not_exist_yet_are_not_zeros() -> None:
    engine = replace(samples.NO_PROBE.engines[0], metrics=samples.EngineMetrics())
    text = texts(kv_panel(replace(samples.NO_PROBE, engines=(engine,)), View(), 80, 10))
    assert "no data yet" in text
    assert "0%" not in text


def test_metrics_that_cannot_be_read_say_why() -> None:
    engine = replace(samples.NO_PROBE.engines[0], metrics=None)
    source = samples.SourceStatus(
        "metrics 127.0.0.1:8000",
        "metrics",
        SourceState.FAILED,
        samples.NOW,
        reason="the page has no vllm: series",
        remedy="start the server without --disable-log-stats",
    )
    snap = replace(samples.HEALTHY, engines=(engine,), sources=(source,))
    text = texts(kv_panel(snap, View(), 100, 10))
    assert "/metrics: the page has no vllm: series; start the server without" in text


def test_old_values_are_grey_but_the_alarm_is_not() -> None:
    snap = samples.with_source(
        "engine", state=SourceState.FAILED, reason="gone", value_time_s=samples.NOW - 12
    )
    lines = kv_panel(snap, samples.VIEW, 80, 8)
    assert text_of(lines[0]).startswith("FAILED values 12s old: gone")
    assert styles_of(lines[0]) == {"warn"}
    assert styles_of(lines[1]) == {"dim"}


def test_more_pools_have_a_line_each() -> None:
    second = replace(samples.pool(samples.column(used=10, free=30)), label="cpu")
    snap = samples.with_engine(pools=(samples.ENGINE.pools[0], second))
    text = texts(kv_panel(snap, View(), 90, 10))
    assert "cpu 41  " in text


def test_without_a_column_the_bar_says_that_it_is_no_map() -> None:
    pool: Pool = replace(samples.ENGINE.pools[0], states=None)
    text = texts(kv_panel(samples.with_engine(pools=(pool,)), View(ascii=True), 90, 8))
    assert "shares, not places" in text
