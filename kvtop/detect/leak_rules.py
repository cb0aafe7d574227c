"""The rules of the leak family that name blocks or requests, in words."""

from __future__ import annotations

from kvtop.detect import held, leaks
from kvtop.detect.rule import Rule

RULES = (
    Rule(
        name="leak.ghost-blocks",
        severity="warning",
        title="Blocks that nobody owns and that are not free",
        explanation="A block is a ghost when its ref count is above zero and no request's table "
        "holds it, or when its ref count is zero and it is not in the free queue. vLLM has lost "
        "it: it comes back only with a restart. Blocks kept by a connector or waiting for the "
        "fence of a step are not ghosts, they are held.",
        starts="the same blocks are ghosts in {ghost_idle_samples} in a row of an idle engine, or "
        "for {ghost_busy_s} and {ghost_busy_steps} under load; critical from "
        "{ghost_critical_percent} of the pool",
        clears="the blocks are free or owned again for {clear_s}",
        next_step="Record a session for a bug report (key R). If the pool runs out before a quiet "
        "hour, drain this engine and restart it.",
        disproof="Any of these block ids is seen free, or in a request's table, later on.",
        needs="probe",
        thresholds=(
            "ghost_idle_samples",
            "ghost_busy_s",
            "ghost_busy_steps",
            "ghost_critical_percent",
        ),
        engine=leaks.ghost_blocks,
    ),
    Rule(
        name="leak.ref-mismatch",
        severity="warning",
        title="A ref count that is not the number of holders",
        explanation="Each table that holds a block, and each fence that waits with it, counts as "
        "one reference. A count above that number keeps the block when its requests end; a count "
        "below it frees the block under a running request, which corrupts answers.",
        starts="the same blocks differ for {mismatch_s} and {mismatch_steps}; critical when a "
        "count is too low",
        clears="the counts agree for {clear_s}",
        next_step="Record a session for a bug report (key R); name the block ids and the requests "
        "that hold them.",
        disproof="The ref counts agree again without a restart and no ghost stays behind.",
        needs="probe",
        thresholds=("mismatch_s", "mismatch_steps"),
        engine=leaks.ref_mismatch,
    ),
    Rule(
        name="leak.broken-identity",
        severity="critical",
        title="The pool does not add up",
        explanation="Free and cached blocks together are vLLM's own free queue, and the states "
        "together are the pool. Where they are not, or where more than 100 % is in use, vLLM's "
        "own accounts are wrong.",
        starts="two sides that must be equal differ for {identity_s}",
        clears="they are equal for {clear_s}",
        next_step="Do not trust this engine's figures. Record a session (key R) and restart it.",
        disproof="The next cuts add up without any change of the engine.",
        needs="probe, or metrics",
        thresholds=("identity_s",),
        for_s="identity_s",
        engine=leaks.broken_identity,
    ),
    Rule(
        name="leak.orphan-table",
        severity="warning",
        title="A block table without a request",
        explanation="The KV cache manager has a block table for a request id that the scheduler no "
        "longer knows. Its blocks cannot come back, since nobody will free that table.",
        starts="the scheduler does not know a table's request for {orphan_table_s}",
        clears="the table is gone for {clear_s}",
        next_step="Record a session for a bug report (key R); look for aborts of these request ids "
        "in the server's log.",
        disproof="The request shows up in the scheduler again, or its table is freed.",
        needs="probe",
        thresholds=("orphan_table_s",),
        engine=leaks.orphan_table,
    ),
    Rule(
        name="leak.zombie-request",
        severity="warning",
        title="A request that runs on without its client",
        explanation="The client of a request went away, and the abort never reached the engine. It "
        "generates until its token limit and keeps its blocks until then. This is only said when "
        "every API server of the engine was asked.",
        starts="no API server knows the request for {zombie_s}",
        clears="the request ends, or its client is there again, for {clear_s}",
        next_step="Abort the request, or let it run to its limit; look for lost aborts in the API "
        "server's log.",
        disproof="An API server lists the request id among its live requests.",
        needs="probe in the engine and in every API server",
        thresholds=("zombie_s",),
        engine=leaks.zombie_request,
    ),
    Rule(
        name="leak.held-past-lease",
        severity="warning",
        title="Blocks kept by a KV connector past its lease",
        explanation="In prefill/decode disaggregation a connector keeps the blocks of finished or "
        "waiting requests until the other side has read or written them, at most for its lease. "
        "When the completion never comes the blocks stay. The lease assumed is the longest of "
        "vLLM's own connectors; the finding says whose.",
        starts="a connector keeps blocks for longer than {lease_s} and {lease_grace_s}",
        clears="the blocks are free again for {clear_s}",
        next_step="Look at the other side of the transfer (decode instance gone, request aborted "
        "there). Set `lease_s` in [findings] when this connector's lease is another one.",
        disproof="The transfer completes, or the connector's lease is longer than assumed.",
        needs="probe",
        thresholds=("lease_s", "lease_grace_s"),
        engine=held.held_past_lease,
    ),
    Rule(
        name="leak.delayed-free",
        severity="info",
        title="Blocks kept by a KV connector within its lease: not a leak",
        explanation="Blocks stay after a request's end while a connector still moves them. That is "
        "how it works; the age beside the lease tells when it is over.",
        starts="a connector keeps blocks for {delayed_free_s}",
        clears="no such block is left for {clear_s}",
        next_step="Nothing. If it hurts, shorten the connector's timeout.",
        disproof="The blocks stay past the lease (see leak.held-past-lease).",
        needs="probe",
        thresholds=("delayed_free_s", "lease_s"),
        engine=held.delayed_free,
    ),
    Rule(
        name="leak.fence-stuck",
        severity="warning",
        title="Freed blocks that wait for a step that is over",
        explanation="With steps in flight vLLM puts the blocks of finished requests into a queue "
        "until the step that may still write them is over: one or two steps. Longer than that, "
        "the queue is stuck, and everything behind it too.",
        starts="the same blocks wait for {fence_s} and {fence_steps}",
        clears="they are free for {clear_s}",
        next_step="Record a session for a bug report (key R); if the pool runs out, restart this "
        "engine.",
        disproof="The blocks become free while the engine goes on.",
        needs="probe",
        thresholds=("fence_s", "fence_steps"),
        engine=held.fence_stuck,
    ),
)

SPECIFIC = (
    "leak.ghost-blocks",
    "leak.ref-mismatch",
    "leak.orphan-table",
    "leak.held-past-lease",
    "leak.fence-stuck",
    "leak.broken-identity",
)
"""Rules that name the blocks; what follows from their findings is told by them alone."""
