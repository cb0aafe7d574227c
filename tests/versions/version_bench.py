"""Builds and drives the real scheduler of whichever vLLM is on the path, without weights.

Constructors differ from version to version. Each is given, of everything that any of them
wants, what its own fields or parameters name.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
from types import SimpleNamespace
from typing import Any

BLOCK = 16
"""Tokens a block."""
BUDGET = 64
"""Tokens a step: a longer prompt is prefilled in chunks."""
WINDOW = 48
"""Tokens of the sliding window in the second configuration."""
HEADS, HEAD = 2, 32
PAGE = BLOCK * HEADS * HEAD * 2 * 4
"""Bytes of one block in one layer: K and V, 4 bytes a value."""


def build(cls: Any, **offered: Any) -> Any:
    """An instance of a class, given what it takes of what is offered."""
    if dataclasses.is_dataclass(cls):
        # With `InitVar`s, which `dataclasses.fields` leaves out.
        names = set(cls.__dataclass_fields__)
        needed = {
            f.name
            for f in dataclasses.fields(cls)
            if f.init
            and f.default is dataclasses.MISSING
            and f.default_factory is dataclasses.MISSING
        }
        offered = {**dict.fromkeys(needed), **offered}
    else:
        names = set(inspect.signature(cls.__init__).parameters)
    return cls(**{name: value for name, value in offered.items() if name in names})


def make_config(model: str, **more: Any) -> Any:
    """A `VllmConfig` of this version's own parts."""
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    # Older versions look for the CPU build in the metadata of the installed package, which is
    # another version's. First of all, since modules bind the platform when they are imported.
    vllm.platforms._current_platform = CpuPlatform()

    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig

    model_config = ModelConfig(
        model=model, max_model_len=2048, skip_tokenizer_init=True, dtype="float32"
    )
    config = build(
        VllmConfig,
        model_config=model_config,
        cache_config=build(
            CacheConfig, block_size=BLOCK, enable_prefix_caching=True, cache_dtype="auto"
        ),
        scheduler_config=build(
            SchedulerConfig,
            max_num_seqs=8,
            max_num_batched_tokens=BUDGET,
            max_model_len=2048,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        device_config=DeviceConfig(device="cpu"),
        **more,
    )
    # The platform may have its own ideas of these.
    config.scheduler_config.max_num_batched_tokens = BUDGET
    config.scheduler_config.enable_chunked_prefill = True
    config.scheduler_config.chunked_prefill_enabled = True
    config.cache_config.block_size = BLOCK
    config.cache_config.enable_prefix_caching = True
    return config


def make_kv_config(blocks: int, windowed: bool) -> Any:
    """A `KVCacheConfig` of one group, or of two: full attention and a sliding window."""
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        SlidingWindowSpec,
    )

    shape = {
        "block_size": BLOCK,
        "num_kv_heads": HEADS,
        "head_size": HEAD,
        "dtype": torch.float32,
    }
    if "use_mla" in FullAttentionSpec.__dataclass_fields__:
        shape["use_mla"] = False
    groups = [KVCacheGroupSpec(["layer.0"], FullAttentionSpec(**shape))]
    if windowed:
        spec = SlidingWindowSpec(**shape, sliding_window=WINDOW)
        groups.append(KVCacheGroupSpec(["layer.1"], spec))
    names = [name for group in groups for name in group.layer_names]
    # One tensor that the groups share: a block has the bytes of one layer.
    tensor = build(
        KVCacheTensor,
        size=PAGE * blocks,
        shared_by=names,
        layers=names[:1],
        layer_stride=PAGE * blocks,
        block_stride=PAGE,
    )
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[tensor], kv_cache_groups=groups)


def real_blocks(managers: Any, rid: str) -> int:
    """Blocks in a request's tables, null blocks left out."""
    tables = [m.req_to_blocks.get(rid) or () for m in managers]
    null = managers[0].block_pool.null_block
    return sum(block is not null for table in tables for block in table)


class Counted:
    """Calls of one class counted from outside, without the probe's help."""

    def __init__(self) -> None:
        self.allocated = self.evicted = self.failures = 0
        self.held: dict[str, int] = {}
        """Blocks in a request's tables when they were last given back."""

    def follow(self) -> None:
        """Wraps the classes; the probe wraps instances."""
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_manager import KVCacheManager

        def after(cls: Any, name: str, note: Any) -> None:
            original = getattr(cls, name)

            def call(this: Any, *args: Any, **kwargs: Any) -> Any:
                result = original(this, *args, **kwargs)
                note(result)
                return result

            setattr(cls, name, call)

        def allocated(blocks: Any) -> None:
            self.allocated += len(blocks)

        def evicted(did: Any) -> None:
            self.evicted += bool(did)

        def tried(blocks: Any) -> None:
            self.failures += blocks is None

        free = KVCacheManager.free

        def note_free(this: Any, request: Any) -> Any:
            tables = this.coordinator.single_type_managers
            self.held[request.request_id] = real_blocks(tables, request.request_id)
            return free(this, request)

        KVCacheManager.free = note_free
        after(BlockPool, "get_new_blocks", allocated)
        after(BlockPool, "_maybe_evict_cached_block", evicted)
        after(KVCacheManager, "allocate_slots", tried)


