"""The demo's engine core: takes requests in, steps, hands tokens out.

`EngineCore` has the shape of vLLM 0.32's (vllm/v1/engine/core.py): `scheduler`,
`run_busy_loop`, `step`. Its clients live in the same loop, so that a seed decides all.
"""

from __future__ import annotations

import queue

from kvtop.demo.clock import SimClock
from kvtop.demo.config import VLLM_VERSION, kv_cache_config, vllm_config
from kvtop.demo.executor import Executor
from kvtop.demo.frontend import OutputProcessor
from kvtop.demo.gpu import GpuModel
from kvtop.demo.metrics import Metrics
from kvtop.demo.request import Request, RequestStatus
from kvtop.demo.scenario import Scenario, install_faults
from kvtop.demo.scheduler import Scheduler
from kvtop.demo.traffic import Arrival, Leave, Traffic

_MAX_BATCHED_TOKENS = 2048
_NOTHING_RAN_S = 0.02
"""Pause after a step in which nothing could run; vLLM pauses 1 ms there."""


class EngineCore:
    """One engine and its clients.

    Args:
        scenario: What goes wrong.
        seed: Which run.
        blocks: Size of the pool, the null block included. None: the scenario's own.
        clock: Simulated time.

    Raises:
        UsageError: A pool of that size cannot be simulated.
    """

    def __init__(self, scenario: Scenario, seed: int, blocks: int | None, clock: SimClock) -> None:
        num_blocks = scenario.blocks if blocks is None else blocks
        self.vllm_config = vllm_config(num_blocks, scenario.max_num_seqs, _MAX_BATCHED_TOKENS)
        self.engine_index = 0
        self.clock = clock
        self.simulated = True
        self.vllm_version = VLLM_VERSION
        cache = self.vllm_config.cache_config
        gpus = self.vllm_config.parallel_config.tensor_parallel_size
        self.scheduler = Scheduler(
            self.vllm_config, kv_cache_config(num_blocks, gpus, cache.block_size)
        )
        self.faults = install_faults(scenario, self.scheduler.kv_cache_manager)
        self.model_executor = Executor(clock, seed)
        self.input_queue: queue.Queue[Arrival | Leave] = queue.Queue()
        self.aborts_queue: queue.Queue[str] = queue.Queue()
        self.metrics = Metrics(self.vllm_config)
        self.output_processor = OutputProcessor(self.metrics)
        self.gpus = GpuModel(self.vllm_config)
        self.traffic = Traffic(
            scenario.shape((num_blocks - 1) * cache.block_size),
            seed,
            self.vllm_config.model_config.max_model_len,
        )

    def run_busy_loop(self) -> None:
        """Step until the clock is told to stop."""
        while not self.clock.stopping:
            self._process_input_queue()
            self._process_engine_step()

    def run_steps(self, seconds: float) -> None:
        """Step for so many simulated seconds."""
        end_s = self.clock.now_s + seconds
        while self.clock.now_s < end_s:
            self._process_input_queue()
            self._process_engine_step()

    def _process_input_queue(self) -> None:
        """Take in what clients want; wait for them when there is nothing to do."""
        self._receive()
        while not self.scheduler.has_requests() and not self.clock.stopping:
            self.traffic.idle(self.clock.now_s)
            self.output_processor.publish_gauges(self.scheduler)
            self._wait_for_input()
            self._receive()

    def _wait_for_input(self) -> None:
        when_s = self.traffic.next_time_s()
        self.clock.wait_until(self.clock.now_s + 1.0 if when_s is None else when_s)

    def _receive(self) -> None:
        self._poll_clients()
        self._process_aborts_queue()
        while not self.input_queue.empty():
            self._handle_client_request(self.input_queue.get_nowait())

    def _poll_clients(self) -> None:
        """Put what clients did by now where vLLM's input threads put it."""
        for event in self.traffic.due(self.clock.now_s):
            if isinstance(event, Arrival):
                self.output_processor.add_request(event.request_id, self.clock.now_s)
                self.input_queue.put_nowait(event)
                continue
            self.output_processor.abort_requests(event.request_id)
            if not event.silent:
                self.input_queue.put_nowait(event)
                self.aborts_queue.put_nowait(event.request_id)

    def _handle_client_request(self, event: Arrival | Leave) -> None:
        if isinstance(event, Leave):
            self.abort_requests([event.request_id])
            return
        self.scheduler.add_request(
            Request(
                event.request_id,
                event.prompt_token_ids,
                max_tokens=event.max_tokens,
                stop_after=event.stop_after,
                arrival_time=self.clock.wall(),
                block_size=self.vllm_config.cache_config.block_size,
                resumable=event.resumable,
                shared_tokens=event.shared_tokens,
            )
        )

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests because their clients are gone."""
        gone = self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)
        for request in gone:
            self.traffic.ended(request, self.clock.now_s)

    def _process_aborts_queue(self) -> None:
        names: list[str] = []
        while not self.aborts_queue.empty():
            names.append(self.aborts_queue.get_nowait())
        if names:
            self.abort_requests(names)

    def _process_engine_step(self) -> None:
        if self.clock.stopping:
            return
        ran = self.step()
        if not ran and self.scheduler.has_unfinished_requests():
            self.clock.advance(_NOTHING_RAN_S)

    def step(self) -> bool:
        """Schedule, run, take the tokens in; True when anything ran."""
        if not self.scheduler.has_requests():
            return False
        started_s = self.clock.now_s
        output = self.scheduler.schedule()
        sampled: dict[str, int] = {}
        if output.total_num_scheduled_tokens:
            self.model_executor.execute_model(output, self.scheduler.requests)
            sampled = self.model_executor.sample_tokens(output, self.scheduler.requests)
            # Clients that left while the model ran: their blocks wait for this step's end.
            self._poll_clients()
            self._process_aborts_queue()
        tokens = self.scheduler.update_from_output(output, sampled)
        if output.total_num_scheduled_tokens:
            share = output.num_prefill_tokens / output.total_num_scheduled_tokens
            self.gpus.observe(started_s, self.clock.now_s, share)
        self.output_processor.process_outputs(
            output, tokens, self.scheduler, started_s, self.clock.now_s
        )
        for token in tokens:
            if token.finished and token.request.is_finished():
                self.traffic.ended(token.request, self.clock.now_s)
        return output.total_num_scheduled_tokens > 0
