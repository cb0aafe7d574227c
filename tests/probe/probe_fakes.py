"""A small engine with the shapes of vLLM 0.32: pool, free queue, managers, scheduler.

Only what the probe touches, but with vLLM's own order of operations: LRU free queue with
sentinels, ref counts, prefix hits, eviction, chunked prefill, preemption by recompute, step
fences, sliding windows, requests that finish while a connector keeps their blocks.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from enum import IntEnum, auto
from types import SimpleNamespace


class Status(IntEnum):
    WAITING = auto()
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    WAITING_FOR_STREAMING_REQ = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_ABORTED = auto()


class Pause(IntEnum):
    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


@dataclass(slots=True)
class Block:
    """Like vLLM's `KVCacheBlock`: slots, and equality by value."""

    block_id: int
    ref_cnt: int = 0
    pool: object = field(default=None, repr=False, compare=False, kw_only=True)
    _block_hash: object = None
    prev_free_block: object = None
    next_free_block: object = None
    is_null: bool = False

    @property
    def block_hash(self):
        return self._block_hash


class FreeQueue:
    def __init__(self, blocks):
        self.num_free_blocks = 0
        self.fake_free_list_head = Block(-1)
        self.fake_free_list_tail = Block(-1)
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        self.append_n(blocks)

    def popleft(self):
        block = self.fake_free_list_head.next_free_block
        assert block is not self.fake_free_list_tail
        self.remove(block)
        return block

    def remove(self, block):
        block.prev_free_block.next_free_block = block.next_free_block
        block.next_free_block.prev_free_block = block.prev_free_block
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def _insert(self, left, blocks):
        right = left.next_free_block
        for block in blocks:
            left.next_free_block = block
            block.prev_free_block = left
            left = block
            self.num_free_blocks += 1
        left.next_free_block = right
        right.prev_free_block = left

    def append_n(self, blocks):
        self._insert(self.fake_free_list_tail.prev_free_block, blocks)

    def prepend_n(self, blocks):
        self._insert(self.fake_free_list_head, blocks)

    def all(self):
        block = self.fake_free_list_head.next_free_block
        while block is not self.fake_free_list_tail:
            yield block
            block = block.next_free_block


class BlockPool:
    def __init__(self, num_blocks, enable_caching=True, medium="GPU"):
        self.num_gpu_blocks = num_blocks
        self.medium = medium
        self.enable_caching = enable_caching
        self.blocks = [Block(i, pool=self) for i in range(num_blocks)]
        self.free_block_queue = FreeQueue(self.blocks)
        self.cached = {}
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True

    def get_num_free_blocks(self):
        return self.free_block_queue.num_free_blocks

    def get_new_blocks(self, num_blocks):
        if num_blocks > self.get_num_free_blocks():
            raise ValueError("no free blocks")
        blocks = [self.free_block_queue.popleft() for _ in range(num_blocks)]
        for block in blocks:
            if self.enable_caching:
                self._maybe_evict_cached_block(block)
            assert block.ref_cnt == 0
            block.ref_cnt += 1
        return blocks

    def _maybe_evict_cached_block(self, block):
        if block._block_hash is None:
            return False
        if self.cached.get(block._block_hash) is block:
            del self.cached[block._block_hash]
        block._block_hash = None
        return True

    def touch(self, blocks):
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks):
        first, last, others = [], [], {}
        for block in ordered_blocks:
            if block.pool is not self:
                others.setdefault(id(block.pool), (block.pool, []))[1].append(block)
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                (last if block._block_hash is not None else first).append(block)
        self.free_block_queue.prepend_n(first)
        self.free_block_queue.append_n(last)
        for pool, blocks in others.values():
            pool.free_blocks(blocks)

    def cache_full_blocks(self, keys, blocks):
        for key, block in zip(keys, blocks, strict=True):
            if block.is_null or block._block_hash is not None:
                continue
            block._block_hash = key
            self.cached.setdefault(key, block)

    def evict_blocks(self, block_ids):
        for i in block_ids:
            self._maybe_evict_cached_block(self.blocks[i])

    def reset_prefix_cache(self):
        if self.num_gpu_blocks - self.get_num_free_blocks() != 1:
            return False
        self.cached.clear()
        for block in self.blocks:
            block._block_hash = None
        return True


