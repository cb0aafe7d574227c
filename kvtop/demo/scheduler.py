"""The demo's scheduler: continuous batching with a token budget, as vLLM 0.32 does it.

Shapes, names and rules follow vllm/v1/core/sched/scheduler.py: running requests first, the
last running one is preempted by recompute when blocks run out, nothing is admitted in a
step that preempted, chunked prefill, the whole prompt must fit before it is admitted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvtop.demo.kv_manager import KVCacheConfig, KVCacheManager
from kvtop.demo.pool import KVCacheBlock
from kvtop.demo.request import Request, RequestStatus
from kvtop.demo.steps import (
    FCFSRequestQueue,
    NewRequestData,
    PauseState,
    PrefixCacheStats,
    SchedulerOutput,
    TokenOutput,
)

if TYPE_CHECKING:
    from kvtop.demo.config import VllmConfig


class Scheduler:
    """Decides what runs in each step.

    Args:
        vllm_config: Limits.
        kv_cache_config: Layout of the KV cache.
    """

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self.vllm_config = vllm_config
        self.cache_config = vllm_config.cache_config
        self.scheduler_config = vllm_config.scheduler_config
        self.kv_cache_config = kv_cache_config
        self.block_size = vllm_config.cache_config.block_size
        self.max_model_len = vllm_config.model_config.max_model_len
        self.max_num_running_reqs = self.scheduler_config.max_num_seqs
        self.max_num_scheduled_tokens = self.scheduler_config.max_num_batched_tokens
        self.connector: None = None

        self.requests: dict[str, Request] = {}
        self.waiting = FCFSRequestQueue()
        self.kv_holding_waiting = FCFSRequestQueue()
        self.deferred_waiting: set[Request] = set()
        self.running: list[Request] = []
        self.finished_req_ids: set[str] = set()
        self.num_waiting_for_streaming_input = 0

        self.kv_cache_manager = KVCacheManager(
            kv_cache_config, self.max_model_len, self.cache_config.enable_prefix_caching
        )
        self.prefix_cache_stats = PrefixCacheStats()

        # Blocks given up while a step that may write to them is under way are freed only
        # after it: (sequence number of that step, blocks).
        self.sched_step_seq = 0
        self.processed_step_seq = 0
        self.deferred_frees: deque[tuple[int, list[KVCacheBlock]]] = deque()
        self._pause_state = PauseState.UNPAUSED

    def schedule(self) -> SchedulerOutput:
        """Choose the tokens of the next step and give them slots."""
        output = SchedulerOutput()
        budget = self.max_num_scheduled_tokens
        if self._pause_state == PauseState.PAUSED_ALL:
            budget = 0
        budget = self._schedule_running(output, budget)
        if not output.preempted_req_ids and self._pause_state != PauseState.PAUSED_ALL:
            self._schedule_waiting(output, budget)
        if output.total_num_scheduled_tokens:
            self.sched_step_seq += 1
        self._update_after_schedule(output)
        return output

    def _schedule_running(self, output: SchedulerOutput, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if tokens <= 0:
                index += 1
                continue
            if not self._make_room(request, tokens, output):
                break
            self._take(request, tokens, output)
            budget -= tokens
            index += 1
        return budget

    def _make_room(self, request: Request, tokens: int, output: SchedulerOutput) -> bool:
        """Slots for a running request, preempting from the end; False: it went itself."""
        while self.kv_cache_manager.allocate_slots(request, tokens) is None:
            victim = self.running.pop()
            self._preempt_request(victim)
            output.preempted_req_ids.append(victim.request_id)
            if victim is request:
                return False
        return True

    def _schedule_waiting(self, output: SchedulerOutput, budget: int) -> None:
        skipped = FCFSRequestQueue()
        skipped_holding = FCFSRequestQueue()
        while budget > 0:
            queue = self.kv_holding_waiting
            if not queue and self._pause_state == PauseState.UNPAUSED:
                queue = self.waiting
            slots_taken = len(self.running) + self.num_waiting_for_streaming_input
            if not queue or slots_taken >= self.max_num_running_reqs:
                break
            request = queue.peek_request()
            if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                queue.pop_request()
                self.deferred_waiting.add(request)
                holds = request.num_computed_tokens > 0
                (skipped_holding if holds else skipped).appendleft(request)
                continue
            tokens = self._admit(request, budget)
            if tokens is None:
                break
            queue.pop_request()
            self.deferred_waiting.discard(request)
            self._take(request, tokens, output, first=request.num_preemptions == 0)
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            budget -= tokens
        self.kv_holding_waiting.prepend_requests(skipped_holding)
        self.waiting.prepend_requests(skipped)

    def _admit(self, request: Request, budget: int) -> int | None:
        """Slots for a waiting request; the tokens to run, or None when it does not fit."""
        hits: list[KVCacheBlock] = []
        num_hits = 0
        lookup = request.num_computed_tokens == 0
        if lookup:
            hits, num_hits = self.kv_cache_manager.get_computed_blocks(request)
        left = request.num_tokens - request.num_computed_tokens - num_hits
        tokens = min(left, budget)
        blocks = self.kv_cache_manager.allocate_slots(
            request, tokens, hits, full_sequence_must_fit=True
        )
        if blocks is None:
            return None
        if lookup:
            request.num_computed_tokens = num_hits
            request.num_cached_tokens = num_hits
            if request.num_preemptions == 0:
                self.prefix_cache_stats.queries += request.num_tokens
                self.prefix_cache_stats.hits += num_hits
        return tokens

    def _take(
        self, request: Request, tokens: int, output: SchedulerOutput, first: bool = False
    ) -> None:
        output.num_scheduled_tokens[request.request_id] = tokens
        output.total_num_scheduled_tokens += tokens
        if tokens > 1:
            output.num_prefill_tokens += tokens
        if first:
            new = NewRequestData(request.request_id, request.num_computed_tokens)
            output.scheduled_new_reqs.append(new)
            return
        again = output.scheduled_cached_reqs
        again.req_ids.append(request.request_id)
        again.num_computed_tokens.append(request.num_computed_tokens)
        if request.status == RequestStatus.PREEMPTED:
            again.resumed_req_ids.add(request.request_id)

    def _update_after_schedule(self, output: SchedulerOutput) -> None:
        for request_id, tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            request.num_computed_tokens += tokens
            request.last_sched_seq = self.sched_step_seq
            request.is_prefill_chunk = request.num_computed_tokens < request.num_tokens
        self.finished_req_ids = set()

    def _preempt_request(self, request: Request, timestamp: float = 0.0) -> None:
        """Take all blocks from a request that has left `running`; it starts over later."""
        del timestamp
        self._free_request_blocks(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.is_prefill_chunk = False
        request.num_preemptions += 1
        self.waiting.prepend_request(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, sampled_token_ids: dict[str, int]
    ) -> list[TokenOutput]:
        """Take in the tokens of a step that has run.

        Args:
            scheduler_output: What was scheduled.
            sampled_token_ids: One token for each request whose prompt is done.
        """
        if scheduler_output.total_num_scheduled_tokens > 0:
            self.processed_step_seq += 1
            self._drain_deferred_frees()
        outputs: list[TokenOutput] = []
        ended: set[int] = set()
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            token_id = sampled_token_ids.get(request_id)
            if request is None or token_id is None or request.is_prefill_chunk:
                continue
            request.append_output_token_ids(token_id)
            finished = self._check_stop(request)
            outputs.append(TokenOutput(request, finished))
            if finished:
                ended.add(id(request))
                self._stop(request)
        if ended:
            self.running = [request for request in self.running if id(request) not in ended]
        return outputs

    def _check_stop(self, request: Request) -> bool:
        made = request.num_output_tokens
        if made >= request.stop_after:
            request.status = RequestStatus.FINISHED_STOPPED
        elif made >= request.max_tokens or request.num_tokens >= self.max_model_len:
            request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        else:
            return False
        return True

    def _stop(self, request: Request) -> None:
        if not request.resumable:
            self._free_request(request)
            return
        # A parked session keeps its blocks and its place among max_num_seqs.
        request.status = RequestStatus.WAITING_FOR_STREAMING_REQ
        self.num_waiting_for_streaming_input += 1
        self.deferred_waiting.add(request)
        self.kv_holding_waiting.add_request(request)

    def add_request(self, request: Request) -> None:
        """Take a new request in.

        Raises:
            ValueError: The id is taken.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id} is taken")
        self.requests[request.request_id] = request
        self.waiting.add_request(request)

    def finish_requests(
        self, request_ids: str | Iterable[str], finished_status: RequestStatus
    ) -> list[Request]:
        """End requests from outside; ids that are not here any more are passed over."""
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        found = [
            self.requests[name] for name in dict.fromkeys(request_ids) if name in self.requests
        ]
        gone = set(map(id, found))
        self.running = [request for request in self.running if id(request) not in gone]
        self.waiting.remove_requests(found)
        self.kv_holding_waiting.remove_requests(found)
        for request in found:
            if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                self.num_waiting_for_streaming_input -= 1
            self.deferred_waiting.discard(request)
            request.status = finished_status
            self._free_request(request)
        return found

    def _free_request(self, request: Request) -> None:
        self.finished_req_ids.add(request.request_id)
        self._free_request_blocks(request)
        del self.requests[request.request_id]

    def _free_request_blocks(self, request: Request) -> None:
        if request.last_sched_seq <= self.processed_step_seq:
            self.kv_cache_manager.free(request)
            return
        blocks = self.kv_cache_manager.pop_blocks_for_free(request)
        if blocks:
            self.deferred_frees.append((self.sched_step_seq, blocks))

    def _drain_deferred_frees(self) -> None:
        while self.deferred_frees and self.deferred_frees[0][0] <= self.processed_step_seq:
            _, blocks = self.deferred_frees.popleft()
            self.kv_cache_manager.block_pool.free_blocks(reversed(blocks))

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting requests."""
        return len(self.running), len(self.waiting) + len(self.kv_holding_waiting)

    def get_num_unfinished_requests(self) -> int:
        """Requests that a step could move forward."""
        running, waiting = self.get_request_counts()
        return running + waiting - self.num_waiting_for_streaming_input

    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to schedule."""
        return self.get_num_unfinished_requests() > 0

    def has_finished_requests(self) -> bool:
        """Whether the workers have yet to be told of ended requests."""
        return bool(self.finished_req_ids)

    def has_requests(self) -> bool:
        """Whether a step is due."""
        return self.has_unfinished_requests() or self.has_finished_requests()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content; False while any block is referenced."""
        return self.kv_cache_manager.reset_prefix_cache()
