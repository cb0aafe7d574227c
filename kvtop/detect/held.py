"""Blocks kept after their request's end, by a KV connector or behind the fence of a step."""

from __future__ import annotations

import re

from kvtop.detect.engine_track import EngineTrack
from kvtop.detect.leaks import age_of, of_requests, pools_of, seen_of, verified
from kvtop.detect.rule import Candidate, Verdict, blocks_text, count, duration, some
from kvtop.detect.thresholds import DEFAULTS, Thresholds
from kvtop.detect.track import Track
from kvtop.model.snapshot import Request


def lease_text(engine: EngineTrack, limits: Thresholds) -> str:
    """The lease in force, and whose it is.

    How long vLLM's connectors keep blocks by default, from its sources: NIXL 120 s in 0.10
    (envs.py, VLLM_NIXL_ABORT_REQUEST_TIMEOUT), 480 s in 0.12 to 0.20, and in 0.25 to 0.32 30 s
    that a heartbeat of the decode side renews for as long as it lives, with 480 s on the decode
    side itself (kv_connector/v1/nixl/base_scheduler.py: kv_lease_duration,
    decoder_kv_blocks_ttl); Mooncake 480 s since it is there. The default is the longest: which
    connector an engine has is not known here, and a shorter one would call living transfers lost.
    """
    text = duration(limits.lease_s)
    if limits.lease_s != DEFAULTS.lease_s:
        return f"{text}, as set in [findings]"
    match = re.match(r"(\d{1,4})\.(\d{1,4})", engine.engine.vllm_version or "")
    version = (int(match[1]), int(match[2])) if match else None
    if version is None:
        return f"{text}, the longest that vLLM's own connectors have"
    if version < (0, 11):
        return f"{text}; NIXL of this vLLM gives up after 120 s unless told otherwise"
    if version < (0, 21):
        return f"{text}, NIXL's and Mooncake's in this vLLM unless told otherwise"
    return (
        f"{text}, Mooncake's and NIXL's decode side in this vLLM; NIXL's prefill side has 30 s, "
        "renewed while the decode side lives"
    )


def _parked(track: Track, engine: EngineTrack) -> list[tuple[Request, float]]:
    """Requests whose blocks a connector keeps, with the time for which it has."""
    totals = engine.requests.totals
    parked = [
        (r, age_of(track, engine, r)) for r in totals.held if r.reason in ("connector", "remote KV")
    ]
    for r in totals.deferred:
        seen = seen_of(engine, r, held=False)
        if r.reason == "remote KV" and r.blocks and seen is not None:
            parked.append((r, track.mono_s - seen.status_mono_s))
    return parked


def held_past_lease(track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """Blocks that a KV connector keeps longer than it may."""
    if not engine.probe_fresh or engine.engine.requests is None:
        return None
    allowed = limits.lease_s + limits.lease_grace_s
    late = [(r, age) for r, age in _parked(track, engine) if age >= allowed]
    blocks = sum(r.blocks or 0 for r, _ in late)
    return of_requests(
        [r for r, _ in late],
        f"A KV connector keeps {count(blocks, 'block')} of "
        f"{count(len(late), 'request')} for longer than its lease of {duration(limits.lease_s)}. "
        "The transfer that would free them does not come any more.",
        {
            "blocks": str(blocks),
            "held for": some([duration(age) for _, age in late], 6),
            "lease": lease_text(engine, limits),
        },
    )


def delayed_free(track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """Blocks that a KV connector keeps within its lease."""
    if not engine.probe_fresh or engine.engine.requests is None:
        return None
    allowed = limits.lease_s + limits.lease_grace_s
    kept = [(r, age) for r, age in _parked(track, engine) if limits.delayed_free_s <= age < allowed]
    blocks = sum(r.blocks or 0 for r, _ in kept)
    oldest = max((age for _, age in kept), default=0.0)
    return of_requests(
        [r for r, _ in kept],
        f"A KV connector keeps {count(blocks, 'block')} of {count(len(kept), 'request')}, the "
        f"oldest for {duration(oldest)} of {duration(limits.lease_s)}. This looks like a leak and "
        "is none: they are sent, received, or given up at the end of the lease.",
        {
            "blocks": str(blocks),
            "oldest": duration(oldest),
            "lease": lease_text(engine, limits),
        },
    )


def fence_stuck(track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """Blocks of finished requests that wait for a step that is long over."""
    if not engine.probe_fresh or engine.engine.requests is None:
        return None
    totals = engine.requests.totals
    found: list[Candidate] = []
    finished = []
    for r in totals.held:
        seen = seen_of(engine, r, held=True)
        if (
            r.reason == "finished"
            and seen is not None
            and track.mono_s - seen.first_mono_s >= limits.fence_s
            and age_of(track, engine, r) >= limits.fence_s
        ):
            finished.append(r)
    found += of_requests(
        finished,
        f"{count(len(finished), 'request is', 'requests are')} finished and still "
        f"{'keeps its' if len(finished) == 1 else 'keep their'} blocks. The step that they "
        "waited for is over.",
        {"blocks": str(sum(r.blocks or 0 for r in finished))},
    )
    for pool, seen_pool in pools_of(engine):
        settled = seen_pool.held.settled(
            mono_s=track.mono_s,
            step=engine.step,
            for_s=limits.fence_s,
            steps=0 if engine.idle else limits.fence_steps,
        )
        # Blocks of requests that are listed as held have rules of their own.
        listed = sum(r.blocks or 0 for r in totals.held) + sum(
            r.blocks or 0 for r in totals.deferred
        )
        if settled is None or not verified(engine, settled.age_s):
            continue
        # Beside listed ones the ids cannot be told apart, only their number.
        waits = len(settled.blocks) - listed
        if waits <= 0:
            continue
        blocks = () if listed else settled.blocks
        found.append(
            Candidate(
                summary=f"{count(waits, 'block')} given back by finished requests "
                f"{'waits' if waits == 1 else 'wait'} for the end of a step, for "
                f"{duration(settled.age_s)} and {count(settled.steps, 'step')} now. Such a wait "
                "lasts one or two steps.",
                subject=f"{pool.label} fence",
                evidence={
                    "blocks": blocks_text(blocks) or f"{waits}, among those of held requests",
                    "waiting for": duration(settled.age_s),
                    "steps since": str(settled.steps),
                },
                since_s=settled.since_s,
                block_ids=blocks,
            )
        )
    return tuple(found)
