"""Blocks that do not come back, one rule a way of losing them."""

from __future__ import annotations

from kvtop.detect.engine_track import EngineTrack, PoolTrack
from kvtop.detect.requests_track import Seen
from kvtop.detect.rule import (
    NOTHING,
    Candidate,
    Verdict,
    blocks_text,
    count,
    duration,
    shown,
    some,
)
from kvtop.detect.thresholds import Thresholds
from kvtop.detect.track import Track
from kvtop.detect.watch import Settled
from kvtop.model.snapshot import Pool, Request


def pools_of(engine: EngineTrack) -> list[tuple[Pool, PoolTrack]]:
    """The pools of the newest reading, with what is remembered of each."""
    return [
        (pool, engine.pools[pool.label])
        for pool in engine.engine.pools
        if pool.label in engine.pools
    ]


def verified(engine: EngineTrack, age_s: float) -> bool:
    """Whether the probe has read every block itself since the oddity was first seen."""
    probe = engine.engine.probe
    return probe is None or probe.verified_age_s is None or probe.verified_age_s <= age_s + 1.0


def ghost_blocks(track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """Blocks that are referenced and in no table, or unreferenced and not in the free queue."""
    if not engine.probe_fresh or engine.engine.requests is None:
        return None
    found: list[Candidate] = []
    for pool, seen in pools_of(engine):
        settled = seen.ghosts.settled(
            mono_s=track.mono_s,
            step=engine.step,
            for_s=limits.ghost_busy_s,
            steps=limits.ghost_busy_steps,
            idle_readings=limits.ghost_idle_samples,
        )
        if settled is not None and verified(engine, settled.age_s):
            found.append(_ghosts(engine, pool, seen, settled, limits))
        elif seen.ghosts:
            found.append(_young_ghosts(pool, pool.counts.ghost))
        elif pool.states is None and seen.ghost_floor:
            ripe = seen.ghost_floor_readings >= limits.ghost_idle_samples
            found.append(
                _counted_ghosts(pool, seen.ghost_floor)
                if ripe
                else _young_ghosts(pool, seen.ghost_floor)
            )
    return tuple(found)


def _young_ghosts(pool: Pool, ghosts: int) -> Candidate:
    return Candidate(
        summary=f"{count(ghosts, 'block is a ghost', 'blocks are ghosts')} at this moment.",
        subject=pool.label,
        start=False,
        evidence={"ghost blocks now": str(ghosts)},
    )


def _counted_ghosts(pool: Pool, ghosts: int) -> Candidate:
    return Candidate(
        summary=f"{count(ghosts, 'block stays', 'blocks stay')} owned by nobody while the engine "
        "is idle. The block columns are not read, so that the ids are not known.",
        subject=pool.label,
        evidence={"ghost blocks at idle": str(ghosts)},
    )


def _ghosts(
    engine: EngineTrack, pool: Pool, seen: PoolTrack, settled: Settled, limits: Thresholds
) -> Candidate:
    blocks = settled.blocks
    share = pool.counts.percent(len(blocks)) or 0.0
    evidence = {
        "blocks": blocks_text(blocks),
        "ghost blocks": f"{len(blocks)} of {pool.counts.usable} ({share:.1f} %)",
        "oldest": duration(settled.age_s),
        "steps since": str(settled.steps),
        "engine": "idle" if engine.idle else f"{engine.requests.totals.live} live requests",
    }
    if pool.refs is not None:
        evidence["ref counts"] = some([pool.refs[block] for block in blocks[:12]])
    rate = _ghost_rate(seen)
    left = pool.counts.free + pool.counts.cached
    where = "" if len(engine.engine.pools) == 1 else f" of the {shown(pool.label)} pool"
    if rate is not None:
        evidence["grows by"] = f"{rate * 60:.1f} blocks a minute"
        evidence["pool is gone in"] = duration(left / rate)
    return Candidate(
        summary=f"{count(len(blocks), 'block')}{where} {'is' if len(blocks) == 1 else 'are'} "
        f"owned by no request and not free, for {duration(settled.age_s)} now. "
        "Nothing in the engine will give them back.",
        subject=pool.label,
        evidence=evidence,
        severity="critical" if share >= limits.ghost_critical_percent else None,
        since_s=settled.since_s,
        block_ids=blocks,
    )


def _ghost_rate(seen: PoolTrack) -> float | None:
    """Ghosts a second, when they came over time; None when they came at once."""
    cohorts = seen.ghosts.cohorts
    if len(cohorts) < 3:
        return None
    span_s = cohorts[-1].mono_s - cohorts[0].mono_s
    grown = sum(len(cohort.blocks) for cohort in cohorts[1:])
    return grown / span_s if span_s > 0 and grown > 0 else None


def ref_mismatch(track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """Blocks in tables whose ref count is not the number of their holders."""
    if not engine.probe_fresh:
        return None
    found: list[Candidate] = []
    for pool, seen in pools_of(engine):
        settled = seen.mismatches.settled(
            mono_s=track.mono_s,
            step=engine.step,
            for_s=limits.mismatch_s,
            steps=limits.mismatch_steps,
        )
        if settled is None or not verified(engine, settled.age_s):
            if seen.mismatches:
                found.append(
                    Candidate("Some ref counts differ at this moment.", pool.label, start=False)
                )
            continue
        refs, tables = pool.refs, pool.tables
        if refs is None or tables is None:
            continue
        blocks = settled.blocks
        low = [block for block in blocks if refs[block] < tables[block]]
        pairs = [f"{block}: {refs[block]} for {tables[block]}" for block in blocks[:6]]
        what = (
            "can be freed while a request still uses it"
            if low
            else "will not come back when its requests end"
        )
        found.append(
            Candidate(
                summary=f"{count(len(blocks), 'block has', 'blocks have')} a ref count that is "
                f"not the number of {'its' if len(blocks) == 1 else 'their'} holders, for "
                f"{duration(settled.age_s)}. Such a block {what}.",
                subject=pool.label,
                evidence={
                    "blocks": blocks_text(blocks),
                    "ref count for holders": some(pairs),
                    "too low": str(len(low)),
                    "steps since": str(settled.steps),
                },
                severity="critical" if low else None,
                since_s=settled.since_s,
                block_ids=blocks,
            )
        )
    return tuple(found)


def broken_identity(_track: Track, engine: EngineTrack, _limits: Thresholds) -> Verdict:
    """States that do not add up, or do not agree with the free queue."""
    if engine.probe_fresh and engine.engine.pools:
        found = []
        for pool, _ in pools_of(engine):
            c = pool.counts
            parts = c.null + c.free + c.cached + c.used + c.shared + c.held + c.ghost
            sides = []
            if pool.free_queue is not None and pool.free_queue != c.free + c.cached:
                sides.append(
                    (
                        "free + cached",
                        c.free + c.cached,
                        "length of the free queue",
                        pool.free_queue,
                    )
                )
            if parts != c.total:
                sides.append(("sum of the states", parts, "blocks in the pool", c.total))
            for left, a, right, b in sides:
                found.append(
                    Candidate(
                        summary=f"The pool does not add up: {left} is {a}, {right} is {b}. "
                        "Blocks were counted twice or not at all.",
                        subject=f"{pool.label} {left}",
                        evidence={left: str(a), right: str(b), "difference": str(a - b)},
                    )
                )
        return tuple(found)
    used = engine.kv_used_percent
    if used is None:
        return None
    if used <= 100.5:
        return NOTHING
    return (
        Candidate(
            summary=f"The engine says that {used:.0f} % of its blocks are in use. "
            "More than all of them cannot be: its ref counts are wrong.",
            subject="gauge",
            evidence={"used": f"{used:.1f} %", "possible": "100 %"},
        ),
    )


def _row(request: Request) -> str:
    age = request.held_s if request.held_s is not None else request.age_s
    since = "" if age is None else f" for {duration(age)}"
    blocks = "" if request.blocks is None else f", {count(request.blocks, 'block')}"
    return f"{shown(request.id)} ({request.status}{blocks}{since})"


def of_requests(
    requests: list[Request], summary: str, evidence: dict[str, str] | None = None
) -> tuple[Candidate, ...]:
    """A candidate about these requests; none where there are none."""
    if not requests:
        return NOTHING
    return (
        Candidate(
            summary=summary,
            evidence={"requests": some([_row(r) for r in requests], 6), **(evidence or {})},
            request_ids=tuple(r.id for r in requests),
        ),
    )


def orphan_table(track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """Tables of requests that the scheduler no longer has."""
    if not engine.probe_fresh or engine.engine.requests is None:
        return None
    old = [
        r
        for r in engine.requests.totals.held
        if r.reason == "orphan table" and age_of(track, engine, r) >= limits.orphan_table_s
    ]
    blocks = sum(r.blocks or 0 for r in old)
    return of_requests(
        old,
        f"{count(len(old), 'block table belongs', 'block tables belong')} to no request of the "
        f"scheduler. {count(blocks, 'block is', 'blocks are')} kept by it for nobody.",
        {"blocks": str(blocks)},
    )


def seen_of(engine: EngineTrack, request: Request, *, held: bool) -> Seen | None:
    """What is remembered of a request."""
    return engine.requests.seen.get((request.id, held))


def age_of(track: Track, engine: EngineTrack, request: Request) -> float:
    """Seconds for which a held request was seen held: never more than was watched or told."""
    if request.held_s is not None:
        return request.held_s
    seen = seen_of(engine, request, held=True)
    return 0.0 if seen is None else track.mono_s - seen.status_mono_s


def zombie_request(_track: Track, engine: EngineTrack, limits: Thresholds) -> Verdict:
    """Requests that go on without a client."""
    requests = engine.engine.requests
    if not engine.probe_fresh or requests is None:
        return None
    totals = engine.requests.totals
    live = [*totals.running, *totals.waiting, *totals.deferred]
    if live and all(r.client is None for r in live):
        return None
    gone = [
        r
        for r in live
        if r.client == "gone" and r.client_gone_s is not None and r.client_gone_s >= limits.zombie_s
    ]
    blocks = sum(r.blocks or 0 for r in gone)
    left = [
        r.max_tokens - r.output_tokens
        for r in gone
        if r.max_tokens is not None and r.output_tokens is not None
    ]
    evidence = {
        "blocks": str(blocks),
        "client gone for": some([duration(r.client_gone_s or 0.0) for r in gone], 6),
    }
    if left:
        evidence["tokens left to generate"] = some(left, 6)
    return of_requests(
        gone,
        f"{count(len(gone), 'request runs', 'requests run')} on although no API server knows "
        f"{'it' if len(gone) == 1 else 'them'} any more. {count(blocks, 'block is', 'blocks are')} "
        "kept for answers that nobody reads.",
        evidence,
    )
