"""What goes wrong in the simulated server, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtop.demo.config import BLOCK_SIZE
from kvtop.demo.kv_manager import KVCacheManager
from kvtop.demo.pool import KVCacheBlock
from kvtop.demo.request import Request, RequestStatus
from kvtop.demo.traffic import Range, TrafficShape
from kvtop.errors import UsageError

_FULL_TOKENS = 20_480 * BLOCK_SIZE
"""Pool for which the lengths in `TrafficShape` are meant."""

_MAX_LOST_SHARE = 0.4
"""Share of the pool that is lost at most: the demo can run for days."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One story."""

    name: str
    """What `--scenario` takes."""
    summary: str
    """One plain sentence."""
    blocks: int
    """Pool size when none is asked for."""
    max_num_seqs: int
    """Most requests running at once."""
    shape: Callable[[int], TrafficShape]
    """Clients for a pool of so many tokens."""
    leaks: bool = False
    """Frees get lost."""


def _scaled(length: Range, factor: float) -> Range:
    low, high = (max(4, int(tokens * factor)) for tokens in length)
    return low, max(low, high)


def _base(pool_tokens: int, busy: float) -> TrafficShape:
    """Clients whose requests together never need more than `busy` of the pool."""
    # Square root: a small pool gets both shorter texts and fewer clients.
    factor = min(1.0, (pool_tokens / _FULL_TOKENS) ** 0.5)
    documents = min(1.0, pool_tokens / _FULL_TOKENS)
    plain = TrafficShape()
    return TrafficShape(
        system_tokens=_scaled(plain.system_tokens, factor * documents**0.25),
        message_tokens=_scaled(plain.message_tokens, factor),
        document_tokens=_scaled(plain.document_tokens, documents),
        output_tokens=_scaled(plain.output_tokens, factor),
        silent_output_tokens=_scaled(plain.silent_output_tokens, factor),
        max_in_flight_tokens=int(pool_tokens * busy),
    )


def _healthy(pool_tokens: int) -> TrafficShape:
    return _base(pool_tokens, 0.85)


def _leak(pool_tokens: int) -> TrafficShape:
    shape = _base(pool_tokens, 1.0 - _MAX_LOST_SHARE - 0.1)
    return replace(shape, abort_share=0.3)


def _preempt_storm(pool_tokens: int) -> TrafficShape:
    shape = _base(pool_tokens, 1e9)
    # Short prompts and long answers: they fit at admission and outgrow the pool later.
    low, high = 0.02 * pool_tokens, 0.045 * pool_tokens
    return replace(
        shape,
        rate_s=10.0,
        chat_weight=0.8,
        document_weight=0.0,
        system_tokens=_scaled((200, 400), min(1.0, pool_tokens / 65_536)),
        message_tokens=_scaled((60, 300), min(1.0, pool_tokens / 65_536)),
        output_tokens=(max(8, int(low)), max(16, int(high))),
        follow_up=0.0,
        abort_share=0.02,
        idle_s=0.0,
        patience_s=600.0,
        max_in_flight=64,
    )


def _disconnect(pool_tokens: int) -> TrafficShape:
    shape = _base(pool_tokens, 0.85)
    return replace(shape, silent_share=0.3, abort_share=0.0, drain_limit_s=20.0)


def _wedge(pool_tokens: int) -> TrafficShape:
    shape = _base(pool_tokens, 0.85)
    return replace(
        shape,
        rate_s=4.0,
        chat_weight=0.18,
        document_weight=0.02,
        completion_weight=0.1,
        session_weight=0.7,
        output_tokens=_scaled((60, 220), min(1.0, pool_tokens / _FULL_TOKENS)),
        idle_s=0.0,
        patience_s=90.0,
        max_in_flight=60,
    )


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("healthy", "Mixed load with aborts, bursts and idle gaps.", 20_480, 64, _healthy),
        Scenario(
            "leak",
            "Some blocks of aborted requests are never freed.",
            20_480,
            64,
            _leak,
            leaks=True,
        ),
        Scenario(
            "preempt-storm",
            "The pool is too small for the load.",
            2048,
            128,
            _preempt_storm,
        ),
        Scenario(
            "disconnect",
            "Clients leave and the engine goes on with their requests.",
            20_480,
            64,
            _disconnect,
        ),
        Scenario(
            "wedge",
            "Parked streaming sessions take every place while most blocks are free.",
            20_480,
            24,
            _wedge,
        ),
    )
}
"""All of them, by name."""


def find_scenario(name: str) -> Scenario:
    """The scenario of that name.

    Raises:
        UsageError: There is none.
    """
    if name not in SCENARIOS:
        raise UsageError(f"there is no scenario {name!r}", f"choose from {', '.join(SCENARIOS)}")
    return SCENARIOS[name]


class LostFrees:
    """The fault of the leak scenario: some frees of aborted requests do not happen.

    Only blocks that no other request can come across are lost, since a lost block that is
    hit again would be in a table and wrongly counted, which is another story.

    Args:
        manager: Whose frees get lost.
        every: One abort in so many loses blocks.
        most: Blocks lost at once.
    """

    def __init__(self, manager: KVCacheManager, every: int = 2, most: int = 24) -> None:
        self.lost_block_ids: set[int] = set()
        """Blocks that are referenced and that nobody has any more."""
        self._limit = int((manager.block_pool.num_gpu_blocks - 1) * _MAX_LOST_SHARE)
        self._every = every
        self._most = most
        self._aborts = 0
        manager.lose_free = self.lose

    def lose(self, request: Request, blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
        """The blocks that are freed all the same; see `LoseFree`."""
        if request.status != RequestStatus.FINISHED_ABORTED or not blocks:
            return blocks
        self._aborts += 1
        if self._aborts % self._every:
            return blocks
        own = -(-request.shared_tokens // BLOCK_SIZE)
        keep = max(own, len(blocks) - self._most)
        lost = blocks[keep:]
        if any(block.ref_cnt != 1 for block in lost):
            return blocks
        if len(self.lost_block_ids) + len(lost) > self._limit:
            return blocks
        self.lost_block_ids.update(block.block_id for block in lost)
        return blocks[:keep]


def install_faults(scenario: Scenario, manager: KVCacheManager) -> LostFrees | None:
    """Break what the scenario breaks; None when it breaks nothing in the engine."""
    return LostFrees(manager) if scenario.leaks else None
