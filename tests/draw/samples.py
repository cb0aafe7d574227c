"""Snapshots made by hand, one for each thing a panel must be able to say."""

from __future__ import annotations

from dataclasses import replace

from kvtop.draw.view import Detail, View
from kvtop.model.blocks import BlockCounts, BlockState, count_states
from kvtop.model.history import History
from kvtop.model.snapshot import (
    Counters,
    Engine,
    EngineMetrics,
    Finding,
    Frame,
    Gpu,
    GpuProcess,
    Group,
    Phase,
    Pool,
    ProbeInfo,
    Request,
    Snapshot,
    SourceState,
    SourceStatus,
    Stacks,
)

NOW = 1_700_000_000.0
GIB = 1 << 30


def column(**blocks: int) -> bytes:
    """A state column: the null block, then the given numbers of blocks in this order."""
    out = bytes([BlockState.NULL])
    for name, number in blocks.items():
        out += bytes([BlockState[name.upper()]]) * number
    return out


def pool(states: bytes, **changes: object) -> Pool:
    counts = count_states(states)
    whole = Pool(
        counts=counts,
        free_queue=counts.free + counts.cached,
        states=states,
        refs=bytes(len(states)),
        tables=bytes(len(states)),
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


REQUESTS = (
    Request(
        id="cmpl-aaaa",
        status="RUNNING",
        phase=Phase.DECODE,
        arrival_time_s=NOW - 75,
        age_s=75.2,
        prompt_tokens=1200,
        output_tokens=340,
        max_tokens=4096,
        computed_tokens=1540,
        cached_tokens=600,
        blocks=97,
        shared_blocks=37,
        slack_tokens=12,
        kv_bytes=97 * 131072,
        preemptions=0,
        owed_blocks=0,
        priority=0,
    ),
    Request(
        id="cmpl-bbbb",
        status="PREEMPTED",
        phase=Phase.PREEMPTED,
        age_s=190.0,
        prompt_tokens=3000,
        output_tokens=410,
        max_tokens=512,
        computed_tokens=0,
        cached_tokens=0,
        blocks=0,
        shared_blocks=0,
        slack_tokens=0,
        kv_bytes=0,
        preemptions=3,
        owed_blocks=214,
        priority=0,
    ),
    Request(
        id="cmpl-cccc",
        status="WAITING_FOR_REMOTE_KVS",
        phase=Phase.WAITING,
        reason="remote KV",
        age_s=4.2,
        prompt_tokens=900,
        output_tokens=0,
        max_tokens=128,
        blocks=57,
        shared_blocks=0,
        slack_tokens=12,
        kv_bytes=57 * 131072,
        preemptions=0,
        owed_blocks=0,
        priority=0,
    ),
    Request(
        id="cmpl-dddd",
        status="FINISHED_ABORTED",
        phase=Phase.HELD,
        reason="connector",
        age_s=7300.0,
        held_s=33.0,
        blocks=8,
        shared_blocks=0,
        slack_tokens=3,
    ),
    Request(
        id="cmpl-eeee",
        status="RUNNING",
        phase=Phase.PREFILL,
        age_s=0.4,
        prompt_tokens=48000,
        output_tokens=0,
        max_tokens=256,
        computed_tokens=8192,
        cached_tokens=0,
        blocks=512,
        shared_blocks=0,
        slack_tokens=0,
        kv_bytes=512 * 131072,
        preemptions=0,
        owed_blocks=0,
        priority=0,
        client="gone",
        client_gone_s=12.0,
    ),
)

STATES = column(shared=37, used=629, held=8, cached=400, free=925)

ENGINE = Engine(
    engine=0,
    pid=4740,
    server="127.0.0.1:8000",
    api_pids=(4700,),
    worker_pids=(4801,),
    process_state="R",
    model="Qwen3-8B",
    vllm_version="0.32.0",
    block_size=16,
    block_bytes=131072 * 16,
    max_model_len=65536,
    max_num_seqs=64,
    prefix_caching=True,
    state="running",
    groups=(Group(0, "FullAttention", 16),),
    pools=(pool(STATES),),
    counters=Counters(
        allocated=90_000,
        freed=88_000,
        touched=9_000,
        evicted=400,
        alloc_failures=27,
        preemptions=12,
        preempted_blocks=900,
        preempted_tokens=14_000,
        steps=123_456,
    ),
    requests=REQUESTS,
    metrics=EngineMetrics(
        kv_used_percent=33.7,
        running=2,
        waiting=2,
        prefix_hit_percent=71.2,
        prefix_hit_total_percent=58.4,
        preemptions_s=0.2,
        num_blocks=2000,
        block_size_tokens=16,
    ),
    probe=ProbeInfo(
        version="0.1.0",
        step=123_456,
        scan_us=210.0,
        cost_percent=0.05,
        point="boundary",
        cut_time_s=NOW - 0.1,
        step_age_s=0.01,
    ),
)

GPU = Gpu(
    index=0,
    uuid="GPU-1",
    name="H100 80GB",
    mem_total_bytes=int(79.6 * GIB),
    mem_used_bytes=int(68.1 * GIB),
    mem_reserved_bytes=GIB // 2,
    mem_free_bytes=int(11.0 * GIB),
    util_percent=91.0,
    mem_util_percent=40.0,
    temperature_c=62.0,
    power_w=412.0,
    power_limit_w=700.0,
    sm_clock_mhz=1980,
    mem_clock_mhz=2619,
    pcie_rx_bytes_s=1.2e9,
    pcie_tx_bytes_s=3.0e8,
    processes=(
        GpuProcess(4801, "VLLM::Worker", 66 * GIB, 4740),
        GpuProcess(99, "python train.py", GIB, None),
    ),
)

SOURCES = (
    SourceStatus(
        "discovery", "discovery", SourceState.OK, NOW - 60, value_time_s=NOW, period_s=2.0
    ),
    SourceStatus("nvml", "nvml", SourceState.OK, NOW - 60, value_time_s=NOW, period_s=1.0),
    SourceStatus(
        "engine 4740",
        "engine",
        SourceState.OK,
        NOW - 60,
        value_time_s=NOW - 0.1,
        period_s=1.0,
        target_pid=4740,
    ),
    SourceStatus(
        "stacks 4740",
        "stacks",
        SourceState.OK,
        NOW - 60,
        value_time_s=NOW - 0.5,
        period_s=1.0,
        target_pid=4740,
    ),
)

STACKS = Stacks(
    pid=4740,
    role="engine",
    samples=200,
    window_s=10.0,
    rate_hz=20.0,
    frames=(
        Frame("execute_model", "gpu_worker.py", 501, "MainThread", 61.0, 95.0),
        Frame("schedule", "scheduler.py", 233, "MainThread", 12.4, 14.0),
        Frame("_process_input_queue", "core.py", 88, "Thread-1", 0.3, 100.0),
    ),
    time_s=NOW - 0.5,
)

HEALTHY = Snapshot(
    time_s=NOW,
    mono_s=1000.0,
    host="box",
    version="0.1.0",
    sources=SOURCES,
    gpus=(GPU,),
    engines=(ENGINE,),
    stacks=(STACKS,),
)

EMPTY = Snapshot(time_s=NOW, mono_s=1000.0, host="box", version="0.1.0")


def with_engine(**changes: object) -> Snapshot:
    return replace(HEALTHY, engines=(replace(ENGINE, **changes),))  # type: ignore[arg-type]


def with_source(kind: str, **changes: object) -> Snapshot:
    return replace(
        HEALTHY,
        sources=tuple(
            replace(source, **changes) if source.kind == kind else source  # type: ignore[arg-type]
            for source in SOURCES
        ),
    )


BROKEN = with_engine(
    pools=(
        pool(
            STATES,
            free_queue=1200,
            refs=bytes(1990) + bytes([2] * 10),
            counts=replace(count_states(STATES), total=2010),
        ),
    )
)

NO_PROBE = with_engine(
    pools=(),
    requests=None,
    counters=None,
    probe=None,
    state=None,
    probe_reason="no probe in pid 4740; run: kvtop attach 4740",
)

NO_GPU = replace(
    HEALTHY,
    gpus=(),
    sources=(
        SourceStatus(
            "nvml",
            "nvml",
            SourceState.FAILED,
            NOW - 60,
            reason="no NVIDIA driver on this machine (libnvidia-ml.so.1 not found)",
            remedy="nothing to do on a CPU-only box",
        ),
    ),
)

HOSTILE_IDS = (
    "a[/x]b",
    "\x1b[31mred\x1b[0m",
    "\u202eevil\u202c",
    "zero\u200bwidth",
    "lone\ud800surrogate",
    "宽宽宽宽宽宽宽宽宽宽宽宽宽宽宽宽宽宽宽宽宽宽宽宽",
    "new\nline\ttab",
    "e\u0301\u0301\u0301\u0301\u0301",
    "x" * 500,
    "",
)

HOSTILE = with_engine(
    model="m\x1b]0;title\x07",
    requests=tuple(replace(REQUESTS[0], id=name) for name in HOSTILE_IDS),
)

HUGE = with_engine(
    block_bytes=10**20,
    pools=(
        Pool(
            counts=BlockCounts(
                total=10**19,
                null=1,
                free=10**18,
                cached=5,
                used=10**18,
                shared=3,
                held=10**12,
                ghost=7,
            ),
            free_queue=10**18 + 5,
        ),
    ),
    requests=(
        replace(
            REQUESTS[0],
            age_s=1e15,
            prompt_tokens=10**15,
            output_tokens=10**9,
            max_tokens=10**30,
            blocks=10**12,
            shared_blocks=10**400,
            kv_bytes=10**25,
            slack_tokens=-(10**9),
            preemptions=10**7,
            owed_blocks=10**14,
            priority=-(10**9),
            lora="adapter" * 20,
        ),
    ),
)

DETAIL = Detail(
    request_id="cmpl-aaaa",
    step=123_456,
    tables=((0, 16, (*range(1, 38), *range(38, 98))),),
    refs=((*([2] * 37), *([1] * 60)),),
    shared_with=dict.fromkeys(range(1, 38), ("cmpl-eeee",)),
)

FINE = Finding(
    rule="diagnosis.memory-fine",
    severity="info",
    since_s=NOW,
    engine_pid=ENGINE.pid,
    summary="Nothing is wrong with memory (KV use 34 %, free + cached 1,200 blocks).",
)
FINDINGS = (
    replace(
        FINE,
        rule="diagnosis.memory-held-badly",
        severity="critical",
        since_s=NOW - 75,
        summary="Memory is held badly (KV use 96 %, ghost 12): 12 blocks are held by nobody.",
    ),
    Finding(
        rule="leak.ghost-blocks",
        severity="critical",
        since_s=NOW - 75,
        engine_pid=ENGINE.pid,
        summary="12 blocks are held by nobody.",
        evidence={"blocks": "12 of 2,000", "id\x1b[31m": "a[/x]b\u202e"},
        next_step="Restart the engine when it is idle; report it to vLLM with these ids.",
        disproof="The blocks come back to the free queue by themselves.",
        block_ids=(3, 4, 5, 9, *range(20, 28)),
        request_ids=("cmpl-aaaa", "宽宽"),
    ),
    Finding(
        rule="gpu.nearly-full",
        severity="warning",
        since_s=NOW - 3700,
        engine_pid=None,
        summary="GPU 0 memory is over 92 %.",
    ),
)


def history(snap: Snapshot = HEALTHY, points: int = 60) -> History:
    """A minute of the engine, with one gap where the probe did not answer."""
    kept = History()
    for at in range(points):
        used = 400 + 4 * at
        states = column(shared=37, used=used, held=8, cached=400, free=1154 - used)
        engine = replace(ENGINE, pools=(pool(states),))
        if 20 <= at < 30:
            engine = replace(engine, pools=())
        gpu = replace(GPU, util_percent=50.0 + at % 20)
        time_s = NOW - points + at + 1
        kept.append(replace(snap, time_s=time_s, mono_s=float(at), engines=(engine,), gpus=(gpu,)))
    return kept


VIEW = View(now_s=NOW)
