"""The demo's block pool: which blocks exist, which are free, which can be hit again.

The objects have the shapes and names of vLLM 0.32 (vllm/v1/core/block_pool.py,
vllm/v1/core/kv_cache_utils.py), since the probe finds its facts by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtop.demo.request import Request


class KVCacheBlock:
    """One block of KV memory: `block_size` token slots in every layer.

    Args:
        block_id: Its place in `BlockPool.blocks`.
    """

    __slots__ = (
        "_block_hash",
        "block_id",
        "is_null",
        "next_free_block",
        "pool",
        "prev_free_block",
        "ref_cnt",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self._block_hash: bytes | None = None
        self.is_null = False
        self.pool: BlockPool | None = None
        self.prev_free_block: KVCacheBlock | None = None
        self.next_free_block: KVCacheBlock | None = None

    @property
    def block_hash(self) -> bytes | None:
        """Name of the content, if it is full and can be hit; None: it cannot."""
        return self._block_hash

    def set_block_hash(self, block_hash: bytes) -> None:
        """Give a full block the name of its content."""
        self._block_hash = block_hash

    def reset_hash(self) -> None:
        """Forget the content."""
        self._block_hash = None

    def __repr__(self) -> str:
        return f"KVCacheBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt})"


class FreeKVCacheBlockQueue:
    """The free blocks in the order in which they will be taken, as a linked ring of neighbours.

    Two sentinels stand at the ends, so that a block in the queue always has both
    neighbours and a block outside has none.

    Args:
        blocks: Free at the beginning, the first is taken first.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        self.fake_free_list_head = KVCacheBlock(-1)
        self.fake_free_list_tail = KVCacheBlock(-1)
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        self.append_n(blocks)

    def _chain(self, left: KVCacheBlock, blocks: Iterable[KVCacheBlock]) -> None:
        right = left.next_free_block
        for block in blocks:
            left.next_free_block = block
            block.prev_free_block = left
            left = block
            self.num_free_blocks += 1
        left.next_free_block = right
        if right is not None:
            right.prev_free_block = left

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put blocks at the end: taken last."""
        last = self.fake_free_list_tail.prev_free_block
        if last is not None:
            self._chain(last, blocks)

    def prepend_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put blocks at the front: taken first."""
        self._chain(self.fake_free_list_head, blocks)

    def remove(self, block: KVCacheBlock) -> None:
        """Take one block out of the middle.

        Raises:
            RuntimeError: It is not in the queue.
        """
        left, right = block.prev_free_block, block.next_free_block
        if left is None or right is None:
            raise RuntimeError(f"{block!r} is not in the free queue")
        left.next_free_block = right
        right.prev_free_block = left
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def popleft(self) -> KVCacheBlock:
        """Take the first block.

        Raises:
            ValueError: The queue is empty.
        """
        return self.popleft_n(1)[0]

    def popleft_n(self, count: int) -> list[KVCacheBlock]:
        """Take the first `count` blocks.

        Raises:
            ValueError: There are not so many.
        """
        if count > self.num_free_blocks:
            raise ValueError(f"no {count} free blocks: the queue has {self.num_free_blocks}")
        taken: list[KVCacheBlock] = []
        block = self.fake_free_list_head.next_free_block
        while block is not None and len(taken) < count:
            taken.append(block)
            block = block.next_free_block
        self.fake_free_list_head.next_free_block = block
        if block is not None:
            block.prev_free_block = self.fake_free_list_head
        for one in taken:
            one.prev_free_block = one.next_free_block = None
        self.num_free_blocks -= count
        return taken

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """The queue as a list, first to be taken first."""
        found: list[KVCacheBlock] = []
        block = self.fake_free_list_head.next_free_block
        while block is not None and block is not self.fake_free_list_tail:
            found.append(block)
            block = block.next_free_block
        return found


class BlockHashToBlockMap:
    """Content name to the blocks that hold it.

    Two requests that computed the same content at the same time own one block each, so a
    name can have several.
    """

    def __init__(self) -> None:
        self._cache: dict[bytes, dict[int, KVCacheBlock]] = {}

    def get_one_block(self, key: bytes) -> KVCacheBlock | None:
        """Any block with this content."""
        blocks = self._cache.get(key)
        return next(iter(blocks.values())) if blocks else None

    def insert(self, key: bytes, block: KVCacheBlock) -> None:
        """Add a block under its content."""
        self._cache.setdefault(key, {})[block.block_id] = block

    def pop(self, key: bytes, block_id: int) -> KVCacheBlock | None:
        """Take one block out; None if it was not there."""
        blocks = self._cache.get(key)
        if blocks is None:
            return None
        block = blocks.pop(block_id, None)
        if not blocks:
            del self._cache[key]
        return block

    def __len__(self) -> int:
        return len(self._cache)


class BlockPool:
    """All blocks of the simulated GPU's KV cache.

    Invariants, whatever is called: block 0 is the null block and never in the queue; every
    other block is in the queue exactly when its `ref_cnt` is 0; a block has a hash exactly
    when the map has it under that hash.

    Args:
        num_gpu_blocks: Blocks, the null block included; at least 2.
        enable_caching: Whether content is kept for later hits.
    """

    def __init__(self, num_gpu_blocks: int, enable_caching: bool = True) -> None:
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.medium = "GPU"
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_gpu_blocks)]
        for block in self.blocks:
            block.pool = self
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True

    def get_num_free_blocks(self) -> int:
        """Blocks in the free queue: without content, or evictable."""
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """Share of the usable blocks that is not free, 0-1."""
        usable = self.num_gpu_blocks - 1
        return 1.0 - self.get_num_free_blocks() / usable if usable else 0.0

    def get_cached_block(self, block_hash: bytes) -> KVCacheBlock | None:
        """A block with this content; None: a miss."""
        return self.cached_block_hash_to_block.get_one_block(block_hash)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take free blocks, dropping the content of those that still have some.

        Raises:
            ValueError: There are not so many free.
        """
        blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            if self.enable_caching:
                self._maybe_evict_cached_block(block)
            block.ref_cnt += 1
        return blocks

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        """Forget a block's content; True if it had any."""
        block_hash = block.block_hash
        if block_hash is None:
            return False
        block.reset_hash()
        return self.cached_block_hash_to_block.pop(block_hash, block.block_id) is not None

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more table holds these blocks: a prefix hit."""
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """One table less holds these blocks.

        Blocks without content go to the front of the queue, to be used first; blocks with
        content go to its end in the order given, so that the least recently used goes first.
        """
        first: list[KVCacheBlock] = []
        last: list[KVCacheBlock] = []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                (last if block.block_hash is not None else first).append(block)
        self.free_block_queue.prepend_n(first)
        self.free_block_queue.append_n(last)

    def cache_full_blocks(
        self, request: Request, blocks: Sequence[KVCacheBlock], num_cached: int, num_full: int
    ) -> None:
        """Name the content of blocks that have become full.

        Args:
            request: Owns the blocks; its `block_hashes` has the names.
            blocks: Its table.
            num_cached: Leading blocks that already have their name.
            num_full: Leading blocks that are full now.
        """
        for index in range(num_cached, num_full):
            block = blocks[index]
            if block.is_null or block.block_hash is not None:
                continue
            block.set_block_hash(request.block_hashes[index])
            self.cached_block_hash_to_block.insert(request.block_hashes[index], block)

    def reset_prefix_cache(self) -> bool:
        """Forget all content; False, and nothing done, while any block is referenced."""
        if self.num_gpu_blocks - self.get_num_free_blocks() != 1:
            return False
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        for block in self.blocks:
            block.reset_hash()
        return True
