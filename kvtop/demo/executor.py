"""The simulated model: how long a step takes, and which tokens come out of it."""

from __future__ import annotations

import random
from array import array

from kvtop.demo.clock import SimClock
from kvtop.demo.request import Request
from kvtop.demo.steps import SchedulerOutput

_STEP_S = 0.021
"""Launching a step and reading the weights."""
_DECODE_S = 0.00009
"""Each sequence in the batch: its share of reading the KV cache."""
_PREFILL_S = 0.000042
"""Each prompt token."""
_SAMPLE_S = 0.002
"""Sampling at the end of a step."""


class Executor:
    """Runs the model, in time only.

    Args:
        clock: What passes while it runs.
        seed: For the tokens.
    """

    def __init__(self, clock: SimClock, seed: int) -> None:
        self._clock = clock
        self._random = random.Random(seed ^ 0x5EED)  # noqa: S311 - a simulation, no secret
        self._input_ids = array("H")

    def execute_model(self, output: SchedulerOutput, requests: dict[str, Request]) -> None:
        """The forward pass of one step."""
        self._prepare_inputs(output, requests)
        self._model_forward(output)

    def _prepare_inputs(self, output: SchedulerOutput, requests: dict[str, Request]) -> None:
        self._input_ids = array("H", bytes(2 * output.total_num_scheduled_tokens))
        position = 0
        for request_id, tokens in output.num_scheduled_tokens.items():
            end = requests[request_id].num_computed_tokens
            self._input_ids[position] = end & 0xFFFF
            position += tokens

    def _model_forward(self, output: SchedulerOutput) -> None:
        # Two parts, so that a profile of the demo has more than one branch to look at.
        batch = len(output.num_scheduled_tokens)
        self._attention(
            _STEP_S / 3 + _DECODE_S * batch + _PREFILL_S * output.num_prefill_tokens / 4
        )
        self._feed_forward(_STEP_S * 2 / 3 + _PREFILL_S * output.num_prefill_tokens * 3 / 4)

    def _attention(self, seconds: float) -> None:
        self._clock.advance(seconds)

    def _feed_forward(self, seconds: float) -> None:
        self._clock.advance(seconds)

    def sample_tokens(
        self, output: SchedulerOutput, requests: dict[str, Request]
    ) -> dict[str, int]:
        """One token for each request whose prompt is done."""
        self._clock.advance(_SAMPLE_S)
        return {
            request_id: self._random.getrandbits(16)
            for request_id in output.num_scheduled_tokens
            if not requests[request_id].is_prefill_chunk
        }
