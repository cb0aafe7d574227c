"""Where this vLLM keeps each fact: found by what objects offer, never by version.

A finder tries the known places in turn. What none of them has is named in `missing`,
and the values that would need it are null on the wire. Places were read from vLLM 0.8.5
to 0.32 (vllm/v1/core/*.py, vllm/v1/core/sched/*.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter
from typing import Any

POSITIONAL_KINDS = frozenset(
    {
        "FullAttention",
        "SlidingWindow",
        "ChunkedLocalAttention",
        "RSWA",
        "MLAAttention",
        "SinkFullAttention",
    }
)
"""Managers whose table entry `i` holds the tokens from `i * block_size` on."""


GROWING_KINDS = POSITIONAL_KINDS - {"RSWA"} | {"CrossAttention"}
"""Managers that change no entry of a table in place, but for nulling from the front."""


REQUEST_FIELDS = (
    "arrival_time",
    "num_prompt_tokens",
    "num_output_tokens",
    "max_tokens",
    "num_computed_tokens",
    "num_tokens",
    "num_output_placeholders",
    "num_preemptions",
    "priority",
    "lora_request",
    "num_cached_tokens",
    "prefill_stats",
)
"""Fields of vLLM's requests that are read besides its id and status, where it has them."""


def path(obj: Any, *names: str) -> Any:
    """Follows attributes; None as soon as one is absent.

    Args:
        obj: Where to start.
        names: Attribute names in order.
    """
    for name in names:
        try:
            obj = getattr(obj, name, None)
        except Exception:
            return None
        if obj is None:
            return None
    return obj


def as_int(value: Any) -> int | None:
    """The value when it is a plain integer, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_text(value: Any) -> str | None:
    """The value when it is text, else None."""
    return value if isinstance(value, str) else None


class PoolFacts:
    """One block pool and how to read its blocks."""

    def __init__(self, pool: Any, index: int) -> None:
        self.pool = pool
        self.index = index
        self.blocks: list[Any] = pool.blocks
        self.queue = path(pool, "free_block_queue")
        medium = as_text(path(pool, "medium"))
        self.label = medium.lower() if medium else ("gpu" if index == 0 else f"pool {index}")
        sample = self.blocks[0]
        self.hash_name = "_block_hash" if hasattr(sample, "_block_hash") else "block_hash"
        self.get_hash: Callable[[Any], Any] = attrgetter(self.hash_name)
        self.marks_null = hasattr(sample, "is_null")  # From 0.9 on.
        self.has_pool_name = hasattr(sample, "pool")
        self.has_links = hasattr(sample, "next_free_block") and hasattr(sample, "prev_free_block")
        # With sentinels at both ends each queued block has a next one. Without, the last has
        # none, and the links alone do not tell it from a block outside the queue.
        self.has_sentinel = path(self.queue, "fake_free_list_tail") is not None

    def nulls(self, blocks: list[Any]) -> list[bool]:
        """For each block whether it is a null block."""
        if self.marks_null:
            return [b.is_null for b in blocks]
        null = self.pool.null_block
        return [b is null for b in blocks]

    def real(self, blocks: Any) -> int:
        """How many of these blocks are not null blocks."""
        return self.nulls(blocks).count(False)

    def free_queue(self) -> int | None:
        """Length of vLLM's own free queue."""
        return as_int(path(self.queue, "num_free_blocks"))

    def unlinked_tail(self) -> int:
        """Id of a queued block without a next one; -1: there is none."""
        if self.has_sentinel:
            return -1
        tail = as_int(path(self.queue, "free_list_tail", "block_id"))
        return -1 if tail is None else tail


class GroupFacts:
    """One KV-cache group: a manager with one block table a request."""

    def __init__(self, index: int, owner: Any, pool_index: int, block_size: int | None) -> None:
        self.index = index
        self.owner = owner
        self.pool_index = pool_index
        name = type(owner).__name__
        kind = name.removesuffix("Manager")
        self.kind = "FullAttention" if kind in ("KVCache", "") else kind
        own = as_int(path(owner, "block_size"))
        self.block_size_tokens = own if own is not None else block_size
        window = as_int(path(owner, "sliding_window"))
        if window is None:
            window = as_int(path(owner, "kv_cache_spec", "sliding_window"))
        if window is None:
            window = as_int(path(owner, "specialized_manager", "sliding_window"))  # 0.8
        self.sliding_window_tokens = window
        # What these do to a table: append; null from the front; copy on write, which is watched.
        self.grows_only = self.kind in GROWING_KINDS
        self.windowed = self.kind != "FullAttention" or window is not None
        self.positional = self.kind in POSITIONAL_KINDS and self.block_size_tokens is not None

    @property
    def tables(self) -> dict[str, list[Any]]:
        """Request id to blocks. Never index it: in vLLM it is a defaultdict."""
        tables: dict[str, list[Any]] = self.owner.req_to_blocks
        return tables

    def overlaid(self, request_id: str) -> bool:
        """Whether residency changes lie over the table (HiSparse, 0.31+)."""
        changes = getattr(self.owner, "residency_changes", None)
        return bool(changes and changes.get(request_id))

    def row(self, request_id: str, table: list[Any]) -> list[Any]:
        """The table with residency changes applied, as `get_residency_row` does."""
        changes = self.owner.residency_changes.get(request_id) or {}
        return [changes.get(i, block) for i, block in enumerate(table)]


