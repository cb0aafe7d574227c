"""What the simulated server says over HTTP."""

from __future__ import annotations

import json
import math
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvtop.demo.config import GPU_TOTAL_BYTES
from kvtop.demo.engine import EngineCore
from kvtop.demo.gpu import GpuModel
from kvtop.demo.http import MAX_CONNECTIONS, DemoServer, json_page
from kvtop.demo.source import DemoGpuSource
from kvtop.model.codec import encode
from kvtop.sources.base import SourceError

MakeEngine = Callable[..., EngineCore]


def samples(engine: EngineCore) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    page = engine.metrics.render().decode()
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(page)
        for s in family.samples
    }


def test_the_page_has_the_names_types_and_labels_of_vllm(make_engine: MakeEngine) -> None:
    engine = make_engine()
    families = {f.name: f for f in text_string_to_metric_families(engine.metrics.render().decode())}
    kinds = {
        "vllm:num_requests_running": "gauge",
        "vllm:num_requests_waiting": "gauge",
        "vllm:kv_cache_usage_perc": "gauge",
        "vllm:engine_sleep_state": "gauge",
        "vllm:prefix_cache_queries": "counter",
        "vllm:prefix_cache_hits": "counter",
        "vllm:num_preemptions": "counter",
        "vllm:prompt_tokens": "counter",
        "vllm:generation_tokens": "counter",
        "vllm:request_success": "counter",
        "vllm:time_to_first_token_seconds": "histogram",
        "vllm:inter_token_latency_seconds": "histogram",
        "vllm:e2e_request_latency_seconds": "histogram",
        "vllm:request_num_preemptions": "histogram",
        "vllm:cache_config_info": "gauge",
    }
    for name, kind in kinds.items():
        assert families[name].type == kind
        assert families[name].documentation
    for name, family in families.items():
        if name.startswith("vllm:") and name != "vllm:cache_config_info":
            for sample in family.samples:
                assert sample.labels["engine"] == "0"
                assert sample.labels["model_name"] == "Qwen/Qwen3-8B"
    (info,) = families["vllm:cache_config_info"].samples
    assert info.labels["num_gpu_blocks"] == "20480"
    assert info.labels["block_size"] == "16"
    assert info.labels["enable_prefix_caching"] == "True"
    assert info.labels["kv_cache_size_tokens"] == str(20480 * 16)
    assert int(info.labels["kv_cache_memory_bytes"]) == 20480 * 16 * 147_456


def test_the_page_agrees_with_the_scheduler(make_engine: MakeEngine) -> None:
    engine = make_engine("preempt-storm")
    engine.run_steps(25.0)
    page = {name: value for (name, _), value in samples(engine).items()}
    scheduler = engine.scheduler
    running, waiting = scheduler.get_request_counts()
    assert page["vllm:num_requests_running"] == running
    assert page["vllm:num_requests_waiting"] == waiting
    assert page["vllm:kv_cache_usage_perc"] == pytest.approx(scheduler.kv_cache_manager.usage)
    assert page["vllm:num_preemptions_total"] > 0
    assert page["vllm:prefix_cache_queries_total"] == scheduler.prefix_cache_stats.queries
    assert page["vllm:inter_token_latency_seconds_count"] > 0
    ended = page["vllm:request_generation_tokens_count"]
    assert ended == sum(engine.metrics.success.values())


