"""Breaks a real vLLM on purpose, one way at a time, for tests of detectors. Never install it.

A vLLM plugin. `KVTOP_FAULT` names one fault, or several with commas, and `KVTOP_FAULT_DIR` a
directory: a fault is on while the file `<name>.on` is there, and undone when it goes. What was
broken (block and request ids) is written to `<name>.json` there, so that a test can ask for
exactly that.

    lose-free      a free of one block is dropped, three times at most
    lose-many      every second block of a table is never freed, 150 at most
    forget         the scheduler forgets two finished requests and leaves their tables
    keep-sent      a KV connector never says that two finished requests' blocks are sent
                   (kvtop_fault_connector)
    bump-ref       the ref count of one block of the longest running request is raised
    lose-abort     abort messages are dropped in the engine core
    keep-deferred  the blocks of a finished request wait for a step that never comes, twice
    wedge          the scheduler admits nothing
    stall          the engine hangs before a step
    leak-host      the engine core keeps 4 MB/s of host memory
    leak-tensor    the worker keeps 4 MB/s of tensors
    die            the engine core raises an exception inside a step, and so ends

It wraps methods on the classes of vLLM 0.32 (vllm/v1/core/block_pool.py, core/sched/scheduler.py,
engine/core.py, worker/cpu_worker.py), below the probe's wrappers on the instances.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = (
    "lose-free",
    "lose-many",
    "forget",
    "bump-ref",
    "lose-abort",
    "keep-deferred",
    "wedge",
    "stall",
    "leak-host",
    "leak-tensor",
    "die",
)
"""All faults."""
RATE_BYTES_S = 4_000_000
"""Speed of the leaks of memory."""
NEVER = 10**15
"""A step that is never reached."""


class Switch:
    """The trigger file, and the account of what was broken."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.blocks: list[int] = []
        self.requests: list[str] = []

    @property
    def on(self) -> bool:
        """Whether the fault is to be there now."""
        return (self.folder / f"{self.name}.on").exists()

    def tell(self) -> None:
        """Write down what is broken now."""
        part = self.folder / f"{self.name}.{os.getpid()}"
        text = {"pid": os.getpid(), "blocks": self.blocks, "requests": self.requests}
        part.write_text(json.dumps(text))
        part.replace(self.folder / f"{self.name}.json")


def register() -> None:
    """Entry point: vLLM calls it in each of its processes, perhaps several times."""
    names, folder = os.environ.get("KVTOP_FAULT"), os.environ.get("KVTOP_FAULT_DIR")
    if not names or not folder:
        return
    for name in names.split(","):
        if name not in NAMES:
            raise ValueError(f"KVTOP_FAULT={name}: not one of {', '.join(NAMES)}")
        if name not in _PUT_ALREADY:
            _PUT_ALREADY.add(name)
            PUT[name](Switch(Path(folder), name))


_PUT_ALREADY: set[str] = set()


def _wrap(owner: type, method: str, make: Callable[[Callable[..., Any]], Any]) -> None:
    """Replace a method by `make(original)`."""
    original = getattr(owner, method)
    setattr(owner, method, functools.wraps(original)(make(original)))


