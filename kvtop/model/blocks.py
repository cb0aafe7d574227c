"""Block states: one byte a block, so that 200,000 blocks copy in microseconds.

The states divide a pool: each block has exactly one. `BlockCounts` adds up to
`total`, and `free + cached` is the length of vLLM's own free queue
(`BlockPool.free_block_queue.num_free_blocks`, vllm/v1/core/block_pool.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class BlockState(IntEnum):
    """Where a block is. The values are the bytes on the wire and in files."""

    FREE = 0
    """In the free queue, without a hash: the next allocation may take it."""
    CACHED = 1
    """In the free queue, with a prefix-cache hash: can be hit, can be evicted."""
    USED = 2
    """In exactly one table of a live request."""
    SHARED = 3
    """In several tables, at least one of a live request."""
    HELD = 4
    """Kept for no live request: its request is finished or parked, a connector
    still moves it, or it waits for the fence of a step in flight."""
    GHOST = 5
    """Referenced and in no table, unreferenced and not in the free queue, or referenced
    and in the free queue all the same (then free + cached is less than the queue)."""
    NULL = 6
    """vLLM's placeholder block; never holds tokens of one request."""


LETTERS = {
    BlockState.FREE: ".",
    BlockState.CACHED: "c",
    BlockState.USED: "U",
    BlockState.SHARED: "S",
    BlockState.HELD: "H",
    BlockState.GHOST: "G",
    BlockState.NULL: "0",
}
"""The letter of each state wherever colour is not enough."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks of a pool are in each state."""

    total: int
    """Blocks in the pool, the null block included."""
    null: int
    """Placeholder blocks (one a pool in every V1 vLLM)."""
    free: int
    """Free, no cached content."""
    cached: int
    """Free and evictable, content can still be hit."""
    used: int
    """In one table."""
    shared: int
    """In several tables."""
    held: int
    """Kept for no live request."""
    ghost: int
    """Owned by nobody and not free."""

    @property
    def usable(self) -> int:
        """Blocks that can hold tokens: the total less the null blocks."""
        return self.total - self.null

    def percent(self, blocks: int) -> float | None:
        """`blocks` as a share of the usable blocks, 0-100; None for an empty pool."""
        return 100.0 * blocks / self.usable if self.usable > 0 else None


def count_states(states: bytes) -> BlockCounts:
    """Counts of a state column.

    Args:
        states: One `BlockState` byte a block.
    """
    return BlockCounts(
        total=len(states),
        null=states.count(BlockState.NULL),
        free=states.count(BlockState.FREE),
        cached=states.count(BlockState.CACHED),
        used=states.count(BlockState.USED),
        shared=states.count(BlockState.SHARED),
        held=states.count(BlockState.HELD),
        ghost=states.count(BlockState.GHOST),
    )
