"""Merging: who wins, what stays unknown, what a missing source leaves behind."""

from __future__ import annotations

from typing import Any

import pytest

from kvtop.attach.procfs import ProcessFacts
from kvtop.model.snapshot import (
    EngineMetrics,
    Gpu,
    GpuProcess,
    Snapshot,
    SourceState,
    SourceStatus,
)
from kvtop.sources.metrics import MetricsPage
from kvtop.stream.merge import Readings, clientless, merge
from tests.stream import make


def page(**engines: EngineMetrics) -> MetricsPage:
    by_rank = {int(name[1:]): value for name, value in engines.items()}
    return MetricsPage(
        url="http://127.0.0.1:8000",
        engines=by_rank,
        models=dict.fromkeys(by_rank, "from-page"),
        cache_config={},
        vllm_version="0.32.0",
        start_time_s=None,
        restarted=False,
        size_bytes=1,
    )


def merged(**more: Any) -> Snapshot:
    return merge(Readings(time_s=100.0, mono_s=50.0, host="box", **more))


def test_nothing_found_says_what_was_looked_for() -> None:
    status = SourceStatus("discovery", "discovery", SourceState.OK, 1.0)
    snapshot = merged(found=make.found(), discovery=status)
    assert snapshot.engines == ()
    assert snapshot.sources[0].reason == "no vLLM server found; looked for this; that"


def test_probe_and_metrics_meet_in_one_engine() -> None:
    snapshot = merged(
        found=make.found(make.server(make.found_engine(20))),
        engines={20: make.reading(make.engine(20, make.request("a")))},
        metrics={"127.0.0.1:8000": make.reading(page(e0=EngineMetrics(running=1)))},
        processes={
            20: ProcessFacts("S", 4096, 3, 200),
            21: ProcessFacts("R", 8192, 3, 210),
            77: ProcessFacts("R", 1, 3, 770),
        },
    )
    (engine,) = snapshot.engines
    assert (engine.pid, engine.server, engine.model) == (20, "127.0.0.1:8000", "tiny")
    assert engine.metrics is not None
    assert engine.metrics.running == 1
    assert engine.alive
    assert (engine.process_state, engine.rss_bytes) == ("S", 4096)
    assert engine.rss_by_pid == {21: 8192}
    assert engine.worker_pids == (21,)
    assert engine.vllm_version == "0.32.0"
    assert engine.probe_reason == ""


def test_no_probe_is_said_and_blocks_stay_unknown() -> None:
    snapshot = merged(
        found=make.found(make.server(make.found_engine(20, socket=None))),
        metrics={"127.0.0.1:8000": make.reading(page(e0=EngineMetrics(block_size_tokens=16)))},
        processes={20: ProcessFacts("S", 1, 1, 200)},
    )
    (engine,) = snapshot.engines
    assert engine.blocks is None
    assert engine.requests is None
    assert engine.block_size == 16
    assert "kvtop attach" in engine.probe_reason


def test_failed_page_gives_no_metrics_although_an_old_value_is_kept() -> None:
    old = make.reading(page(e0=EngineMetrics(running=3)), SourceState.FAILED, "refused")
    snapshot = merged(
        found=make.found(make.server(make.found_engine(20))),
        metrics={"127.0.0.1:8000": old},
    )
    assert snapshot.engines[0].metrics is None


def test_failed_probe_keeps_its_last_values_with_the_reason() -> None:
    last = make.reading(make.engine(20), SourceState.FAILED, "stopped", remedy="cont it")
    snapshot = merged(
        found=make.found(make.server(make.found_engine(20))),
        engines={20: last},
        processes={20: ProcessFacts("T", 1, 1, 200)},
    )
    (engine,) = snapshot.engines
    assert engine.blocks is not None
    assert engine.probe_reason == "stopped; cont it"
    assert engine.process_state == "T"


def test_ranks_of_a_data_parallel_server_are_not_mixed_up() -> None:
    pages = page(e0=EngineMetrics(running=1), e1=EngineMetrics(running=2))
    pair = make.server(make.found_engine(20, 0, None), make.found_engine(30, 1, None))
    snapshot = merged(found=make.found(pair), metrics={"127.0.0.1:8000": make.reading(pages)})
    running = {e.pid: e.metrics.running for e in snapshot.engines if e.metrics}
    assert running == {20: 1, 30: 2}


