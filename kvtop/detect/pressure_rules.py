"""The rules of the pressure family, in words."""

from __future__ import annotations

from kvtop.detect import admission, pressure
from kvtop.detect.rule import Rule

RULES = (
    Rule(
        name="pressure.kv-full",
        severity="warning",
        title="The KV pool is full",
        explanation="Nearly all blocks are held by requests; cached blocks, which can be taken at "
        "any time, do not count. New requests wait for blocks, and a running one that needs "
        "another block preempts a younger one.",
        starts="use above {kv_full_percent} for {kv_full_s}",
        clears="below {kv_full_clear_percent} for {clear_s}",
        next_step="See the diagnosis line for the one knob that helps.",
        disproof="Nothing waits and nothing is preempted at this use.",
        needs="probe, or metrics that move",
        thresholds=("kv_full_percent", "kv_full_clear_percent", "kv_full_s"),
        for_s="kv_full_s",
        engine=pressure.kv_full,
    ),
    Rule(
        name="pressure.preemption-storm",
        severity="warning",
        title="Preemption storm",
        explanation="A preempted request gives all its blocks back and computes its tokens again. "
        "In a healthy engine about 7 % of requests are preempted, nearly all of them once, and "
        "none more than four times. Here it is far more, and the engine works for nothing.",
        starts="{storm_count} preemptions in {storm_window_s} and {storm_per_request} a request",
        clears="below {storm_clear_per_request} a request for {clear_s}",
        next_step="Lower --max-num-seqs, so that fewer requests grow at once, or give the pool "
        "more blocks; the diagnosis line says which.",
        disproof="Throughput does not change when fewer requests run at once.",
        needs="probe, or metrics",
        thresholds=(
            "storm_window_s",
            "storm_count",
            "storm_per_request",
            "storm_clear_per_request",
        ),
        engine=pressure.storm,
    ),
    Rule(
        name="pressure.thrash",
        severity="warning",
        title="A request loses its work again and again",
        explanation="The computed tokens of a request fall back again and again without a new "
        "token in between, or vLLM preempted it more often than a healthy engine ever does.",
        starts="{thrash_restarts} restarts without a new token, or {thrash_preemptions} "
        "preemptions and one more seen",
        clears="the request ends or produces tokens for {clear_s}",
        next_step="Abort this request, or run it when less else runs.",
        disproof="Its output grows steadily between the preemptions.",
        needs="probe",
        thresholds=("thrash_preemptions", "thrash_restarts"),
        yields_to=("pressure.preemption-storm",),
        engine=pressure.thrash,
    ),
    Rule(
        name="pressure.never-fits",
        severity="critical",
        title="A request that needs more than the whole pool",
        explanation="The prompt is within --max-model-len, but its blocks are more than the pool "
        "has, the null block not counted. The engine computes most of it, finds no room, starts "
        "again, and does so for ever.",
        starts="the tokens so far need more blocks than the pool has, for {clear_s}",
        clears="the request is gone for {clear_s}",
        next_step="Abort it. Lower --max-model-len to what the pool holds, so that such a request "
        "is refused at once.",
        disproof="The request finishes.",
        needs="probe",
        for_s="clear_s",
        engine=pressure.never_fits,
    ),
    Rule(
        name="pressure.alloc-failures",
        severity="info",
        title="Allocations find no room",
        explanation="The scheduler asked for blocks for a request and got none. Now and then that "
        "is how a full engine works; at most steps it means that the pool is too small for what "
        "it is asked to do.",
        starts="{alloc_failures} failures in {alloc_window_s}; a warning from {alloc_share} a step",
        clears="less than half of that for {clear_s}",
        next_step="See the diagnosis line.",
        disproof="Failures stop when the burst is over.",
        needs="probe",
        thresholds=("alloc_window_s", "alloc_failures", "alloc_share"),
        engine=pressure.alloc_failures,
    ),
    Rule(
        name="pressure.admission-wedged",
        severity="warning",
        title="Admission is wedged: places taken by requests that do not run",
        explanation="Running and deferred requests together reach --max-num-seqs, so that the "
        "scheduler admits nothing, while blocks are free. The deferred ones wait for something "
        "that does not come; /health stays green.",
        starts="nothing admitted for {wedged_s}, blocks free, all places taken, some of them by "
        "requests that do not run",
        clears="a request is admitted, for {clear_s}",
        next_step="Look at what the deferred requests wait for (their status); abort those.",
        disproof="A request is admitted while the deferred ones stay.",
        needs="probe",
        thresholds=("wedged_s",),
        engine=admission.wedged,
    ),
    Rule(
        name="pressure.idle-pool-blocked",
        severity="warning",
        title="Requests wait although blocks and places are free",
        explanation="The first waiting request would fit, places are free, and nothing is "
        "admitted. More memory would not help: the scheduler does not schedule.",
        starts="nothing admitted for {wedged_s} with room for the least demanding request",
        clears="a request is admitted, for {clear_s}",
        next_step="Take a flame graph of the engine core (key f) and record a session (key R); "
        "then restart the engine.",
        disproof="The request needs more than its blocks: an adapter slot, an encoder budget.",
        needs="probe",
        thresholds=("wedged_s",),
        engine=admission.idle_pool_blocked,
    ),
    Rule(
        name="pressure.blocked-by-parked",
        severity="critical",
        title="Parked requests hold the blocks that the next one needs",
        explanation="Nothing runs. The first waiting request does not fit beside the blocks that "
        "requests keep which wait for a transfer or are finished, and those wait as well.",
        starts="nothing runs and nothing is admitted for {wedged_s}, parked blocks would make the "
        "room",
        clears="a request is admitted, for {clear_s}",
        next_step="Abort the parked requests named here, the largest first.",
        disproof="The parked requests go on by themselves.",
        needs="probe",
        thresholds=("wedged_s",),
        engine=admission.blocked_by_parked,
    ),
    Rule(
        name="pressure.hog",
        severity="warning",
        title="One request or one tenant holds most of the pool",
        explanation="Others wait for room while one request, or one LoRA adapter's requests, hold "
        "most blocks.",
        starts="{hog_percent} of all blocks with one of them, pool use above {hog_use_percent} and "
        "others waiting, for {hog_s}",
        clears="one of these is not so for {clear_s}",
        next_step="Limit that tenant's requests before the server, or abort the request.",
        disproof="Others are admitted at the usual rate all the same.",
        needs="probe",
        thresholds=("hog_percent", "hog_use_percent", "hog_s"),
        for_s="hog_s",
        engine=pressure.hog,
    ),
)