def test_histograms_are_cumulative_and_end_with_their_count(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.run_steps(10.0)
    for family in text_string_to_metric_families(engine.metrics.render().decode()):
        if family.type != "histogram":
            continue
        buckets = [
            (float(s.labels["le"]), s.value) for s in family.samples if s.name.endswith("_bucket")
        ]
        count = next(s.value for s in family.samples if s.name.endswith("_count"))
        assert buckets == sorted(buckets)
        assert [value for _, value in buckets] == sorted(value for _, value in buckets)
        assert buckets[-1] == (math.inf, count)


def test_a_client_that_leaves_moves_no_finish_counter(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.run_steps(3.0)
    name = next(iter(engine.scheduler.requests))
    before = dict(engine.metrics.success)
    engine.output_processor.abort_requests(name)
    engine.abort_requests([name])
    assert name not in engine.scheduler.requests
    assert engine.metrics.success == before


def test_gpus_hold_the_reservation_and_follow_the_load(make_engine: MakeEngine) -> None:
    engine = make_engine()
    (cold,) = engine.gpus.read(0.0)
    engine.run_steps(20.0)
    now_s = engine.clock.now_s
    (busy,) = engine.gpus.read(now_s)
    (rested,) = engine.gpus.read(now_s + 60.0)
    for gpu in (cold, busy, rested):
        assert gpu.simulated
        assert gpu.mem_total_bytes == GPU_TOTAL_BYTES
        assert gpu.mem_used_bytes is not None
        assert gpu.mem_reserved_bytes is not None
        assert gpu.mem_free_bytes is not None
        total = gpu.mem_used_bytes + gpu.mem_reserved_bytes + gpu.mem_free_bytes
        assert total == gpu.mem_total_bytes
        assert gpu.mem_used_bytes > 20480 * 16 * 147_456
        assert gpu.processes is not None
        assert sum(p.mem_bytes or 0 for p in gpu.processes) == gpu.mem_used_bytes
    assert cold.mem_used_bytes == busy.mem_used_bytes
    assert cold.util_percent == rested.util_percent == 0.0
    assert busy.util_percent is not None
    assert busy.util_percent > 60
    assert busy.power_w is not None
    assert cold.power_w is not None
    assert cold.power_w < busy.power_w < 700.0


def test_several_gpus_share_the_memory(make_engine: MakeEngine) -> None:
    engine = make_engine("healthy", 0, 100_000)
    gpus = GpuModel(engine.vllm_config).read(0.0)
    assert [gpu.index for gpu in gpus] == [0, 1, 2, 3]
    for gpu in gpus:
        assert gpu.mem_free_bytes is not None
        assert gpu.mem_free_bytes > 0


@pytest.fixture
def server(make_engine: MakeEngine) -> Iterator[DemoServer]:
    engine = make_engine()
    engine.run_steps(5.0)
    pages = {
        "/demo/gpus": json_page(
            lambda: {"gpus": [encode(g) for g in engine.gpus.read(engine.clock.now_s)]}
        ),
        "/metrics": lambda: ("text/plain", engine.metrics.render()),
    }
    server = DemoServer(pages)
    server.start()
    yield server
    server.shutdown()
    server.server_close()


async def test_the_gpu_source_reads_what_the_server_serves(server: DemoServer) -> None:
    source = DemoGpuSource(server.url)
    try:
        first, second = await source.read(), await source.read()
    finally:
        await source.close()
    assert first == second
    assert [gpu.name for gpu in first] == ["NVIDIA H100 80GB HBM3"]
    assert first[0].simulated
    assert first[0].util_percent is not None


async def test_the_gpu_source_says_when_nobody_answers(server: DemoServer) -> None:
    url = server.url
    server.shutdown()
    server.server_close()
    source = DemoGpuSource(url)
    with pytest.raises(SourceError) as caught:
        await source.read()
    await source.close()
    assert "\n" not in caught.value.reason


async def test_the_gpu_source_refuses_what_is_not_gpus(server: DemoServer) -> None:
    for body in ({"gpus": [{"index": "x"}]}, {"gpus": 3}, ["a"], {}):
        server.pages["/demo/gpus"] = json_page(lambda body=body: body)  # type: ignore[misc]
        source = DemoGpuSource(server.url)
        with pytest.raises(SourceError):
            await source.read()
        await source.close()


def test_other_paths_and_methods_are_refused(server: DemoServer) -> None:
    with urllib.request.urlopen(f"{server.url}/metrics?x=1", timeout=5) as answer:
        assert b"vllm:" in answer.read()
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{server.url}/etc/passwd", timeout=5)
    with caught.value as error:
        assert error.code == 404
        assert json.load(error) == {"detail": "Not Found"}
    request = urllib.request.Request(f"{server.url}/metrics", data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=5)
    with caught.value as error:
        assert error.code == 501


def test_connections_are_bounded(server: DemoServer) -> None:
    import socket

    held = [
        socket.create_connection(server.server_address[:2], timeout=5)
        for _ in range(MAX_CONNECTIONS)
    ]
    try:
        for connection in held:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.1 200"
        with socket.create_connection(server.server_address[:2], timeout=5) as extra:
            assert extra.recv(1) == b""
    finally:
        for connection in held:
            connection.close()