def _each_step(before: Callable[[Any], None]) -> None:
    """Run something before every scheduler step."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def make(original: Callable[..., Any]) -> Any:
        def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
            before(self)
            return original(self, *args, **kwargs)

        return schedule

    _wrap(Scheduler, "schedule", make)


def lose_free(switch: Switch) -> None:
    """Withhold one block of a free; it is given back when the switch goes off."""

    def choose(blocks: list[Any], so_far: int) -> list[Any]:
        # A block with a hash could be hit again and be in a table once more.
        plain = [b for b in blocks if b.ref_cnt == 1 and b.block_hash is None and not b.is_null]
        return plain[:1] if so_far < 3 else []

    _withhold(switch, choose)


def lose_many(switch: Switch) -> None:
    """Take half of each table away before it is freed; for prompts that nobody sends again.

    Unlike `lose-free` nobody asks the pool to free these: its accounts stay open.
    """
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    withheld: list[tuple[Any, Any]] = []

    def make(original: Callable[..., Any]) -> Any:
        def free(self: Any, request_id: str) -> Any:
            table = self.req_to_blocks.get(request_id)
            if switch.on and table:
                own = [b for b in table if b.ref_cnt == 1 and not b.is_null]
                chosen = own[::2][: max(0, 150 - len(withheld))]
                taken = {id(block) for block in chosen}
                self.req_to_blocks[request_id] = [b for b in table if id(b) not in taken]
                withheld.extend((self.block_pool, block) for block in chosen)
                switch.blocks += [block.block_id for block in chosen]
                switch.tell()
            return original(self, request_id)

        return free

    def undo(_scheduler: Any) -> None:
        if withheld and not switch.on:
            for pool, block in withheld:
                pool.free_blocks([block])
            withheld.clear()
            switch.blocks.clear()
            switch.tell()

    _wrap(SingleTypeKVCacheManager, "free", make)
    _each_step(undo)


def _withhold(switch: Switch, choose: Callable[[list[Any], int], list[Any]]) -> None:
    """Leave out of each free what `choose` names, given how many are withheld already."""
    from vllm.v1.core.block_pool import BlockPool

    withheld: list[tuple[Any, Any]] = []
    plain = BlockPool.free_blocks

    def make(original: Callable[..., Any]) -> Any:
        def free_blocks(self: Any, ordered_blocks: Any) -> Any:
            blocks = list(ordered_blocks)
            chosen = choose(blocks, len(withheld)) if switch.on else []
            if chosen:
                taken = {id(block) for block in chosen}
                blocks = [block for block in blocks if id(block) not in taken]
                withheld.extend((self, block) for block in chosen)
                switch.blocks += [block.block_id for block in chosen]
                switch.tell()
            return original(self, blocks)

        return free_blocks

    def undo(_scheduler: Any) -> None:
        if withheld and not switch.on:
            for pool, block in withheld:
                plain(pool, [block])
            withheld.clear()
            switch.blocks.clear()
            switch.tell()

    _wrap(BlockPool, "free_blocks", make)
    _each_step(undo)


def forget(switch: Switch) -> None:
    """Forget finished requests, and leave their tables; they go when the switch goes off."""
    from vllm.v1.core.sched.scheduler import Scheduler

    forgotten: list[Any] = []

    def make(original: Callable[..., Any]) -> Any:
        def free_blocks(self: Any, request: Any) -> Any:
            if not switch.on or len(forgotten) >= 2:
                return original(self, request)
            del self.requests[request.request_id]
            forgotten.append(request)
            switch.requests.append(request.request_id)
            switch.tell()
            return None

        return free_blocks

    def undo(scheduler: Any) -> None:
        if forgotten and not switch.on:
            for request in forgotten:
                scheduler.kv_cache_manager.free(request)
            forgotten.clear()
            switch.requests.clear()
            switch.tell()

    _wrap(Scheduler, "_free_blocks", make)
    _each_step(undo)


def bump_ref(switch: Switch) -> None:
    """Raise a ref count; it is lowered when the switch goes off."""
    bumped: list[Any] = []

    def before(scheduler: Any) -> None:
        manager = scheduler.kv_cache_manager
        tables = manager.coordinator.single_type_managers[0].req_to_blocks
        if switch.on and not bumped and scheduler.running:
            longest = max(scheduler.running, key=lambda r: r.max_tokens)
            table = tables.get(longest.request_id)
            if table:
                block = table[-1] if len(table) == 1 else table[-2]
                block.ref_cnt += 1
                bumped.append(block)
                switch.blocks.append(block.block_id)
                switch.requests.append(longest.request_id)
                switch.tell()
        elif bumped and not switch.on:
            manager.block_pool.free_blocks([bumped.pop()])
            switch.blocks.clear()
            switch.requests.clear()
            switch.tell()

    _each_step(before)


def lose_abort(switch: Switch) -> None:
    """Drop aborts; they are delivered when the switch goes off."""
    from vllm.v1.engine.core import EngineCore

    def make(original: Callable[..., Any]) -> Any:
        def abort_requests(self: Any, request_ids: list[str]) -> Any:
            if switch.on:
                live = [r for r in request_ids if r in self.scheduler.requests]
                switch.requests += [r for r in live if r not in switch.requests]
                switch.tell()
                return None
            return original(self, request_ids)

        return abort_requests

    def undo(scheduler: Any) -> None:
        if switch.requests and not switch.on:
            from vllm.v1.request import RequestStatus

            scheduler.finish_requests(switch.requests, RequestStatus.FINISHED_ABORTED)
            switch.requests.clear()
            switch.tell()

    _wrap(EngineCore, "abort_requests", make)
    _each_step(undo)


def keep_deferred(switch: Switch) -> None:
    """Put the blocks of finished requests behind a step that never comes."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def make(original: Callable[..., Any]) -> Any:
        def free_request_blocks(self: Any, request: Any) -> Any:
            kept = sum(fence == NEVER for fence, _ in self.deferred_frees)
            if not switch.on or kept >= 2:
                return original(self, request)
            blocks = self.kv_cache_manager.pop_blocks_for_free(request)
            # Shared blocks are held by others as well and would not only wait here.
            mine = [b for b in blocks if b.ref_cnt == 1]
            self.kv_cache_manager.block_pool.free_blocks([b for b in blocks if b not in mine])
            self.deferred_frees.appendleft((NEVER, mine))
            switch.blocks += [b.block_id for b in mine]
            switch.tell()
            return None

        return free_request_blocks

    def undo(scheduler: Any) -> None:
        if switch.blocks and not switch.on:
            kept = [entry for entry in scheduler.deferred_frees if entry[0] == NEVER]
            for entry in kept:
                scheduler.deferred_frees.remove(entry)
                scheduler.kv_cache_manager.block_pool.free_blocks(reversed(entry[1]))
            switch.blocks.clear()
            switch.tell()

    _wrap(Scheduler, "_free_request_blocks", make)
    _each_step(undo)


