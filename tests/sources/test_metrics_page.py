"""Pages of every version, and pages that are none."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtop.sources.base import SourceError
from kvtop.sources.metrics_page import MAX_LINE, EngineSample, parse

DATA = Path(__file__).parent / "data"

V0_8 = """\
# HELP vllm:num_requests_running Number of requests currently running on GPU.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 2.0
vllm:num_requests_swapped{model_name="m"} 0.0
vllm:num_requests_waiting{model_name="m"} 1.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.25
vllm:cpu_cache_usage_perc{model_name="m"} 0.0
vllm:gpu_prefix_cache_hit_rate{model_name="m"} -1.0
vllm:num_preemptions_total{model_name="m"} 3.0
vllm:generation_tokens_total{model_name="m"} 40.0
vllm:time_per_output_token_seconds_bucket{le="0.01",model_name="m"} 1.0
vllm:time_per_output_token_seconds_bucket{le="+Inf",model_name="m"} 2.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="None",num_gpu_blocks="100"} 1.0
"""

V0_8_5 = """\
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:gpu_prefix_cache_queries_total{engine="0",model_name="m"} 100.0
vllm:gpu_prefix_cache_hits_total{engine="0",model_name="m"} 30.0
"""

V0_10_BOTH = """\
vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.4
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:gpu_prefix_cache_queries_total{engine="0",model_name="m"} 1.0
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0
vllm:time_per_output_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 1.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="m"} 2.0
"""


def one(text: str) -> EngineSample:
    engines = parse(text).engines
    assert list(engines) == [0]
    return engines[0]


def test_a_real_idle_page() -> None:
    page = parse((DATA / "vllm-0.32-idle.txt").read_text())
    engine = page.engines[0]
    assert page.start_time_s == pytest.approx(1795989290.57)
    assert (engine.model, engine.kv_used, engine.running, engine.waiting) == ("tiny", 0, 0, 0)
    assert (engine.waiting_capacity, engine.waiting_deferred) == (0, 0)
    assert engine.sleep_state == "awake"
    assert engine.counters == {
        "preemptions": 0, "prompt_tokens": 0, "generation_tokens": 0,
        "prefix_queries": 0, "prefix_hits": 0, "iterations": 0,
    }  # fmt: skip
    assert engine.finished == dict.fromkeys(("stop", "length", "abort", "error", "repetition"), 0)
    assert engine.cache_config["num_gpu_blocks"] == "512"
    assert engine.cache_config["kv_cache_size_tokens"] == "65536"


def test_a_real_busy_page() -> None:
    text = (DATA / "vllm-0.32-busy.txt").read_text()
    engine = one(text)

    def line(start: str) -> float:
        (value,) = [x.split()[-1] for x in text.splitlines() if x.startswith(start)]
        return float(value)

    assert engine.running == 6
    assert engine.kv_used == line("vllm:kv_cache_usage_perc{") > 0.1
    assert engine.counters["generation_tokens"] == line("vllm:generation_tokens_total{") > 0
    assert engine.counters["prefix_hits"] == line("vllm:prefix_cache_hits_total{") > 0
    assert engine.counters["iterations"] == line("vllm:iteration_tokens_total_count{") > 0
    assert engine.ttft is not None
    assert engine.ttft.bounds[-1] == float("inf")
    assert engine.ttft.counts[-1] == line("vllm:time_to_first_token_seconds_count{") > 0
    assert list(engine.ttft.counts) == sorted(engine.ttft.counts)
    assert engine.itl is not None
    assert engine.itl.counts[-1] == line("vllm:inter_token_latency_seconds_count{") > 0


def test_a_real_page_of_two_engines() -> None:
    engines = parse((DATA / "vllm-0.32-data-parallel.txt").read_text()).engines
    assert list(engines) == [0, 1]
    assert [e.counters["generation_tokens"] for e in engines.values()] == [200, 200]
    assert [e.cache_config["num_gpu_blocks"] for e in engines.values()] == ["128", "128"]


def test_before_engine_labels() -> None:
    engine = one(V0_8)
    assert (engine.running, engine.waiting, engine.kv_used) == (2, 1, 0.25)
    assert engine.counters == {"preemptions": 3, "generation_tokens": 40}
    assert engine.cache_config["block_size"] == "16"
    assert engine.itl is not None
    assert engine.itl.counts == (1, 2)
    assert engine.ttft is None
    assert engine.waiting_capacity is None
    assert engine.sleep_state is None


def test_old_names() -> None:
    engine = one(V0_8_5)
    assert engine.kv_used == 0.5
    assert engine.counters == {"prefix_queries": 100, "prefix_hits": 30}


def test_the_new_name_wins_where_both_are_there() -> None:
    engine = one(V0_10_BOTH)
    assert engine.kv_used == 0.5
    assert engine.counters == {"prefix_queries": 100}
    assert engine.itl is not None
    assert engine.itl.counts == (2,)


def test_a_missing_series_is_not_a_zero() -> None:
    engine = one('vllm:num_requests_running{engine="0",model_name="m"} 1\n')
    assert engine.kv_used is None
    assert engine.waiting is None
    assert engine.counters == {}
    assert engine.finished == {}


def test_an_engine_that_only_its_configuration_names_has_no_data_yet() -> None:
    text = """\
vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="128"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="128"} 1.0
"""
    engines = parse(text).engines
    assert list(engines) == [0, 1]
    assert engines[1].running is None
    assert engines[1].model is None


def test_a_page_with_only_the_configuration() -> None:
    assert one('vllm:cache_config_info{block_size="16"} 1\n').cache_config == {"block_size": "16"}


def test_series_that_only_begin_alike_are_left_out() -> None:
    engine = one(
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 4\n'
        'vllm:num_requests_running_extra{engine="0"} 9\n'
        'vllm:prompt_tokens_total_created{engine="0"} 1.7e9\n'
    )
    assert engine.waiting is None
    assert engine.waiting_capacity == 4
    assert engine.running is None
    assert engine.counters == {}


def test_several_model_names_of_one_engine_add_up() -> None:
    engine = one(
        'vllm:num_requests_running{engine="0",model_name="a"} 1\n'
        'vllm:num_requests_running{engine="0",model_name="b"} 2\n'
    )
    assert (engine.running, engine.model) == (3, "a")


@pytest.mark.parametrize("bad", ["vllm:num_requests_waiting{a=", "vllm:prompt_tokens_total x"])
def test_a_line_that_is_none_does_not_take_the_others_with_it(bad: str) -> None:
    engine = one(f"{bad}\nvllm:num_requests_running 2\n{bad}\nvllm:kv_cache_usage_perc 0.5\n")
    assert (engine.running, engine.kv_used) == (2, 0.5)
    assert engine.waiting is None
    assert engine.counters == {}


def test_only_the_start_time_is_no_page_of_vllm() -> None:
    with pytest.raises(SourceError, match="not in Prometheus text format"):
        parse("process_start_time_seconds 1\nvllm:num_requests_running many\n")


def test_a_very_long_line_never_reaches_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    import prometheus_client.parser as parser

    seen: list[str] = []
    real = parser.text_string_to_metric_families

    def watch(text: str) -> object:
        seen.append(text)
        return real(text)

    monkeypatch.setattr(parser, "text_string_to_metric_families", watch)
    labels = ",".join(f'l{i}="{i}"' for i in range(100_000))
    engine = one(f"vllm:num_requests_waiting{{{labels}}} 1\nvllm:num_requests_running 2\n")
    assert (engine.running, engine.waiting) == (2, None)
    assert max(len(line) for text in seen for line in text.split("\n")) <= MAX_LINE


def test_sums_without_end_are_not_known() -> None:
    text = ""
    for model, value in (("a", "1e308"), ("b", "1.7e308")):
        label = f'model_name="{model}"'
        text += f"vllm:num_requests_running{{{label}}} {value}\n"
        text += f"vllm:prompt_tokens_total{{{label}}} {value}\n"
        text += f'vllm:request_success_total{{finished_reason="stop",{label}}} {value}\n'
        text += f'vllm:num_requests_waiting_by_reason{{reason="capacity",{label}}} {value}\n'
        text += f'vllm:time_to_first_token_seconds_bucket{{le="+Inf",{label}}} {value}\n'
    engine = one(text + "vllm:num_requests_waiting 1e300\nvllm:kv_cache_usage_perc 0.5\n")
    assert (engine.running, engine.waiting, engine.waiting_capacity) == (None, None, None)
    assert (engine.counters, engine.finished, engine.ttft) == ({}, {}, None)
    assert engine.kv_used == 0.5


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1"])
def test_what_is_no_count_is_not_known(value: str) -> None:
    text = f'vllm:num_requests_running{{engine="0"}} {value}\nvllm:num_requests_waiting 3\n'
    engine = one(text)
    assert engine.running is None
    assert engine.waiting == 3


def test_an_odd_engine_label_is_left_out() -> None:
    text = (
        'vllm:num_requests_running{engine="0"} 1\nvllm:num_requests_running{engine="\u00b2"} 9\n'
        'vllm:num_requests_running{engine="-1"} 9\nvllm:num_requests_running{engine="1e9"} 9\n'
    )
    assert one(text).running == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ("<!DOCTYPE html><html></html>", "is not a metrics page"),
        ('{"detail":"x"}', "is not a metrics page"),
        ("python_gc_objects_collected_total 1\n", "has no vLLM series"),
        ("sglang:num_running_reqs 1\n", "has no vLLM series"),
        ("vllm:something_new 1\n", "none that kvtop knows"),
        ('vllm:num_requests_running{engine="0" 1\n', "not in Prometheus text format"),
        ("vllm:num_requests_running{engine=0} many\n", "not in Prometheus text format"),
        ('vllm:time_to_first_token_seconds_bucket{engine="0"} 1\n', "not in Prometheus text"),
    ],
)
def test_pages_that_are_none(text: str, reason: str) -> None:
    with pytest.raises(SourceError, match=reason) as caught:
        parse(text)
    assert caught.value.remedy
    assert caught.value.reason.isprintable()


def test_log_stats_off() -> None:
    with pytest.raises(SourceError, match="no vLLM series") as caught:
        parse((DATA / "vllm-0.32-no-stats.txt").read_text())
    assert "--disable-log-stats" in caught.value.remedy


NAMES = st.sampled_from(
    [
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
        "vllm:cache_config_info",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_bucket",
        "process_start_time_seconds",
        "# TYPE ",
    ]
)
LETTERS = st.text('{}="\\,.0123456789eE+-NaInf \n#', max_size=40)
JUNK = st.lists(
    st.one_of(
        st.text(max_size=40),
        st.builds(lambda n, t: n + t, NAMES, LETTERS),
        st.builds(
            lambda n, k, v, x: f'{n}{{{k}="{v}"}} {x}',
            NAMES,
            st.sampled_from(["engine", "le", "model_name", "finished_reason"]),
            st.text(max_size=8),
            st.one_of(st.floats(), st.text(max_size=4)),
        ),
    ),
    max_size=8,
).map("\n".join)


@given(JUNK)
@example("vllm:num_requests_running\n")
@example('vllm:num_requests_running{engine="0"} 1 # {a="b"} 1\n')
def test_junk_raises_nothing_but_source_error(text: str) -> None:
    try:
        page = parse(text)
    except SourceError:
        return
    for engine in page.engines.values():
        assert engine.running is None or engine.running >= 0
