"""The other witness: what vLLM's own objects say at each scheduler step.

A vLLM plugin for tests. It wraps `Scheduler.schedule` on the class, below the probe's
wrapper on the instance, so that both look at the same moment; it walks everything from
scratch and shares no code with the probe. One JSON line a step goes to $KVTOP_ORACLE.
"""

from __future__ import annotations

import json
import os
from typing import Any


def register() -> None:
    """Entry point; does nothing unless $KVTOP_ORACLE names a file."""
    path = os.environ.get("KVTOP_ORACLE")
    if not path:
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    original = Scheduler.schedule
    if getattr(original, "is_oracle", False):
        return

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        step = probe_step(self)
        if step is not None:
            with open(path, "a") as file:
                file.write(json.dumps({"step": step, **look(self)}) + "\n")
        return original(self, *args, **kwargs)

    schedule.is_oracle = True  # type: ignore[attr-defined]
    Scheduler.schedule = schedule


def probe_step(scheduler: Any) -> int | None:
    """The probe's count of steps before this one. None: no probe."""
    wrapper = vars(scheduler).get("schedule")
    for cell in getattr(wrapper, "__closure__", None) or ():
        steps = getattr(cell.cell_contents, "steps", None)
        if isinstance(steps, int):
            # The probe's wrapper has counted this step already.
            return steps - 1
    return None


def look(scheduler: Any) -> dict[str, Any]:
    """Everything about the pool and the tables, read directly."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    queue = pool.free_block_queue
    free = []
    block = queue.fake_free_list_head.next_free_block
    while block is not queue.fake_free_list_tail:
        free.append(block.block_id)
        block = block.next_free_block
    return {
        "free": free,
        "num_free": queue.num_free_blocks,
        "usage": manager.usage,
        "refs": [b.ref_cnt for b in pool.blocks],
        "hashed": [b.block_id for b in pool.blocks if b.block_hash is not None],
        "null": pool.null_block.block_id,
        "tables": [
            {rid: [b.block_id for b in blocks] for rid, blocks in m.req_to_blocks.items()}
            for m in manager.coordinator.single_type_managers
        ],
        "deferred": [[b.block_id for b in blocks] for _, blocks in scheduler.deferred_frees],
        "statuses": {rid: r.status.name for rid, r in scheduler.requests.items()},
        "running": len(scheduler.running),
    }
