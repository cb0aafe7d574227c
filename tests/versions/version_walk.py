"""The truth about a scheduler: counted from nothing, through vLLM's own accessors."""

from __future__ import annotations

from collections import Counter
from typing import Any

FREE, CACHED, USED, SHARED, HELD, GHOST, NULL = range(7)
PARKED = {"WAITING_FOR_REMOTE_KVS", "WAITING_FOR_STREAMING_REQ"}


class Truth:
    """What is so at this moment.

    Args:
        bench: The scheduler.
    """

    def __init__(self, bench: Any) -> None:
        scheduler, pool = bench.scheduler, bench.pool
        null = pool.null_block
        queued = {b.block_id for b in pool.free_block_queue.get_all_free_blocks()}
        self.free_queue = pool.get_num_free_blocks()
        self.steps = bench.steps
        self.tables: dict[str, list[list[int]]] = {}
        for position, manager in enumerate(bench.managers):
            for rid, table in manager.req_to_blocks.items():
                if table:
                    groups = self.tables.setdefault(rid, [[] for _ in bench.managers])
                    groups[position] = [b.block_id for b in table]
        live: Counter[int] = Counter()
        held: Counter[int] = Counter()
        for rid, groups in self.tables.items():
            request = scheduler.requests.get(rid)
            name = request.status.name if request is not None else ""
            idle = request is None or name.startswith("FINISHED") or name in PARKED
            for table in groups:
                (held if idle else live).update(i for i in table if i != null.block_id)
        fences: Counter[int] = Counter()
        for _, blocks in getattr(scheduler, "deferred_frees", ()):
            fences.update(b.block_id for b in blocks if b is not null)
        self.null = null.block_id
        self.states: list[int] = []
        self.refs: list[int] = []
        self.holders: list[int] = []
        for block in pool.blocks:
            i = block.block_id
            tables = live[i] + held[i]
            if block is null:
                state = NULL
            elif block.ref_cnt == 0:
                cached = block.block_hash is not None
                state = GHOST if i not in queued else CACHED if cached else FREE
            elif i in queued or not tables + fences[i]:
                state = GHOST
            elif not live[i]:
                state = HELD
            else:
                state = SHARED if tables > 1 else USED
            self.states.append(state)
            self.refs.append(0 if block is null else block.ref_cnt)
            self.holders.append(0 if block is null else tables + fences[i])
        sharing = {i for i, n in (live + held).items() if n > 1}
        self.rows = {
            rid: self._row(bench, request, sharing) for rid, request in scheduler.requests.items()
        }

    def _row(self, bench: Any, request: Any, sharing: set[int]) -> dict[str, Any]:
        status = request.status.name
        groups = self.tables.get(request.request_id, [])
        ids = [i for table in groups for i in table if i != self.null]
        left = request.num_tokens - request.num_computed_tokens
        if status == "RUNNING":
            # A step computes one token of a request that decodes, and more of one that does not.
            phase = "prefill" if left > 1 or not request.num_output_tokens else "decode"
        elif status.startswith("FINISHED") or (status in PARKED and ids):
            phase = "held"
        elif status == "PREEMPTED":
            phase = "preempted"
        else:
            phase = "waiting"
        running = status == "RUNNING"
        lost = bench.lost.get(request.request_id, 0)
        recomputes = phase in ("preempted", "prefill")
        return {
            "status": status,
            "phase": phase,
            "prompt_tokens": request.num_prompt_tokens,
            "output_tokens": len(request.output_token_ids),
            "max_tokens": request.sampling_params.max_tokens,
            "computed_tokens": request.num_computed_tokens,
            "cached_tokens": bench.hit_tokens.get(request.request_id) if running else ...,
            "blocks": len(ids),
            "shared_blocks": sum(i in sharing for i in ids),
            "slack_tokens": sum(
                max(0, len(t) * m.block_size - request.num_computed_tokens)
                for t, m in zip(groups, bench.managers, strict=False)
                if any(i != self.null for i in t)
            ),
            "preemptions": getattr(request, "num_preemptions", None),
            "owed_blocks": max(0, lost - len(ids)) if recomputes else 0,
            "priority": request.priority,
            "arrival_time_s": request.arrival_time,
        }