def test_fresh_data_parallel_engine_without_series_has_no_metrics() -> None:
    pair = make.server(make.found_engine(20, 0, None), make.found_engine(30, 1, None))
    only_first = make.reading(page(e0=EngineMetrics(running=1)))
    snapshot = merged(found=make.found(pair), metrics={"127.0.0.1:8000": only_first})
    assert snapshot.engines[1].metrics is None


@pytest.mark.parametrize(
    ("state", "client"), [(SourceState.OK, "gone"), (SourceState.FAILED, None)]
)
def test_a_client_is_gone_only_by_a_fresh_answer(state: SourceState, client: str | None) -> None:
    snapshot = merged(
        found=make.found(make.server(make.found_engine(20))),
        engines={20: make.reading(make.engine(20, make.request("a"), make.request("b")))},
        clients={19: make.reading(frozenset({"a"}), state)},
        gone_since_s={(20, "b"): 47.5},
    )
    requests = snapshot.engines[0].requests
    assert requests is not None
    assert requests[1].client == client
    assert requests[1].client_gone_s == (2.5 if client else None)
    assert requests[0].client == ("live" if client else None)


def test_a_request_missed_for_the_first_time_may_just_have_come() -> None:
    readings: dict[str, Any] = {
        "found": make.found(make.server(make.found_engine(20))),
        "engines": {20: make.reading(make.engine(20, make.request("new")))},
        "clients": {19: make.reading(frozenset())},
    }
    both = Readings(time_s=100.0, mono_s=50.0, host="box", **readings)
    assert clientless(both) == {(20, "new")}
    # The answer was taken at 50.0, not after the request was missed.
    snapshot = merged(**readings, gone_since_s={(20, "new"): 50.0})
    assert snapshot.engines[0].requests is not None
    assert snapshot.engines[0].requests[0].client is None


def test_one_silent_api_server_of_two_makes_no_zombies() -> None:
    two = make.found_engine(20)
    server = make.server(two)
    server = type(server)(
        key=server.key, url=server.url, apis=(make.process(18), make.process(19)), engines=(two,)
    )
    snapshot = merged(
        found=make.found(server),
        engines={20: make.reading(make.engine(20, make.request("a")))},
        clients={19: make.reading(frozenset())},
    )
    assert snapshot.engines[0].requests is not None
    assert snapshot.engines[0].requests[0].client is None


def test_lost_engine_keeps_its_last_values_and_says_so() -> None:
    gone = make.found_engine(20)
    snapshot = merged(
        found=make.found(),
        engines={20: make.reading(make.engine(20, make.request("a")))},
        lost=((make.server(gone), gone),),
    )
    (engine,) = snapshot.engines
    assert not engine.alive
    assert engine.state == "gone"
    assert engine.blocks is not None
    assert "gone" in engine.probe_reason
    snapshot = merged(
        found=make.found(), lost=((make.server(gone), gone),), left={20: "/tmp/k/last-20-x.json"}
    )
    (engine,) = snapshot.engines
    assert engine.probe_reason.endswith("kvtop once --file /tmp/k/last-20-x.json")
    assert engine.last_snapshot == "/tmp/k/last-20-x.json"


def test_remote_server_shows_its_metrics_and_why_there_is_no_more() -> None:
    server = make.server(key="10.0.0.1:8000")
    snapshot = merged(
        found=make.found(server),
        metrics={"10.0.0.1:8000": make.reading(page(e0=EngineMetrics(running=4)))},
    )
    (engine,) = snapshot.engines
    assert engine.pid is None
    assert engine.metrics is not None
    assert "run kvtop on its machine" in engine.probe_reason


def test_an_address_that_never_answered_is_not_an_engine() -> None:
    server = make.server(key="10.0.0.1:8000")
    silent = make.reading(None, SourceState.FAILED, "nothing answers")
    snapshot = merged(found=make.found(server), metrics={"10.0.0.1:8000": silent})
    assert snapshot.engines == ()


def test_gpu_processes_are_matched_through_the_workers() -> None:
    gpu = Gpu(
        index=0,
        processes=(
            GpuProcess(21, "worker", 5, None),
            GpuProcess(999, "other", 6, None),
        ),
    )
    snapshot = merged(
        found=make.found(make.server(make.found_engine(20))), gpus=make.reading((gpu,))
    )
    processes = snapshot.gpus[0].processes
    assert processes is not None
    assert [p.engine_pid for p in processes] == [20, None]