def wedge(switch: Switch) -> None:
    """Let no request in."""
    limits: list[int] = []

    def before(scheduler: Any) -> None:
        if switch.on and not limits:
            limits.append(scheduler.max_num_active_reqs)
            scheduler.max_num_active_reqs = 0
            switch.tell()
        elif limits and not switch.on:
            scheduler.max_num_active_reqs = limits.pop()
            switch.tell()

    _each_step(before)


def stall(switch: Switch) -> None:
    """Hang before a step, with the interpreter free for others."""

    def before(scheduler: Any) -> None:
        if switch.on and scheduler.requests:
            switch.requests[:] = list(scheduler.requests)
            switch.tell()
            while switch.on:
                time.sleep(0.02)

    _each_step(before)


def die(switch: Switch) -> None:
    """Raise an exception inside a step, with the text of a prompt in its message."""

    def before(scheduler: Any) -> None:
        if switch.on and scheduler.running:
            switch.requests[:] = [request.request_id for request in scheduler.running]
            tables = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
            switch.blocks[:] = [b.block_id for r in switch.requests for b in tables.get(r, ())]
            switch.tell()
            raise RuntimeError("the prompt was: xxxx-secret-prompt-xxxx")

    _each_step(before)


def _leak(switch: Switch, keep: Callable[[int], Any]) -> Callable[[], None]:
    """Something to call often: starts one thread that keeps memory while the switch is on."""
    started: list[threading.Thread] = []

    def run() -> None:
        kept: list[Any] = []
        told = False
        while True:
            time.sleep(0.25)
            if switch.on:
                kept.append(keep(RATE_BYTES_S // 4))
                if not told:
                    switch.tell()
                    told = True
            elif kept:
                kept.clear()
                told = False

    def start() -> None:
        if not started:
            started.append(threading.Thread(target=run, name="kvtop-fault", daemon=True))
            started[0].start()

    return start


def leak_host(switch: Switch) -> None:
    """Keep host memory in the engine core."""
    start = _leak(switch, lambda count: bytearray(b"\1") * count)
    _each_step(lambda _scheduler: start())


def leak_tensor(switch: Switch) -> None:
    """Keep tensors in the worker."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    def keep(count: int) -> Any:
        import torch

        return torch.ones(count, dtype=torch.uint8)

    start = _leak(switch, keep)

    def make(original: Callable[..., Any]) -> Any:
        def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            start()
            return original(self, *args, **kwargs)

        return execute_model

    _wrap(CPUWorker, "execute_model", make)


PUT: dict[str, Callable[[Switch], None]] = {
    "lose-free": lose_free,
    "lose-many": lose_many,
    "forget": forget,
    "bump-ref": bump_ref,
    "lose-abort": lose_abort,
    "keep-deferred": keep_deferred,
    "wedge": wedge,
    "stall": stall,
    "leak-host": leak_host,
    "leak-tensor": leak_tensor,
    "die": die,
}
"""Name to fault."""
