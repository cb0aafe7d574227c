"""The API server's side of the simulated server: which requests still have a client.

As vLLM's `OutputProcessor` (vllm/v1/engine/output_processor.py): tokens of a request whose
client is gone are dropped here and counted nowhere, and a client that leaves moves no
finish counter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtop.demo.metrics import Metrics
from kvtop.demo.request import FINISHED_REASONS, Request
from kvtop.demo.scheduler import Scheduler
from kvtop.demo.steps import SchedulerOutput, TokenOutput


@dataclass(slots=True)
class RequestState:
    """One client's request. Times are simulated seconds."""

    request_id: str
    """As in the engine."""
    arrival_s: float
    """When it was sent."""
    scheduled_s: float | None = None
    """When it first ran."""
    first_token_s: float | None = None
    """When its first token came."""
    last_token_s: float | None = None
    """When its newest token came."""


class OutputProcessor:
    """Clients' requests and the figures of /metrics.

    Args:
        metrics: Where they are counted.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.request_states: dict[str, RequestState] = {}
        self._metrics = metrics

    def add_request(self, request_id: str, now_s: float) -> None:
        """A client asks."""
        self.request_states[request_id] = RequestState(request_id, now_s)

    def abort_requests(self, request_id: str) -> None:
        """A client is gone."""
        self.request_states.pop(request_id, None)

    def process_outputs(
        self,
        output: SchedulerOutput,
        tokens: Sequence[TokenOutput],
        scheduler: Scheduler,
        started_s: float,
        now_s: float,
    ) -> None:
        """Count a step that has run.

        Args:
            output: What ran.
            tokens: What came out.
            scheduler: For the gauges.
            started_s: When the step began, simulated.
            now_s: Its end.
        """
        with self._metrics.lock:
            self._count_step(output, scheduler)
            for new in output.scheduled_new_reqs:
                state = self.request_states.get(new.req_id)
                if state is not None and state.scheduled_s is None:
                    state.scheduled_s = started_s
            for token in tokens:
                state = self.request_states.get(token.request.request_id)
                if state is None:
                    continue
                self._count_token(state, token.request, now_s)
                if token.finished and token.request.is_finished():
                    del self.request_states[state.request_id]
                    self._count_finish(state, token.request, now_s)

    def publish_gauges(self, scheduler: Scheduler) -> None:
        """Bring the gauges up to date when no step runs."""
        with self._metrics.lock:
            self._gauges(scheduler)

    def _gauges(self, scheduler: Scheduler) -> None:
        running, waiting = scheduler.get_request_counts()
        deferred = len(scheduler.deferred_waiting)
        gauges = self._metrics.gauges
        gauges["num_requests_running"] = float(running)
        gauges["num_requests_waiting"] = float(waiting)
        gauges["kv_cache_usage_perc"] = scheduler.kv_cache_manager.usage
        self._metrics.waiting_by_reason = {
            "capacity": float(waiting - deferred),
            "deferred": float(deferred),
        }

    def _count_step(self, output: SchedulerOutput, scheduler: Scheduler) -> None:
        self._gauges(scheduler)
        counters = self._metrics.counters
        counters["num_preemptions"] += len(output.preempted_req_ids)
        counters["prefix_cache_queries"] = float(scheduler.prefix_cache_stats.queries)
        counters["prefix_cache_hits"] = float(scheduler.prefix_cache_stats.hits)
        if output.total_num_scheduled_tokens:
            histogram = self._metrics.histograms["iteration_tokens_total"]
            histogram.observe(float(output.total_num_scheduled_tokens))

    def _count_token(self, state: RequestState, request: Request, now_s: float) -> None:
        metrics = self._metrics
        metrics.counters["generation_tokens"] += 1
        if state.first_token_s is None:
            state.first_token_s = now_s
            metrics.counters["prompt_tokens"] += request.num_prompt_tokens
            metrics.counters["prompt_tokens_cached"] += max(0, request.num_cached_tokens)
            histogram = metrics.histograms["time_to_first_token_seconds"]
            histogram.observe(now_s - state.arrival_s)
        elif state.last_token_s is not None:
            histogram = metrics.histograms["inter_token_latency_seconds"]
            histogram.observe(now_s - state.last_token_s)
        state.last_token_s = now_s

    def _count_finish(self, state: RequestState, request: Request, now_s: float) -> None:
        metrics, made = self._metrics, request.num_output_tokens
        metrics.success[FINISHED_REASONS[request.status]] += 1
        scheduled_s = state.arrival_s if state.scheduled_s is None else state.scheduled_s
        first_s = now_s if state.first_token_s is None else state.first_token_s
        for name, value in (
            ("request_prompt_tokens", float(request.num_prompt_tokens)),
            ("request_generation_tokens", float(made)),
            ("request_params_max_tokens", float(request.max_tokens)),
            ("e2e_request_latency_seconds", now_s - state.arrival_s),
            ("request_queue_time_seconds", scheduled_s - state.arrival_s),
            ("request_inference_time_seconds", now_s - scheduled_s),
            ("request_prefill_time_seconds", first_s - scheduled_s),
            ("request_decode_time_seconds", now_s - first_s),
            ("request_num_preemptions", float(request.num_preemptions)),
        ):
            metrics.histograms[name].observe(value)
        if made > 1:
            histogram = metrics.histograms["request_time_per_output_token_seconds"]
            histogram.observe((now_s - first_s) / (made - 1))