class FullAttentionManager:
    sliding_window = None

    def __init__(self, pool, group_id, block_size):
        self.block_pool = pool
        self.kv_cache_group_id = group_id
        self.block_size = block_size
        self.req_to_blocks = defaultdict(list)

    def hits(self, request):
        found = []
        for i in range((request.num_tokens - 1) // self.block_size):
            block = self.block_pool.cached.get(self.key(request, i))
            if block is None:
                break
            found.append(block)
        return found

    def key(self, request, i):
        return (self.kv_cache_group_id, tuple(request.tokens[: (i + 1) * self.block_size]))

    def new_blocks_needed(self, request, tokens, hits=()):
        have = len(self.req_to_blocks.get(request.request_id, ())) + len(hits)
        evictable = sum(b.ref_cnt == 0 and not b.is_null for b in hits)
        return max(0, -(-tokens // self.block_size) - have) + evictable

    def grow(self, request, tokens):
        table = self.req_to_blocks[request.request_id]
        need = -(-tokens // self.block_size) - len(table)
        if need > 0:
            table.extend(self.block_pool.get_new_blocks(need))

    def cache(self, request, tokens):
        full = tokens // self.block_size
        table = self.req_to_blocks[request.request_id][:full]
        self.block_pool.cache_full_blocks([self.key(request, i) for i in range(len(table))], table)

    def remove_skipped(self, request_id, computed):
        pass

    def pop(self, request_id):
        return self.req_to_blocks.pop(request_id, [])

    def free(self, request_id):
        self.block_pool.free_blocks(reversed(self.pop(request_id)))


class SlidingWindowManager(FullAttentionManager):
    def __init__(self, pool, group_id, block_size, window):
        super().__init__(pool, group_id, block_size)
        self.sliding_window = window

    def hits(self, request):
        return []

    def remove_skipped(self, request_id, computed):
        table = self.req_to_blocks.get(request_id)
        if not table:
            return
        null = self.block_pool.null_block
        freed = []
        for i in range(
            min(max(0, computed - self.sliding_window + 1) // self.block_size, len(table))
        ):
            if table[i] is not null:
                freed.append(table[i])
                table[i] = null
        self.block_pool.free_blocks(reversed(freed))


class KVCacheManager:
    def __init__(self, managers):
        self.coordinator = SimpleNamespace(
            single_type_managers=managers, block_pool=managers[0].block_pool
        )
        self.block_pool = managers[0].block_pool

    @property
    def managers(self):
        return self.coordinator.single_type_managers

    def allocate_slots(self, request, num_new_tokens, hits=None):
        total = request.num_computed_tokens + num_new_tokens
        needs = defaultdict(int)
        for i, m in enumerate(self.managers):
            mine = hits[i] if hits else ()
            total_here = total + (len(mine) * m.block_size if mine else 0)
            needs[id(m.block_pool)] += m.new_blocks_needed(request, total_here, mine)
        for m in self.managers:
            if needs[id(m.block_pool)] > m.block_pool.get_num_free_blocks():
                return None
        for i, m in enumerate(self.managers):
            mine = hits[i] if hits else ()
            if mine:
                m.block_pool.touch(mine)
                m.req_to_blocks[request.request_id].extend(mine)
        cached = (
            min(
                (len(h) * m.block_size for h, m in zip(hits, self.managers, strict=True)), default=0
            )
            if hits
            else 0
        )
        for m in self.managers:
            m.grow(request, total + cached)
            m.cache(request, min(total + cached, request.num_tokens))
        return SimpleNamespace()

    def free(self, request):
        for m in self.managers:
            m.free(request.request_id)

    def reset_prefix_cache(self):
        pools = {id(m.block_pool): m.block_pool for m in self.managers}
        return all([pool.reset_prefix_cache() for pool in pools.values()])  # noqa: C419


class Request:
    def __init__(self, rid, tokens, max_tokens, arrival_time=1000.0):
        self.request_id = rid
        self.tokens = list(tokens)
        self.num_prompt_tokens = len(self.tokens)
        self.max_tokens = max_tokens
        self.status = Status.WAITING
        self.arrival_time = arrival_time
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_preemptions = 0
        self.priority = 0
        self.lora_request = None
        self.last_step = 0

    @property
    def num_tokens(self):
        return len(self.tokens)

    @property
    def num_output_tokens(self):
        return len(self.tokens) - self.num_prompt_tokens

    def __hash__(self):
        return id(self)


class Scheduler:
    """Schedules like vLLM: running first, then waiting; preempts the last to have come."""

    def __init__(self, managers, budget=64, fences=False, connector=None, max_running=16):
        self.kv_cache_manager = KVCacheManager(managers)
        self.block_size = min(m.block_size for m in managers)
        self.max_model_len = 4096
        self.max_num_running_reqs = max_running
        self.requests = {}
        self.running = []
        self.waiting = deque()
        self.kv_holding_waiting = deque()
        self.deferred_waiting = set()
        self.deferred_frees = deque()
        self._pause_state = Pause.UNPAUSED
        self.connector = connector
        self.budget = budget
        self.fences = fences
        self.seq = self.done_seq = 0

    # -- what vLLM's engine core calls

    def add_request(self, request):
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def finish_requests(self, request_ids, status):
        for rid in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            request = self.requests.get(rid)
            if request is None or request.status > Status.PREEMPTED:
                continue
            for queue in (self.running, self.waiting, self.kv_holding_waiting):
                if request in queue:
                    queue.remove(request)
            self.deferred_waiting.discard(request)
            request.status = status
            self._free(request)

    def schedule(self):
        budget = 0 if self._pause_state is Pause.PAUSED_ALL else self.budget
        scheduled, new, resumed = {}, [], set()
        for request in list(self.running):
            if request not in self.running or budget <= 0:
                continue
            tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if tokens <= 0:
                continue
            while self.kv_cache_manager.allocate_slots(request, tokens) is None:
                victim = self.running.pop()
                scheduled.pop(victim.request_id, None)
                self._preempt_request(victim, 0.0)
                if victim is request:
                    break
            if request.status is Status.RUNNING:
                scheduled[request.request_id] = tokens
                budget -= tokens
        while self.waiting and budget > 0 and len(self.running) < self.max_num_running_reqs:
            request = self.waiting[0]
            if self._pause_state is not Pause.UNPAUSED or request.status not in (
                Status.WAITING,
                Status.PREEMPTED,
            ):
                break
            hits = [m.hits(request) for m in self.kv_cache_manager.managers]
            if len(hits) > 1:
                hits = [[] for _ in hits]
            cached = min(
                len(h) * m.block_size
                for h, m in zip(hits, self.kv_cache_manager.managers, strict=True)
            )
            tokens = min(request.num_tokens - cached, budget)
            if self.kv_cache_manager.allocate_slots(request, tokens, hits) is None:
                break
            self.waiting.popleft()
            again = request.status is Status.PREEMPTED
            request.status = Status.RUNNING
            request.num_computed_tokens = cached
            if again:
                resumed.add(request.request_id)
            else:
                new.append(SimpleNamespace(req_id=request.request_id, num_computed_tokens=cached))
            self.running.append(request)
            scheduled[request.request_id] = tokens
            budget -= tokens
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(scheduled),
                resumed_req_ids=resumed,
                num_computed_tokens=[self.requests[r].num_computed_tokens for r in scheduled],
            ),
            num_scheduled_tokens=scheduled,
        )
        self.seq += 1
        for rid, tokens in scheduled.items():
            self.requests[rid].num_computed_tokens += tokens
            self.requests[rid].last_step = self.seq
        return output

    def update_from_output(self, output, rng):
        self.done_seq += 1
        while self.deferred_frees and self.deferred_frees[0][0] <= self.done_seq:
            _, blocks = self.deferred_frees.popleft()
            self.kv_cache_manager.block_pool.free_blocks(reversed(blocks))
        for rid in output.num_scheduled_tokens:
            request = self.requests.get(rid)
            if request is None or request.status is not Status.RUNNING:
                continue
            for m in self.kv_cache_manager.managers:
                m.remove_skipped(rid, request.num_computed_tokens)
            if request.num_computed_tokens >= request.num_tokens:
                request.tokens.append(rng.randrange(4))
                if request.num_output_tokens >= request.max_tokens:
                    self.running.remove(request)
                    request.status = Status.FINISHED_STOPPED
                    self._free(request)

    def _preempt_request(self, request, timestamp):
        self._free_blocks(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def reset_prefix_cache(self):
        return self.kv_cache_manager.reset_prefix_cache()

    def set_pause_state(self, state):
        self._pause_state = state

    # -- its insides

    def _free(self, request):
        if self.connector is not None and self.connector.request_finished(request):
            return
        self.release(request)

    def release(self, request):
        """What a connector's `finished_sending` leads to."""
        self._free_blocks(request)
        del self.requests[request.request_id]

    def _free_blocks(self, request):
        if self.fences and request.last_step > self.done_seq:
            blocks = [b for m in self.kv_cache_manager.managers for b in m.pop(request.request_id)]
            if blocks:
                self.deferred_frees.append((self.seq, blocks))
        else:
            self.kv_cache_manager.free(request)


class Connector:
    """Keeps the blocks of every `keep_every`-th finished request, and pins blocks."""

    def __init__(self, pool, keep_every=2):
        self.pool = pool
        self.keep_every = keep_every
        self.kept = []
        self.pinned = []
        self._count = itertools.count()

    def request_finished(self, request):
        if next(self._count) % self.keep_every:
            return False
        self.kept.append(request)
        return True

    def build_connector_meta(self, blocks):
        self.pool.touch(blocks)
        self.pinned.extend(blocks)

    def update_connector_output(self):
        blocks, self.pinned = self.pinned, []
        self.pool.free_blocks(blocks)


class Engine:
    """What `install` takes."""

    def __init__(
        self,
        blocks=32,
        block_size=4,
        window=None,
        second_pool=None,
        fences=False,
        connector=False,
        caching=True,
        max_running=16,
        budget=64,
    ):
        pool = BlockPool(blocks, enable_caching=caching)
        managers = [FullAttentionManager(pool, 0, block_size)]
        if window is not None:
            managers.append(SlidingWindowManager(pool, 1, block_size, window))
        if second_pool is not None:
            host = BlockPool(second_pool, enable_caching=caching, medium="CPU")
            managers.append(FullAttentionManager(host, len(managers), block_size))
        self.connector = Connector(pool) if connector else None
        self.scheduler = Scheduler(managers, budget, fences, self.connector, max_running)
        self.rng = random.Random(0)
        self.outputs = deque()
        self.depth = 2 if fences else 1
        self.model = "fake"
        self.count = itertools.count()

    @property
    def pools(self):
        seen = {}
        for m in self.scheduler.kv_cache_manager.managers:
            seen[id(m.block_pool)] = m.block_pool
        return list(seen.values())

    def step(self):
        """One engine step; with fences, one step stays in flight."""
        self.outputs.append(self.scheduler.schedule())
        if len(self.outputs) >= self.depth:
            self.scheduler.update_from_output(self.outputs.popleft(), self.rng)

    def add(self, prompt=8, max_tokens=8, rid=None, vocabulary=2):
        rid = rid or f"r{next(self.count)}"
        tokens = [self.rng.randrange(vocabulary) for _ in range(prompt)]
        self.scheduler.add_request(Request(rid, tokens, max_tokens))
        return rid

    def abort(self, rid):
        self.scheduler.finish_requests(rid, Status.FINISHED_ABORTED)


FREE, CACHED, USED, SHARED, HELD, GHOST, NULL = range(7)


def recount(engine):
    """State, ref count and holders of each block of each pool, counted from nothing."""
    scheduler = engine.scheduler
    result = []
    for pool in engine.pools:
        queue = {id(b) for b in pool.free_block_queue.all()}
        assert len(queue) == pool.free_block_queue.num_free_blocks
        live, held, fences = defaultdict(int), defaultdict(int), defaultdict(int)
        for manager in scheduler.kv_cache_manager.managers:
            if manager.block_pool is not pool:
                continue
            for rid, table in manager.req_to_blocks.items():
                request = scheduler.requests.get(rid)
                parked = (
                    request is None
                    or request.status > Status.PREEMPTED
                    or request.status
                    in (
                        Status.WAITING_FOR_REMOTE_KVS,
                        Status.WAITING_FOR_STREAMING_REQ,
                    )
                )
                for block in table:
                    if not block.is_null:
                        (held if parked else live)[block.block_id] += 1
        for _, blocks in scheduler.deferred_frees:
            for block in blocks:
                if block.pool is pool and not block.is_null:
                    fences[block.block_id] += 1
        if engine.connector is not None and pool is engine.pools[0]:
            for block in engine.connector.pinned:
                fences[block.block_id] += 1
        states, refs, holders = [], [], []
        for block in pool.blocks:
            i = block.block_id
            tables = live[i] + held[i]
            if block.is_null:
                state = NULL
            elif block.ref_cnt == 0:
                state = (
                    GHOST
                    if id(block) not in queue
                    else CACHED
                    if block._block_hash is not None
                    else FREE
                )
            elif id(block) in queue or not (tables or fences[i]):
                state = GHOST
            elif not live[i]:
                state = HELD
            else:
                state = SHARED if tables > 1 else USED
            states.append(state)
            refs.append(0 if block.is_null else block.ref_cnt)
            holders.append(0 if block.is_null else tables + fences[i])
        result.append((states, refs, holders))
    return result
