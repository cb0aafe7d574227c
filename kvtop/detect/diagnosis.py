"""The one line at the top: too little memory, memory held badly, or not memory at all.

It is worked out from the findings that hold (they bring the hysteresis) and from the numbers
of the moment, and names one knob at most, so that it can never contradict itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtop.detect.engine_track import EngineTrack
from kvtop.detect.rule import count
from kvtop.detect.track import Track
from kvtop.model.snapshot import Finding

STUCK = (
    "health.stopped",
    "health.stalled",
    "health.orphan-engine",
    "health.dead-engine",
    "pressure.admission-wedged",
    "pressure.idle-pool-blocked",
)
"""Findings after which memory is not the question."""
HELD_BADLY = (
    "leak.broken-identity",
    "leak.ghost-blocks",
    "leak.ref-mismatch",
    "leak.orphan-table",
    "leak.held-past-lease",
    "leak.fence-stuck",
    "leak.zombie-request",
    "leak.imbalance",
    "leak.floor-falling",
    "pressure.blocked-by-parked",
    "pressure.hog",
)
"""Findings that say who keeps blocks that others need; the surest first."""
TOO_LITTLE = (
    "pressure.never-fits",
    "pressure.preemption-storm",
    "pressure.kv-full",
    "pressure.thrash",
)
"""Findings that say that blocks are short."""
LOST_SHARE = 10.0
"""Percent of the pool: less than this held badly does not explain a full pool."""
FULL_PERCENT = 95.0
"""Percent of the pool in use: from here on it is not called well while requests wait."""
ROOM_PERCENT = 85.0
"""Percent of the GPU: below it there is room for a larger reservation."""

NAMES = {
    "diagnosis.too-little-memory": "Too little memory for this load",
    "diagnosis.memory-held-badly": "Memory is held badly",
    "diagnosis.memory-fine": "Nothing is wrong with memory",
    "diagnosis.engine-stuck": "The engine is stuck, stopped or gone",
    "diagnosis.unknown": "Cannot tell",
}
"""Every verdict with its opening words."""
MEANING = (
    "The diagnosis is one line for each engine. It is worked out from the findings that hold and "
    "from the numbers of the moment: is the pool too small for the load, do blocks stay with those "
    "who should not have them, or is memory not the question? It names one thing to change, or "
    "none. When blocks are short and some are held badly, the share of those decides: under "
    f"{LOST_SHARE:g} % of the pool they do not explain a full pool."
)
"""What a diagnosis is, for `kvtop explain`."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """What decides, as text by name, in the order told."""

    evidence: dict[str, str]
    """All of it."""

    def line(self) -> str:
        """In one line."""
        return ", ".join(f"{name} {value}" for name, value in self.evidence.items())


def _numbers(engine: EngineTrack) -> Numbers:
    told: dict[str, str] = {}
    used, counts, metrics = engine.kv_used_percent, engine.counts, engine.metrics
    if used is not None:
        told["KV use"] = f"{used:.0f} %"
    if counts is not None:
        told["free + cached"] = f"{counts.free + counts.cached} blocks"
        told["held"] = str(counts.held)
        told["ghost"] = str(counts.ghost)
    if engine.probe_fresh and engine.engine.requests is not None:
        told["waiting"] = str(len(engine.requests.totals.waiting))
    elif metrics is not None and metrics.waiting is not None:
        told["waiting"] = str(metrics.waiting)
    preempted = engine.counter_delta("preemptions", 30.0) if engine.probe_fresh else None
    if preempted is None and engine.metrics_fresh:
        preempted = engine.pages.delta(0, 30.0)
    if preempted is not None:
        told["preemptions in 30 s"] = f"{preempted:.0f}"
    return Numbers(told)


def _first(findings: list[Finding], names: tuple[str, ...]) -> Finding | None:
    for name in names:
        for finding in findings:
            if finding.rule == name:
                return finding
    return None


def _blocks_lost(engine: EngineTrack, findings: list[Finding]) -> int:
    """Blocks that the findings on bad holding are about; each counted once."""
    ids: set[int] = set()
    requests: set[str] = set()
    for finding in findings:
        if finding.rule in HELD_BADLY:
            ids.update(finding.block_ids)
            requests.update(finding.request_ids)
    rows = engine.engine.requests or ()
    return len(ids) + sum(r.blocks or 0 for r in rows if r.id in requests)


def _room_on_gpu(track: Track, engine: EngineTrack) -> bool | None:
    """Whether the GPU of this engine has room left. None: not known."""
    pid = engine.engine.pid
    uses = [
        gpu.used_percent
        for gpu in track.gpus.values()
        if gpu.used_percent is not None
        and not gpu.gpu.mem_is_system
        and any(p.engine_pid == pid and pid is not None for p in gpu.gpu.processes or ())
    ]
    return max(uses) < ROOM_PERCENT if uses else None


def _knob_for_more(track: Track, engine: EngineTrack, finding: Finding) -> str:
    """The one thing to change when blocks are short."""
    counts, size = engine.counts, engine.engine.block_size
    if finding.rule == "pressure.never-fits" and counts is not None and size:
        return f"set --max-model-len to {counts.usable * size} at most"
    if _room_on_gpu(track, engine):
        return "raise --gpu-memory-utilization (the GPU has room)"
    running = len(engine.requests.totals.running) if engine.probe_fresh else 0
    limit = engine.engine.max_num_seqs
    storm = finding.rule in ("pressure.preemption-storm", "pressure.thrash")
    if storm and running > 1 and limit is not None:
        return f"lower --max-num-seqs from {limit} to {max(1, min(limit, running) - 1)}"
    if storm:
        return "lower --max-num-seqs"
    return "store the KV cache smaller (--kv-cache-dtype fp8)"


def diagnose(track: Track, engine: EngineTrack, findings: list[Finding]) -> Finding | None:
    """The diagnosis of one engine.

    Args:
        track: The record.
        engine: The engine.
        findings: What holds for it now.
    """
    numbers = _numbers(engine)

    def verdict(
        name: str, why: str, knob: str, severity: str = "info", cause: Finding | None = None
    ) -> Finding:
        line = numbers.line()
        text = NAMES[name] + (f" ({line})" if line else "") + (f": {why}" if why else ".")
        return Finding(
            rule=name,
            severity=severity,
            since_s=track.now_s if cause is None else cause.since_s,
            engine_pid=engine.engine.pid,
            summary=text,
            evidence=numbers.evidence | ({"decided by": cause.rule} if cause else {}),
            next_step=knob,
            block_ids=cause.block_ids if cause else (),
            request_ids=cause.request_ids if cause else (),
        )

    stuck = _first(findings, STUCK)
    if stuck is not None:
        return verdict(
            "diagnosis.engine-stuck", stuck.summary, stuck.next_step, stuck.severity, stuck
        )
    if engine.kv_used_percent is None:
        return verdict(
            "diagnosis.unknown",
            "neither the probe nor moving gauges can be read now.",
            engine.engine.probe_reason or "",
        )
    bad, short = _first(findings, HELD_BADLY), _first(findings, TOO_LITTLE)
    counts = engine.counts
    if bad is not None and short is not None and counts is not None and counts.usable > 0:
        # Both hold: would the pool be short without what is held badly?
        lost = _blocks_lost(engine, findings)
        share = 100.0 * lost / counts.usable
        if share < LOST_SHARE and bad.rule != "leak.broken-identity":
            numbers.evidence["held badly"] = f"{share:.1f} % of the pool"
            bad = None
    if bad is not None:
        return verdict("diagnosis.memory-held-badly", bad.summary, bad.next_step, bad.severity, bad)
    if short is not None:
        knob = _knob_for_more(track, engine, short)
        return verdict("diagnosis.too-little-memory", f"{knob}.", knob, short.severity, short)
    if counts is not None and counts.ghost:
        # A block can be a ghost for a moment; that it is one now is no proof of health either.
        ghosts = count(counts.ghost, "block is a ghost", "blocks are ghosts")
        return verdict("diagnosis.unknown", f"{ghosts} now; watching whether they stay.", "")
    waiting = len(engine.requests.totals.waiting) if engine.probe_fresh else None
    if counts is None:
        # Gauges count blocks in use; whose they are, and whether they come back, is not in them.
        return verdict(
            "diagnosis.unknown",
            "the gauges show nothing wrong, and lost or held blocks are not in them.",
            engine.engine.probe_reason or "",
        )
    if engine.kv_used_percent >= FULL_PERCENT and waiting:
        queue = count(waiting, "request waits", "requests wait")
        return verdict(
            "diagnosis.unknown", f"the pool is full now and {queue}; watching whether it stays.", ""
        )
    why = (
        ""
        if not waiting
        else (f"{count(waiting, 'request waits its turn', 'requests wait their turn')}.")
    )
    return verdict("diagnosis.memory-fine", why, "")