class Bench:
    """One scheduler, and the model runner that it would have.

    Args:
        config: From `make_config`.
        blocks: Size of the pool, the null block included.
        counted: From which the blocks of preempted requests are known.
        windowed: With a sliding-window group besides.
        seed: Of the tokens.
    """

    def __init__(
        self, config: Any, blocks: int, counted: Counted, windowed: bool = False, seed: int = 0
    ) -> None:
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        try:
            from vllm.utils.hashing import sha256
        except ImportError:
            from vllm.utils import sha256  # Until 0.11.
        init_none_hash(sha256)
        self.config = config
        self.counted = counted
        config.cache_config.num_gpu_blocks = blocks
        self.scheduler = build(
            Scheduler,
            vllm_config=config,
            kv_cache_config=make_kv_config(blocks, windowed),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.rng = random.Random(seed)
        self.count = 0
        self.steps = 0
        self.hit_tokens: dict[str, int] = {}
        """Tokens of the last admission that came from the prefix cache."""
        self.touched = 0
        """Blocks of the first group taken from the prefix cache."""
        self.preemptions = self.preempted_blocks = self.preempted_tokens = 0
        self.lost: dict[str, int] = {}
        """Blocks that a request had when it was last preempted."""
        self.connector_output: Any = None
        # What the probe takes for an engine core.
        self.engine = SimpleNamespace(
            scheduler=self.scheduler,
            vllm_config=config,
            engine_index=0,
            model_executor=SimpleNamespace(is_sleeping=False),
        )

    @property
    def pool(self) -> Any:
        """The block pool."""
        manager = self.scheduler.kv_cache_manager
        return getattr(manager, "block_pool", None) or manager.coordinator.block_pool

    @property
    def managers(self) -> list[Any]:
        """One manager a KV-cache group."""
        return list(self.scheduler.kv_cache_manager.coordinator.single_type_managers)

    def tokens(self, count: int) -> list[int]:
        """So many random tokens."""
        return [self.rng.randrange(256) for _ in range(count)]

    def add(self, prompt: int | list[int], max_tokens: int, **more: Any) -> str:
        """Adds a request of a prompt of so many random tokens, or of these."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        rid = f"r{self.count}"
        self.count += 1
        tokens = prompt if isinstance(prompt, list) else self.tokens(prompt)
        request = build(
            Request,
            request_id=rid,
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more),
            pooling_params=None,
            eos_token_id=257,
            block_hasher=self._hasher,
        )
        self.scheduler.add_request(request)
        return rid

    def abort(self, rid: str) -> None:
        """What a client's disconnect leads to."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(rid, RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> Any:
        """First half of a step."""
        before = [(request, request.num_computed_tokens) for request in self.scheduler.running]
        output = self.scheduler.schedule()
        self.steps += 1
        for request, tokens in before:
            if request.status.name == "PREEMPTED":
                blocks = self.counted.held[request.request_id]
                self.preemptions += 1
                self.preempted_blocks += blocks
                self.preempted_tokens += tokens
                self.lost[request.request_id] = blocks
        for new in output.scheduled_new_reqs:
            self._admitted(new.req_id, new.num_computed_tokens)
        again = output.scheduled_cached_reqs
        resumed = getattr(again, "resumed_req_ids", None)
        if resumed is None:
            flags = again.resumed_from_preemption
            resumed = {rid for rid, flag in zip(again.req_ids, flags, strict=True) if flag}
        for rid, computed in zip(again.req_ids, again.num_computed_tokens, strict=True):
            if rid in resumed:
                self._admitted(rid, computed)
        return output

    def _admitted(self, rid: str, computed: int) -> None:
        self.hit_tokens[rid] = computed
        self.touched += computed // BLOCK

    def update(self, output: Any) -> None:
        """Second half: each request whose tokens are all computed gets one more."""
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(output.num_scheduled_tokens)
        sampled = []
        for rid in ids:
            request = self.scheduler.requests.get(rid)
            done = request is not None and request.num_computed_tokens >= request.num_tokens
            sampled.append([self.rng.randrange(256)] if done else [])
        result = build(
            ModelRunnerOutput,
            req_ids=ids,
            req_id_to_index={rid: i for i, rid in enumerate(ids)},
            sampled_token_ids=sampled,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=self.connector_output,
        )
        self.connector_output = None
        self.scheduler.update_from_output(output, result)

    def step(self) -> Any:
        """One whole step."""
        output = self.schedule()
        self.update(output)
        return output
