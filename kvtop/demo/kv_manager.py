"""Block tables of the demo's requests: who holds which block of the pool.

Shapes and names as in vLLM 0.32: vllm/v1/core/kv_cache_manager.py,
kv_cache_coordinator.py and single_type_kv_cache_manager.py, one full-attention group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtop.demo.pool import BlockPool, KVCacheBlock
from kvtop.demo.request import Request

LoseFree = Callable[[Request, list[KVCacheBlock]], list[KVCacheBlock]]
"""Gets a request and the blocks of the table it gives up; returns those that are freed."""


@dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """What one layer's KV cache looks like."""

    block_size: int
    """Tokens a block."""
    num_kv_heads: int
    """KV heads of the model."""
    head_size: int
    """Elements a head."""
    dtype_bytes: int = 2
    """Bytes an element."""

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in one layer: keys and values."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class KVCacheGroupSpec:
    """Layers that share one block table."""

    layer_names: list[str]
    """Names of the model's layers."""
    kv_cache_spec: FullAttentionSpec
    """What each of them stores."""


@dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """Layers of the same shape in one allocation on each GPU."""

    size: int
    """Bytes of the allocation."""
    layers: list[str]
    """Layers in it."""
    layer_stride: int
    """Bytes from one layer to the next."""
    block_stride: int
    """Bytes from one block to the next, in one layer."""
    host_resident: bool = False
    """In host memory."""


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """How the KV cache is laid out."""

    num_blocks: int
    """Blocks, the null block included."""
    kv_cache_tensors: list[KVCacheTensor]
    """Allocations."""
    kv_cache_groups: list[KVCacheGroupSpec]
    """Groups; the demo has one."""


class FullAttentionManager:
    """The block tables of one group."""

    def __init__(self, spec: FullAttentionSpec, block_pool: BlockPool) -> None:
        self.block_size = spec.block_size
        self.kv_cache_spec = spec
        self.block_pool = block_pool
        self.kv_cache_group_id = 0
        self.req_to_blocks: defaultdict[str, list[KVCacheBlock]] = defaultdict(list)
        self.num_cached_block: dict[str, int] = {}

    def find_longest_cache_hit(
        self, hashes: Sequence[bytes], max_length: int
    ) -> list[KVCacheBlock]:
        """The longest run of leading blocks whose content is still there.

        Args:
            hashes: Names of the request's full blocks.
            max_length: Most tokens that may be hit.
        """
        found: list[KVCacheBlock] = []
        for block_hash in hashes[: max_length // self.block_size]:
            block = self.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def blocks_to_allocate(
        self, request_id: str, num_tokens: int, hits: Sequence[KVCacheBlock]
    ) -> int:
        """Blocks that must leave the free queue so that `num_tokens` have slots."""
        held = len(self.req_to_blocks.get(request_id, ())) + len(hits)
        new = max(0, -(-num_tokens // self.block_size) - held)
        return new + sum(block.ref_cnt == 0 for block in hits)

    def add_hits(self, request_id: str, hits: Sequence[KVCacheBlock]) -> None:
        """Begin a table with blocks found in the prefix cache."""
        self.block_pool.touch(hits)
        self.req_to_blocks[request_id].extend(hits)
        self.num_cached_block[request_id] = len(hits)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Lengthen a table so that `num_tokens` have slots."""
        table = self.req_to_blocks[request_id]
        count = -(-num_tokens // self.block_size) - len(table)
        if count <= 0:
            return []
        blocks = self.block_pool.get_new_blocks(count)
        table.extend(blocks)
        return blocks

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """Name the blocks that `num_tokens` computed tokens fill."""
        num_cached = self.num_cached_block.get(request.request_id, 0)
        num_full = num_tokens // self.block_size
        if num_cached >= num_full:
            return
        table = self.req_to_blocks[request.request_id]
        self.block_pool.cache_full_blocks(request, table, num_cached, num_full)
        self.num_cached_block[request.request_id] = num_full

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Take a table away; its blocks keep their references."""
        self.num_cached_block.pop(request_id, None)
        return self.req_to_blocks.pop(request_id, [])


class UnitaryKVCacheCoordinator:
    """All groups together: one here."""

    def __init__(self, spec: FullAttentionSpec, block_pool: BlockPool) -> None:
        self.block_pool = block_pool
        self.single_type_managers = (FullAttentionManager(spec, block_pool),)


class KVCacheManager:
    """What the scheduler asks for blocks.

    Args:
        config: Layout.
        max_model_len: Longest sequence, tokens.
        enable_caching: Prefix caching.
    """

    def __init__(
        self, config: KVCacheConfig, max_model_len: int, enable_caching: bool = True
    ) -> None:
        spec = config.kv_cache_groups[0].kv_cache_spec
        self.kv_cache_config = config
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.num_kv_cache_groups = 1
        self.block_pool = BlockPool(config.num_blocks, enable_caching)
        self.coordinator = UnitaryKVCacheCoordinator(spec, self.block_pool)
        self.lose_free: LoseFree | None = None
        """The fault of the leak scenario; None: every free is done."""

    @property
    def usage(self) -> float:
        """Share of the usable blocks that is not free, 0-1."""
        return self.block_pool.get_usage()

    def get_computed_blocks(self, request: Request) -> tuple[list[KVCacheBlock], int]:
        """Leading blocks found in the prefix cache, and the tokens in them.

        The last token is never hit: it must be computed to get its logits.
        """
        if not self.enable_caching:
            return [], 0
        manager = self.coordinator.single_type_managers[0]
        blocks = manager.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        return blocks, len(blocks) * manager.block_size

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock] = (),
        full_sequence_must_fit: bool = False,
    ) -> list[KVCacheBlock] | None:
        """Give a request slots for tokens about to be computed.

        Args:
            request: Whose table grows.
            num_new_tokens: Tokens of the coming step.
            new_computed_blocks: Prefix hits that begin its table.
            full_sequence_must_fit: Refuse unless the whole prompt would fit now.

        Returns:
            The blocks added, or None, and nothing changed, when there are too few free.
        """
        manager = self.coordinator.single_type_managers[0]
        request_id = request.request_id
        free = self.block_pool.get_num_free_blocks()
        computed = request.num_computed_tokens + len(new_computed_blocks) * manager.block_size
        need_slots = min(computed + num_new_tokens, self.max_model_len)
        must_fit = max(need_slots, request.num_tokens) if full_sequence_must_fit else need_slots
        if manager.blocks_to_allocate(request_id, must_fit, new_computed_blocks) > free:
            return None
        if new_computed_blocks:
            manager.add_hits(request_id, new_computed_blocks)
        blocks = manager.allocate_new_blocks(request_id, need_slots)
        if self.enable_caching:
            manager.cache_blocks(request, min(need_slots, request.num_tokens))
        return blocks

    def free(self, request: Request) -> None:
        """Give up a request's table, its tail first, so that the tail is evicted first."""
        self.block_pool.free_blocks(reversed(self.pop_blocks_for_free(request)))

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """Take a request's table away without freeing its blocks."""
        manager = self.coordinator.single_type_managers[0]
        blocks = manager.pop_blocks_for_free(request.request_id)
        return self.lose_free(request, blocks) if self.lose_free is not None else blocks

    def get_block_ids(self, request_id: str) -> tuple[list[int]]:
        """A request's table as block ids, one list a group."""
        manager = self.coordinator.single_type_managers[0]
        return ([block.block_id for block in manager.req_to_blocks.get(request_id, ())],)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False while any block is referenced."""
        return self.block_pool.reset_prefix_cache()
