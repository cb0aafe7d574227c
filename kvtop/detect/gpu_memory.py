"""GPU memory: what grows, what fills the device, and what is only a reservation."""

from __future__ import annotations

from itertools import pairwise

from kvtop.detect.engine_track import EngineTrack
from kvtop.detect.gpu_track import GpuTrack
from kvtop.detect.rule import NOTHING, Candidate, Rule, Verdict, duration, size
from kvtop.detect.thresholds import Thresholds
from kvtop.detect.track import Track


def _engines_on(track: Track, gpu: GpuTrack) -> list[EngineTrack]:
    """Engines with a process on this GPU; all of them where NVML names no process."""
    engines = [e for e in track.engines.values() if e.mono_s == track.mono_s and e.engine.alive]
    processes = gpu.gpu.processes
    if not processes:
        return engines
    pids = {process.engine_pid for process in processes}
    mine = [e for e in engines if e.engine.pid in pids]
    return mine or ([] if any(p is not None for p in pids) else engines)


def _new_requests(engine: EngineTrack, width_s: float) -> bool | None:
    """Whether requests arrived within the width. None: not known."""
    if engine.probe_fresh and engine.engine.requests is not None and engine.readings > 1:
        arrived = engine.requests.arrival_mono_s
        return arrived is not None and engine.mono_s - arrived <= width_s
    if engine.metrics_fresh and engine.pages.span_s(width_s + 1) >= width_s * 0.8:
        prompts = engine.pages.delta(2, width_s + 1)
        return None if prompts is None else prompts > 0
    return None


def growth(track: Track, gpu: GpuTrack, limits: Thresholds) -> Verdict:
    """Memory grows fast while no request comes in."""
    points = gpu.last(limits.gpu_growth_s)
    # On unified memory the figure is the whole machine's.
    if points is None or len(points) < 4 or gpu.gpu.mem_is_system:
        return None
    engines = _engines_on(track, gpu)
    if not engines or any(
        track.mono_s - e.first_mono_s < limits.gpu_growth_settle_s for e in engines
    ):
        return None
    grown = points[-1][1] - points[0][1]
    rate = grown / (points[-1][0] - points[0][0])
    if rate < limits.gpu_growth_bytes_s / 5:
        return NOTHING
    arrivals = [_new_requests(engine, limits.gpu_growth_s) for engine in engines]
    if None in arrivals:
        return None
    if any(arrivals):
        return NOTHING
    steps = [b[1] - a[1] for a, b in pairwise(points)]
    rising = sum(step > 0 for step in steps) / len(steps)
    # One allocation in one lump is not growth over time.
    start = rate >= limits.gpu_growth_bytes_s and rising >= 0.6 and max(steps) < 0.5 * grown
    owners = sorted(
        (p for p in gpu.gpu.processes or () if p.mem_bytes is not None),
        key=lambda p: -(p.mem_bytes or 0),
    )
    evidence = {
        "growth": f"{size(rate)}/s over {duration(points[-1][0] - points[0][0])}",
        "in use": f"{size(points[0][1])} -> {size(points[-1][1])}",
        "new requests": "none",
    }
    if owners:
        evidence["largest process"] = f"pid {owners[0].pid}, {size(owners[0].mem_bytes or 0)}"
    return (
        Candidate(
            summary=f"GPU {gpu.index} memory grows by {size(rate)} a second and no new request "
            "has come in. The KV pool is reserved at the start, so this is something else.",
            start=start,
            evidence=evidence,
        ),
    )