class EngineFacts:
    """Everything that the probe reads of an engine core, and what it did not find.

    Args:
        engine: An object with `.scheduler` (vLLM's EngineCore), or anything like it.

    Raises:
        LookupError: It has no scheduler with a block pool (yet).
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.scheduler = path(engine, "scheduler")
        self.manager = path(self.scheduler, "kv_cache_manager")
        if not isinstance(path(self.scheduler, "requests"), dict):
            raise LookupError("no scheduler with requests")
        first = path(self.manager, "block_pool") or path(self.manager, "coordinator", "block_pool")
        if not path(first, "blocks"):
            raise LookupError("no block pool")
        self.found: list[str] = ["block pool"]
        self.missing: list[str] = []
        self.pools: list[PoolFacts] = [PoolFacts(first, 0)]
        self.groups: list[GroupFacts] = []
        self._find_groups()
        pool = self.pools[0]
        self._note("free queue", pool.free_queue() is not None and pool.has_links)
        self._note("block hashes", hasattr(pool.blocks[0], pool.hash_name))
        self.has_fences = hasattr(self.scheduler, "deferred_frees")
        self._note("deferred frees", self.has_fences)
        self.waiting_names = [
            name
            for name in ("waiting", "skipped_waiting", "kv_holding_waiting", "deferred_waiting")
            if hasattr(self.scheduler, name)
        ]
        self._note("waiting queues", "waiting" in self.waiting_names)
        self.deferred_name = next(
            (n for n in ("deferred_waiting", "skipped_waiting") if n in self.waiting_names), None
        )
        self._note("deferred requests", self.deferred_name is not None)
        self._note("pause state", hasattr(self.scheduler, "_pause_state"))
        self.connector = path(self.scheduler, "connector")
        self.block_size = self._block_size()
        self._note("block size", self.block_size is not None)
        self.block_bytes = self._block_bytes()
        self._note("block bytes", self.block_bytes is not None)

    def _note(self, name: str, there: bool) -> None:
        (self.found if there else self.missing).append(name)

    def _block_size(self) -> int | None:
        sizes = [g.block_size_tokens for g in self.groups if g.block_size_tokens]
        if sizes:
            return min(sizes)
        size = as_int(path(self.scheduler, "block_size"))
        return size if size is not None else as_int(path(self.manager, "block_size"))

    def _find_groups(self) -> None:
        managers: Iterable[Any] = path(self.manager, "coordinator", "single_type_managers") or ()
        managers = list(managers)
        owners = [o for o in managers if hasattr(o, "req_to_blocks")]
        if not owners:
            single = path(self.manager, "single_type_manager")
            owners = [o for o in (single, self.manager) if hasattr(o, "req_to_blocks")][:1]
        fallback = as_int(path(self.scheduler, "block_size"))
        for index, owner in enumerate(owners):
            pool = path(owner, "block_pool") or self.pools[0].pool
            group_id = as_int(path(owner, "kv_cache_group_id"))
            self.groups.append(
                GroupFacts(
                    index if group_id is None else group_id, owner, self._pool(pool), fallback
                )
            )
        # With only some of them nothing can be said of who holds a block.
        self.has_tables = bool(self.groups) and len(owners) >= len(managers)
        self._note("block tables", self.has_tables)

    def _pool(self, pool: Any) -> int:
        for known in self.pools:
            if known.pool is pool:
                return known.index
        self.pools.append(PoolFacts(pool, len(self.pools)))
        return len(self.pools) - 1

    def pool_of(self, block: Any) -> int:
        """Index of the pool that a block belongs to."""
        if len(self.pools) > 1:
            pool = getattr(block, "pool", None)
            for known in self.pools:
                if known.pool is pool:
                    return known.index
        return 0

    def fences(self) -> list[Any]:
        """Blocks out of all tables that a step in flight still may write.

        `Scheduler.deferred_frees` (0.24+) and copies on write not yet handed out
        (`_pending_cow_copies`, 0.31+).
        """
        held: list[Any] = []
        deferred = getattr(self.scheduler, "deferred_frees", None)
        if deferred:
            held.extend(chain.from_iterable(blocks for _, blocks in list(deferred)))
        for group in self.groups:
            pairs = getattr(group.owner, "_pending_cow_copies", None)
            if pairs:
                held.extend(chain.from_iterable(list(pairs)))
        return held

    def deferred(self) -> list[Any]:
        """Requests that the last scheduling pass skipped, or that wait for something."""
        if self.deferred_name is None:
            return []
        queue = getattr(self.scheduler, self.deferred_name)
        # Iterating a priority queue of vLLM pops a copy of its heap: slow, and order is no matter.
        return list(getattr(queue, "_heap", queue))

    def pause_name(self) -> str | None:
        """Name of the pause state, for example `UNPAUSED`. None: not offered (before 0.17)."""
        return as_text(path(self.scheduler, "_pause_state", "name"))

    def sleeping(self) -> bool:
        """Whether the executor says that it sleeps."""
        flag = path(self.engine, "model_executor", "is_sleeping")
        return flag is True

    def _config(self, *names: str) -> Any:
        value = path(self.scheduler, "vllm_config", *names)
        return value if value is not None else path(self.engine, "vllm_config", *names)

    def _block_bytes(self) -> int | None:
        """Bytes a block in all layers and workers, from vLLM's own allocation plan."""
        plain = as_int(path(self.engine, "block_bytes"))
        if plain is not None:
            return plain
        config = path(self.scheduler, "kv_cache_config") or path(self.manager, "kv_cache_config")
        blocks = as_int(path(config, "num_blocks"))
        tensors = path(config, "kv_cache_tensors") or path(config, "tensors")
        if not blocks or not tensors:
            return None
        if isinstance(tensors, dict):
            tensors = list(tensors.values())
        device = [t for t in tensors if not getattr(t, "host_resident", False)]
        sizes = [as_int(getattr(t, "size", None)) for t in device]
        known = [s for s in sizes if s is not None]
        if not known or len(known) != len(sizes):
            return None
        # Since layer strides exist (0.31+), `size` is that of the one allocation they all share.
        total = max(known) if hasattr(device[0], "layer_stride") else sum(known)
        # The plan is one worker's. Pipeline stages may differ, so theirs cannot be added up.
        if (as_int(self._config("parallel_config", "pipeline_parallel_size")) or 1) > 1:
            return None
        workers = as_int(self._config("parallel_config", "tensor_parallel_size")) or 1
        return total // blocks * workers

    def identity(self, index: int | None) -> dict[str, Any]:
        """What does not change while the engine lives, in wire names.

        Args:
            index: Data-parallel rank when the caller knows it.
        """
        if index is None:
            index = as_int(path(self.engine, "engine_index"))
        if index is None:
            index = as_int(self._config("parallel_config", "data_parallel_rank")) or 0
        caching = path(self.pools[0].pool, "enable_caching")
        if not isinstance(caching, bool):
            caching = self._config("cache_config", "enable_prefix_caching")
        return {
            "index": index,
            "model": self.model(),
            "vllm_version": vllm_version() or as_text(path(self.engine, "vllm_version")),
            "block_size": self.block_size,
            "block_bytes": self.block_bytes,
            "max_model_len": as_int(path(self.scheduler, "max_model_len")),
            "max_num_seqs": as_int(path(self.scheduler, "max_num_running_reqs"))
            or as_int(path(self.scheduler, "scheduler_config", "max_num_seqs")),
            "prefix_caching": caching if isinstance(caching, bool) else None,
            "groups": [
                {
                    "index": g.index,
                    "kind": g.kind,
                    "block_size_tokens": g.block_size_tokens,
                    "sliding_window_tokens": g.sliding_window_tokens,
                }
                for g in self.groups
            ],
        }

    def model(self) -> str | None:
        """Served model name, else the model's."""
        served = self._config("model_config", "served_model_name")
        if isinstance(served, (list, tuple)) and served:
            served = served[0]
        for value in (served, self._config("model_config", "model"), path(self.engine, "model")):
            text = as_text(value)
            if text:
                return text
        return None


def vllm_version() -> str | None:
    """Version string of the vLLM in this process; it is never imported for that."""
    return as_text(getattr(sys.modules.get("vllm"), "__version__", None))
