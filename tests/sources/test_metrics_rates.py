"""Rates over windows: never negative, never across a restart, never from one reading."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtop.model.snapshot import EngineMetrics
from kvtop.sources.metrics_page import EngineSample, Histogram, Samples
from kvtop.sources.metrics_rates import MAX_GAP_S, SPACING_S, Window, advance, derive

INF = math.inf


def page(start: float | None = 1.0, *, engine: int = 0, **fields: object) -> Samples:
    counters = {k: v for k, v in fields.items() if k not in EngineSample.__dataclass_fields__}
    rest = {k: v for k, v in fields.items() if k not in counters}
    return Samples({engine: EngineSample(counters=counters, **rest)}, start)  # type: ignore[arg-type]


def run(*timed: tuple[float, Samples]) -> EngineMetrics:
    window: Window = ()
    for time_s, samples in timed:
        window = advance(window, samples, time_s)
    return derive(window)[0]


def test_the_first_reading_has_no_rate() -> None:
    metrics = run((0.0, page(generation_tokens=100.0)))
    assert metrics.generation_tokens_total == 100
    assert metrics.generation_tokens_s is None
    assert metrics.preemptions_total is None


def test_a_steady_rate_is_right_from_the_second_reading() -> None:
    readings = [(float(t), page(generation_tokens=3172.0 * t)) for t in range(30)]
    for count in range(2, 30):
        assert run(*readings[:count]).generation_tokens_s == pytest.approx(3172)


def test_the_rate_is_over_ten_seconds() -> None:
    readings = [(float(t), page(generation_tokens=min(t, 20) * 10.0)) for t in range(32)]
    assert run(*readings[:21]).generation_tokens_s == pytest.approx(10)
    assert run(*readings[:26]).generation_tokens_s == pytest.approx(5)
    assert run(*readings[:32]).generation_tokens_s == 0


def test_a_slow_poll_still_gives_rates() -> None:
    assert run((0, page(prompt_tokens=0.0)), (30, page(prompt_tokens=60.0))).prompt_tokens_s == 2


def test_readings_too_far_apart_give_none() -> None:
    late = MAX_GAP_S + 1
    metrics = run((0, page(prompt_tokens=0.0)), (late, page(prompt_tokens=60.0)))
    assert metrics.prompt_tokens_s is None


def test_a_restart_gives_no_rate_for_that_interval_and_right_ones_after() -> None:
    before = [(float(t), page(generation_tokens=5000.0 + 100 * t)) for t in range(5)]
    after = [(5.0, page(generation_tokens=10.0)), (6.0, page(generation_tokens=30.0))]
    assert run(*before, after[0]).generation_tokens_s is None
    assert run(*before, *after).generation_tokens_s == 20


def test_one_counter_that_falls_stops_the_rates_of_all() -> None:
    metrics = run(
        (0, page(None, generation_tokens=10.0, prompt_tokens=900.0)),
        (1, page(None, generation_tokens=500.0, prompt_tokens=30.0)),
    )
    assert metrics.generation_tokens_s is None
    assert metrics.prompt_tokens_s is None


def test_a_restart_is_seen_by_the_start_time_when_the_counters_do_not_fall() -> None:
    metrics = run((0, page(1.0, prompt_tokens=1.0)), (1, page(2.0, prompt_tokens=900.0)))
    assert metrics.prompt_tokens_s is None


def test_finished_reasons_count_together_and_a_fall_in_one_is_a_restart() -> None:
    metrics = run(
        (0, page(finished={"stop": 1.0, "abort": 5.0})),
        (2, page(finished={"stop": 4.0, "abort": 6.0})),
    )
    assert metrics.finished_s == 2
    assert metrics.finished_total == {"stop": 4, "abort": 6}
    metrics = run(
        (0, page(None, finished={"stop": 1.0, "abort": 5.0})),
        (2, page(None, finished={"stop": 40.0, "abort": 0.0})),
    )
    assert metrics.finished_s is None


def test_a_series_that_appears_has_no_rate_yet() -> None:
    metrics = run((0, page(prompt_tokens=1.0)), (1, page(prompt_tokens=1.0, preemptions=7.0)))
    assert metrics.preemptions_total == 7
    assert metrics.preemptions_s is None


def test_an_engine_that_was_away_starts_anew() -> None:
    metrics = run(
        (0, page(prompt_tokens=5.0)), (1, page(engine=1)), (2, page(prompt_tokens=50.0))
    )  # fmt: skip
    assert metrics.prompt_tokens_s is None


def test_hit_rate_of_the_window_and_of_all_time() -> None:
    start = (0.0, page(prefix_queries=1000.0, prefix_hits=900.0))
    metrics = run(start, (10.0, page(prefix_queries=1200.0, prefix_hits=950.0)))
    assert metrics.prefix_hit_percent == 25
    assert metrics.prefix_hit_total_percent == pytest.approx(100 * 950 / 1200)
    metrics = run(start, (10.0, start[1]))
    assert metrics.prefix_hit_percent is None
    assert metrics.prefix_hit_total_percent == 90


def test_hit_rate_without_queries_is_none_and_with_no_hits_is_zero() -> None:
    metrics = run((0, page(prefix_queries=0.0, prefix_hits=0.0)))
    assert metrics.prefix_hit_total_percent is None
    metrics = run(
        (0, page(prefix_queries=0.0, prefix_hits=0.0)),
        (1, page(prefix_queries=15.0, prefix_hits=0.0)),
    )
    assert metrics.prefix_hit_percent == 0


def test_hit_rate_reaches_back_a_minute_and_no_further() -> None:
    readings = [(float(t), page(prefix_queries=100.0, prefix_hits=50.0)) for t in range(70)]
    readings[0] = (0.0, page(prefix_queries=0.0, prefix_hits=0.0))
    assert run(*readings[:60]).prefix_hit_percent == 50
    assert run(*readings).prefix_hit_percent is None


def test_used_share_is_in_percent() -> None:
    assert run((0, page(kv_used=0.9))).kv_used_percent == pytest.approx(90)


def blocks(engines: int, total: str, count: int | None = None) -> int | None:
    sample = EngineSample(cache_config={"num_gpu_blocks": total})
    window = advance((), Samples(dict.fromkeys(range(engines), sample)), 0.0)
    return derive(window, count)[0].num_blocks


def test_blocks_of_one_engine() -> None:
    assert blocks(1, "512") == 512
    assert blocks(2, "128") == 64
    assert blocks(1, "128", 2) == 64
    assert blocks(2, "129") is None
    assert blocks(1, "None") is None
    assert blocks(1, "0") is None


def test_configuration_labels() -> None:
    config = {"block_size": "16", "enable_prefix_caching": "False", "kv_cache_size_tokens": "None"}
    metrics = run((0, page(cache_config=config)))
    assert metrics.block_size_tokens == 16
    assert metrics.prefix_caching is False
    assert metrics.kv_size_tokens is None
    assert run((0, page(cache_config={"enable_prefix_caching": "None"}))).prefix_caching is None


def test_counters_that_stand_still_while_requests_run() -> None:
    still = [(float(t), page(running=5, generation_tokens=7.0)) for t in range(200)]
    assert run(*still[:3]).gauges_frozen_s is None
    assert run(*still[:11]).gauges_frozen_s == 10
    assert run(*still).gauges_frozen_s == 199
    moving = [*still[:11], (11.0, page(running=5, generation_tokens=8.0))]
    assert run(*moving).gauges_frozen_s is None


def test_an_idle_engine_is_not_frozen() -> None:
    assert run(*[(float(t), page(running=0, iterations=7.0)) for t in range(20)]) == run(
        *[(float(t), page(running=0, iterations=7.0)) for t in range(10, 20)]
    )
    assert run(*[(float(t), page(iterations=7.0)) for t in range(20)]).gauges_frozen_s is None


def test_median_is_the_upper_bound_of_its_bucket_in_the_window_only() -> None:
    bounds = (0.001, 0.01, 0.1, INF)
    old = Histogram(bounds, (1000.0, 1000.0, 1000.0, 1000.0))
    new = Histogram(bounds, (1000.0, 1001.0, 1004.0, 1004.0))
    metrics = run((0, page(ttft=old, itl=old)), (1, page(ttft=new, itl=old)))
    assert metrics.ttft_p50_s == 0.1
    assert metrics.itl_p50_s is None
    assert run((0, page(ttft=new))).ttft_p50_s is None


def test_a_median_above_the_last_bound_is_not_known() -> None:
    bounds = (0.1, INF)
    metrics = run(
        (0, page(ttft=Histogram(bounds, (0.0, 0.0)))), (1, page(ttft=Histogram(bounds, (1.0, 9.0))))
    )
    assert metrics.ttft_p50_s is None


def test_other_bounds_are_not_compared() -> None:
    metrics = run(
        (0, page(ttft=Histogram((1.0, INF), (0.0, 0.0)))),
        (1, page(ttft=Histogram((2.0, INF), (5.0, 5.0)))),
    )
    assert metrics.ttft_p50_s is None


def test_the_window_is_bounded_at_any_speed() -> None:
    window: Window = ()
    for tick in range(3000):
        window = advance(window, page(iterations=float(tick)), tick * 0.1)
    assert len(window) <= 65 / SPACING_S
    assert derive(window)[0] is not None
    assert window[-1].mono_s - window[0].mono_s > 55


def test_a_clock_that_stands_still_divides_by_nothing() -> None:
    metrics = run((5, page(prompt_tokens=1.0)), (5, page(prompt_tokens=9.0)))
    assert metrics.prompt_tokens_s is None


def test_no_page_no_engines() -> None:
    assert derive(()) == {}


READING = st.tuples(
    st.floats(0, 200),
    st.sampled_from([None, 1.0, 2.0]),
    st.dictionaries(
        st.sampled_from(["preemptions", "prompt_tokens", "generation_tokens", "prefix_hits"])
        | st.just("prefix_queries"),
        st.floats(0, 1e12),
    ),
    st.dictionaries(st.sampled_from(["stop", "abort"]), st.floats(0, 1e9)),
    st.lists(st.floats(0, 1e6), min_size=3, max_size=3),
)


@given(st.lists(READING, max_size=12))
def test_no_rate_is_ever_negative(readings: list[tuple]) -> None:  # type: ignore[type-arg]
    window: Window = ()
    time_s = 0.0
    for step, start, counters, finished, counts in readings:
        time_s += step
        histogram = Histogram((0.1, 1.0, INF), tuple(counts))
        sample = EngineSample(counters=counters, finished=finished, ttft=histogram, running=1)
        window = advance(window, Samples({0: sample}, start), time_s)
        metrics = derive(window)[0]
        for rate in (
            metrics.preemptions_s, metrics.prompt_tokens_s, metrics.generation_tokens_s,
            metrics.finished_s, metrics.gauges_frozen_s,
        ):  # fmt: skip
            assert rate is None or (rate >= 0 and math.isfinite(rate))
        for share in (metrics.prefix_hit_percent, metrics.prefix_hit_total_percent):
            assert share is None or 0 <= share <= 100
        assert metrics.ttft_p50_s in (None, 0.1, 1.0)