def outside_kv(_track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """The engine's processes grow on the GPU although the KV pool is fixed."""
    pieces = int(limits.gpu_outside_s / 15.0)
    if len(engine.gpu_memory) <= pieces:
        return None
    found = engine.gpu_memory.steady(pieces)
    if found is None:
        return NOTHING
    grown = found.last[1] - found.first[1]
    if grown < limits.gpu_outside_bytes / 2:
        return NOTHING
    pool = engine.counts
    evidence = {
        "growth": f"{size(grown)} in {duration(found.last[0] - found.first[0])}",
        "slope": f"{size(found.slope_s * 60)} a minute",
        "confidence": f"{found.sigma:.1f} sigma",
    }
    if pool is not None and engine.engine.block_bytes:
        evidence["KV pool"] = f"{size(pool.total * engine.engine.block_bytes)}, fixed"
    return (
        Candidate(
            summary=f"The engine's processes grew by {size(grown)} on the GPU outside the KV "
            "pool, which has a fixed size. Tensors or workspaces are kept that should go.",
            start=grown >= limits.gpu_outside_bytes,
            evidence=evidence,
        ),
    )


def unaccounted(_track: Track, gpu: GpuTrack, limits: Thresholds) -> Verdict:
    """More is used than all visible processes together use."""
    reading = gpu.gpu
    used = reading.mem_used_bytes
    if gpu.used_percent is None or used is None or reading.mem_is_system or not reading.processes:
        return None
    parts = [process.mem_bytes for process in reading.processes]
    known = [part for part in parts if part is not None]
    if len(known) != len(parts):
        return None
    missing = used - sum(known)
    if missing < limits.gpu_unaccounted_bytes / 2:
        return NOTHING
    return (
        Candidate(
            summary=f"GPU {gpu.index} has {size(missing)} in use that no visible process "
            "accounts for. Another container, or a process that died, may hold it.",
            start=missing >= limits.gpu_unaccounted_bytes,
            evidence={
                "in use": size(used),
                "sum of processes": f"{size(sum(known))} in {len(known)}",
                "difference": size(missing),
            },
        ),
    )


def full(_track: Track, gpu: GpuTrack, limits: Thresholds) -> Verdict:
    """The device is nearly full."""
    percent = gpu.used_percent
    if percent is None:
        return None
    if percent < limits.gpu_full_clear_percent:
        return NOTHING
    points = gpu.last(limits.gpu_full_s) or []
    used = [bytes_used for _, bytes_used in points] or [0]
    spread = max(used) - min(used)
    free = gpu.gpu.mem_free_bytes
    return (
        Candidate(
            summary=f"GPU {gpu.index} memory is {percent:.0f} % used. A larger batch or a longer "
            "prompt may not find the room it needs outside the KV pool.",
            start=percent > limits.gpu_full_percent,
            evidence={
                "used": f"{percent:.1f} %",
                "free": "-" if free is None else size(free),
                "moved": f"{size(spread)} in {duration(limits.gpu_full_s)}",
            },
        ),
    )


def reservation(track: Track, gpu: GpuTrack, limits: Thresholds) -> Verdict:
    """A large, flat use by vLLM is its reservation."""
    percent = gpu.used_percent
    if percent is None or gpu.gpu.mem_is_system:
        return None
    if percent < limits.gpu_reserved_percent or percent > limits.gpu_full_percent:
        return NOTHING
    points = gpu.last(limits.gpu_reserved_s)
    engines = _engines_on(track, gpu)
    total = gpu.gpu.mem_total_bytes
    if points is None or not engines or not total:
        return None
    used = [bytes_used for _, bytes_used in points]
    spread = max(used) - min(used)
    if spread > 0.01 * total:
        return NOTHING
    evidence = {
        "used": f"{percent:.1f} %",
        "moved": f"{size(spread)} in {duration(limits.gpu_reserved_s)}",
    }
    for engine in engines[:1]:
        if engine.kv_used_percent is not None:
            evidence["KV pool in use"] = f"{engine.kv_used_percent:.1f} %"
        counts, block = engine.counts, engine.engine.block_bytes
        if counts is not None and block:
            evidence["KV pool"] = size(counts.total * block)
    return (
        Candidate(
            summary=f"GPU {gpu.index} shows {percent:.0f} % in use and does not move. That is the "
            "share vLLM reserves at its start for weights and KV pool, not a leak.",
            evidence=evidence,
        ),
    )


def lost(_track: Track, gpu: GpuTrack, _limits: Thresholds) -> Verdict:
    """A GPU that could be read cannot be read any more."""
    if not gpu.fresh:
        return None
    if not gpu.gpu.error or not gpu.was_readable:
        return NOTHING
    return (
        Candidate(
            summary=f"GPU {gpu.index} could be read before and cannot be now. "
            "Engines on it will fail or hang.",
            evidence={"error": gpu.gpu.error, "uuid": gpu.gpu.uuid or "-"},
        ),
    )


GPU_RULES = (
    Rule(
        name="gpu.growth",
        severity="warning",
        title="GPU memory grows while no request comes in",
        explanation="vLLM reserves its KV pool when it starts and works inside it. Use of the "
        "device that grows steadily without new requests belongs to something else: a tensor "
        "that is kept, a second process, a workspace that grows.",
        starts="growth above {gpu_growth_bytes_s} for {gpu_growth_s}, no request arrived, engine "
        "known for {gpu_growth_settle_s}",
        clears="growth below a fifth of that, or new requests, for {clear_s}",
        next_step="Look which process grows in the GPU panel; take a flame graph of it (key f).",
        disproof="The growth stops by itself at a level and stays there.",
        needs="nvml, and probe or metrics",
        thresholds=("gpu_growth_bytes_s", "gpu_growth_s", "gpu_growth_settle_s"),
        gpu=growth,
    ),
    Rule(
        name="gpu.unaccounted",
        severity="info",
        title="GPU memory that no visible process explains",
        explanation="The device's use is larger than the sum over the processes that NVML shows. "
        "In a container other containers' processes are invisible; without one, a process that "
        "died badly can leave memory behind.",
        starts="the difference is above {gpu_unaccounted_bytes} for {gpu_unaccounted_s}",
        clears="below half of that for {clear_s}",
        next_step="Run nvidia-smi on the host, outside containers, and compare the processes.",
        disproof="Processes on the host add up to the device's use.",
        needs="nvml with per-process memory",
        thresholds=("gpu_unaccounted_bytes", "gpu_unaccounted_s"),
        for_s="gpu_unaccounted_s",
        gpu=unaccounted,
    ),
    Rule(
        name="gpu.full",
        severity="warning",
        title="GPU memory is nearly full",
        explanation="Beside the KV pool the engine needs room for activations, graphs and "
        "communication. When the device is this full the next larger batch can fail with an "
        "out-of-memory error.",
        starts="use above {gpu_full_percent} for {gpu_full_s}",
        clears="below {gpu_full_clear_percent} for {clear_s}",
        next_step="If out-of-memory errors occur, lower --gpu-memory-utilization. If it was set "
        "that high on purpose, raise `gpu_full_percent` in [findings].",
        disproof="It has been this full for days under full load without an error.",
        needs="nvml",
        thresholds=("gpu_full_percent", "gpu_full_clear_percent", "gpu_full_s"),
        for_s="gpu_full_s",
        gpu=full,
    ),
    Rule(
        name="gpu.reservation",
        severity="info",
        title="A large, constant use is vLLM's reservation",
        explanation="vLLM takes --gpu-memory-utilization (0.9 by default) of the device when it "
        "starts and keeps it. The device then shows about 90 % whether requests run or not. How "
        "full the KV cache is stands in the KV panel.",
        starts="use between {gpu_reserved_percent} and {gpu_full_percent}, flat for "
        "{gpu_reserved_s}, with an engine on the GPU",
        clears="the use moves or leaves that range for {clear_s}",
        next_step="Nothing. To leave more room on the device lower --gpu-memory-utilization.",
        disproof="The use grows while the engine serves (see gpu.growth).",
        needs="nvml",
        thresholds=("gpu_reserved_percent", "gpu_full_percent", "gpu_reserved_s"),
        gpu=reservation,
    ),
    Rule(
        name="gpu.lost",
        severity="critical",
        title="A GPU cannot be read any more",
        explanation="NVML could read this GPU earlier in this record and now reports an error for "
        "it: it fell off the bus, hangs, or access was taken away.",
        starts="an error for {gpu_lost_s} on a GPU that could be read",
        clears="it can be read for {clear_s}",
        next_step="Look at `dmesg` for Xid messages; move the work elsewhere.",
        disproof="NVML reads it again without a reset.",
        needs="nvml",
        thresholds=("gpu_lost_s",),
        for_s="gpu_lost_s",
        gpu=lost,
    ),
)

ENGINE_RULES = (
    Rule(
        name="gpu.outside-kv",
        severity="warning",
        title="An engine's GPU memory grows outside the KV pool",
        explanation="The KV pool has a fixed size. When the memory of the engine's processes on "
        "the GPU rises for minutes all the same, and does not level off, tensors are kept that "
        "should go: a leak in the model code, a cache without bound, fragmentation.",
        starts="steady growth of {gpu_outside_bytes} over {gpu_outside_s}",
        clears="the growth levels off for {clear_s}",
        next_step="Take a flame graph of the worker (key f); compare PyTorch's allocated and "
        "reserved memory in the worker.",
        disproof="The memory levels off when the largest batch has been seen once.",
        needs="nvml with per-process memory",
        thresholds=("gpu_outside_bytes", "gpu_outside_s"),
        engine=outside_kv,
    ),
)
