"""Too little room: a full pool, preemptions, requests that cannot go on."""

from __future__ import annotations

import math

from kvtop.detect.engine_track import COLUMNS, ENDED, EngineTrack
from kvtop.detect.rule import NOTHING, Candidate, Verdict, count, duration, shown, some
from kvtop.detect.thresholds import Thresholds
from kvtop.detect.track import Track
from kvtop.model.snapshot import Request
from kvtop.model.tokens import token_use_percent

PREEMPTIONS = COLUMNS.index("preemptions")


def kv_full(_track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """Nearly every block is held by requests."""
    used = engine.kv_used_percent
    if used is None:
        return None
    if used < limits.kv_full_clear_percent:
        return NOTHING
    counts, metrics, totals = engine.counts, engine.metrics, engine.requests.totals
    evidence = {"used": f"{used:.1f} % of blocks"}
    if counts is not None:
        evidence["free + cached"] = f"{counts.free + counts.cached} of {counts.usable} blocks"
        filled = token_use_percent(engine.engine, engine.engine.pools[0])
        if filled is not None:
            evidence["token slots filled"] = f"{filled:.1f} %"
    waiting = len(totals.waiting) if counts is not None else metrics.waiting if metrics else None
    if waiting is not None:
        evidence["waiting"] = str(waiting)
    preemptions = engine.counter_delta("preemptions", limits.storm_window_s)
    if preemptions is not None:
        evidence["preemptions"] = f"{preemptions:.0f} in {duration(limits.storm_window_s)}"
    return (
        Candidate(
            summary=f"{used:.0f} % of the KV blocks are held by requests. "
            "New requests wait, and running ones may be preempted.",
            start=used > limits.kv_full_percent,
            evidence=evidence,
        ),
    )


def storm(_track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """Requests are preempted far more often than in a healthy engine."""
    width_s = limits.storm_window_s
    preemptions = ended = None
    if engine.probe_fresh:
        preemptions = engine.counters.delta(PREEMPTIONS, width_s)
        ended = engine.counters.delta(ENDED, width_s)
    finished = engine.pages.delta(1, width_s) if engine.metrics_fresh else None
    if preemptions is None and engine.metrics_fresh:
        preemptions = engine.pages.delta(0, width_s)
    if preemptions is None:
        return None
    if engine.probe_fresh and engine.engine.requests is not None:
        live = engine.requests.totals.live
    elif engine.metrics is not None and engine.metrics.running is not None:
        live = engine.metrics.running + (engine.metrics.waiting or 0)
    else:
        return None
    # Short requests come and go between two readings: the larger count is nearer the truth.
    requests = max(1.0, live + max(ended or 0.0, finished or 0.0))
    each = preemptions / requests
    if each < limits.storm_clear_per_request:
        return NOTHING
    tokens = engine.counter_delta("preempted_tokens", width_s)
    blocks = engine.counter_delta("preempted_blocks", width_s)
    evidence = {
        "preemptions": f"{preemptions:.0f} in {duration(width_s)} ({preemptions / width_s:.1f}/s)",
        "a request": f"{each:.2f}; healthy is about 0.07",
        "requests": f"{requests:.0f}",
    }
    if tokens is not None:
        evidence["tokens thrown away"] = f"{tokens:.0f}"
    if blocks is not None:
        evidence["blocks given up"] = f"{blocks:.0f}"
    worst = sorted(
        (r for r in engine.engine.requests or () if r.preemptions),
        key=lambda r: (-(r.preemptions or 0), r.id),
    )[:5]
    if worst and engine.probe_fresh:
        evidence["most preempted"] = some([f"{shown(r.id)} {r.preemptions}x" for r in worst])
    return (
        Candidate(
            summary=f"{preemptions:.0f} preemptions in {duration(width_s)} on "
            f"{count(requests, 'request')}: the same tokens are computed again and again.",
            start=preemptions >= limits.storm_count and each >= limits.storm_per_request,
            evidence=evidence,
            request_ids=tuple(r.id for r in worst) if engine.probe_fresh else (),
        ),
    )


def thrash(_track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """Single requests that lose their work again and again."""
    if not engine.probe_fresh or engine.engine.requests is None:
        return None
    totals = engine.requests.totals
    found: list[tuple[int, int, Request]] = []
    for r in (*totals.running, *totals.waiting, *totals.deferred):
        seen = engine.requests.seen.get((r.id, False))
        if seen is None:
            continue
        often = (r.preemptions or 0) >= limits.thrash_preemptions and seen.restarts_total > 0
        if often or seen.restarts >= limits.thrash_restarts:
            found.append((max(r.preemptions or 0, seen.restarts_total), seen.restarts, r))
    if not found:
        return NOTHING
    found.sort(key=lambda item: (-item[0], item[2].id))
    times, without, worst = found[0]
    others = f" So have {len(found) - 1} others." if len(found) > 1 else ""
    return (
        Candidate(
            summary=f"Request {shown(worst.id)} has lost its computed tokens {times} times, and "
            f"computes them again.{others}",
            evidence={
                "requests": some([f"{shown(r.id)} {lost}x" for lost, _, r in found], 6),
                "since its last token": f"lost {without} times",
                "prompt": "-" if worst.prompt_tokens is None else f"{worst.prompt_tokens} tokens",
            },
            request_ids=tuple(r.id for _, _, r in found),
        ),
    )


def blocks_needed(engine: EngineTrack, request: Request) -> int | None:
    """Blocks that a request needs at least, to be computed as far as it is known now.

    Groups with a sliding window, and others that need not keep every token, count as nothing.
    """
    sizes = _growing_groups(engine)
    if request.prompt_tokens is None or not sizes:
        return None
    tokens = request.prompt_tokens + (request.output_tokens or 0)
    return sum(math.ceil(tokens / size) for size in sizes)


def _growing_groups(engine: EngineTrack) -> list[int]:
    """Block sizes of the groups that keep every token. Empty: not known."""
    groups = engine.engine.groups
    sizes = [
        g.block_size_tokens
        for g in groups
        if g.kind == "FullAttention" and not g.sliding_window_tokens
    ]
    if not groups:
        sizes = [engine.engine.block_size]
    known = [size for size in sizes if size]
    return known if len(known) == len(sizes) else []


def never_fits(_track: Track, engine: EngineTrack, _limits: Thresholds) -> Verdict:
    """Requests that need more blocks than the pool has."""
    counts = engine.counts
    if counts is None or engine.engine.requests is None:
        return None
    totals = engine.requests.totals
    found = []
    sizes = _growing_groups(engine)
    if not sizes:
        return NOTHING
    # So many tokens fit for certain, one block begun in each group.
    fit = (counts.usable - len(sizes)) / sum(1.0 / size for size in sizes)
    for r in (*totals.waiting, *totals.running):
        if (r.prompt_tokens or 0) + (r.output_tokens or 0) <= fit:
            continue
        need = blocks_needed(engine, r)
        if need is not None and need > counts.usable:
            found.append((need, r))
    if not found:
        return NOTHING
    need, worst = max(found, key=lambda item: (item[0], item[1].id))
    others = f" {len(found) - 1} others are too large as well." if len(found) > 1 else ""
    return (
        Candidate(
            summary=f"Request {shown(worst.id)} needs {need} blocks and the pool has "
            f"{counts.usable}: it can never run.{others}",
            evidence={
                "blocks needed": str(need),
                "blocks in the pool": f"{counts.usable} ({counts.null} null block less)",
                "prompt": f"{worst.prompt_tokens} tokens",
                "max model length": str(engine.engine.max_model_len or "-"),
            },
            request_ids=tuple(r.id for _, r in found),
        ),
    )


def alloc_failures(_track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """Allocations that found no room."""
    if not engine.probe_fresh:
        return None
    width_s = limits.alloc_window_s
    failures = engine.counter_delta("alloc_failures", width_s)
    if failures is None:
        return None
    if failures < limits.alloc_failures / 2:
        return NOTHING
    steps = engine.counter_delta("steps", width_s)
    share = failures / steps if steps else None
    span = duration(engine.counters.span_s(width_s))
    return (
        Candidate(
            summary=f"{failures:.0f} allocations found no room in the last {span}. "
            "Requests wait, or are preempted, for want of blocks.",
            start=failures >= limits.alloc_failures,
            severity="warning" if share is not None and share >= limits.alloc_share else None,
            evidence={
                "failed allocations": f"{failures:.0f} in {span}",
                "a step": "-" if share is None else f"{share:.2f}",
            },
        ),
    )


def hog(_track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """One request, or one adapter, holds most of the pool while others wait."""
    counts, used = engine.counts, engine.kv_used_percent
    requests = engine.engine.requests
    if counts is None or used is None or requests is None or counts.usable <= 0:
        return None
    totals = engine.requests.totals
    if used < limits.hog_use_percent or not totals.waiting or len(requests) < 3:
        return NOTHING
    largest = max(requests, key=lambda r: (r.blocks or 0, r.id))
    share = 100.0 * (largest.blocks or 0) / counts.usable
    if share >= limits.hog_percent:
        return (
            Candidate(
                summary=f"Request {shown(largest.id)} holds {share:.0f} % of all blocks while "
                f"{count(len(totals.waiting), 'request waits', 'requests wait')} for room.",
                subject="request " + largest.id,
                evidence={
                    "blocks": f"{largest.blocks} of {counts.usable}",
                    "prompt": f"{largest.prompt_tokens or '-'} tokens",
                    "waiting": str(len(totals.waiting)),
                },
                request_ids=(largest.id,),
            ),
        )
    tenants: dict[str, int] = {}
    for r in requests:
        tenants[r.lora or ""] = tenants.get(r.lora or "", 0) + (r.blocks or 0)
    if len(tenants) < 2:
        return NOTHING
    name, blocks = max(tenants.items(), key=lambda item: (item[1], item[0]))
    share = 100.0 * blocks / counts.usable
    if share < limits.hog_percent or all((r.lora or "") == name for r in totals.waiting):
        return NOTHING
    who = f"Adapter {shown(name)}" if name else "The base model"
    return (
        Candidate(
            summary=f"{who} holds {share:.0f} % of all blocks while requests of others wait.",
            subject="tenant " + name,
            evidence={
                "blocks": f"{blocks} of {counts.usable}",
                "tenants": some([f"{shown(k) or 'base'} {v}" for k, v in sorted(tenants.items())]),
            },
            request_ids=tuple(r.id for r in requests if (r.lora or "") == name),
        ),
    )
