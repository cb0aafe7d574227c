"""A request as the demo's scheduler sees it: vLLM 0.32's names (vllm/v1/request.py)."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, auto


class RequestStatus(IntEnum):
    """vLLM's states of a request, in vLLM's order: whatever follows PREEMPTED is finished."""

    WAITING = auto()
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    WAITING_FOR_STREAMING_REQ = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH_CAPPED = auto()
    FINISHED_ABORTED = auto()

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def is_finished(status: RequestStatus) -> bool:
        """Whether this is the end of a request."""
        return status > RequestStatus.PREEMPTED


FINISHED_REASONS = {
    RequestStatus.FINISHED_STOPPED: "stop",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "abort",
}
"""The label `finished_reason` of /metrics."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What the client asked for."""

    max_tokens: int
    """Limit of generated tokens."""
    n: int = 1
    """Sequences; the demo knows only 1."""


class Request:
    """One sequence on its way through the engine.

    Args:
        request_id: Unique in the engine.
        prompt_token_ids: 16-bit token ids.
        max_tokens: Limit of generated tokens.
        stop_after: Generated tokens after which the model says its end-of-text token.
        arrival_time: Unix seconds.
        block_size: Tokens a block, for `block_hashes`.
        resumable: A streaming session: after its end it is parked until more input comes.
        shared_tokens: Leading tokens that other requests may have too. Only the demo's own
            faults look at it.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int,
        stop_after: int,
        arrival_time: float,
        block_size: int,
        resumable: bool = False,
        shared_tokens: int = 0,
    ) -> None:
        self.request_id = request_id
        self.client_index = 0
        self.priority = 0
        self.lora_request: None = None
        self.sampling_params = SamplingParams(max_tokens)
        self.max_tokens = max_tokens
        self.stop_after = stop_after
        self.arrival_time = arrival_time
        self.status = RequestStatus.WAITING
        self.resumable = resumable
        self.shared_tokens = shared_tokens
        self.num_prompt_tokens = len(prompt_token_ids)
        self._all_token_ids = array("H", prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = -1
        self.num_preemptions = 0
        self.last_sched_seq = 0
        self.is_prefill_chunk = False
        self.block_hashes: list[bytes] = []
        self._block_size = block_size
        self._hash_full_blocks()

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.status})"

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self._all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return len(self._all_token_ids) - self.num_prompt_tokens

    @property
    def all_token_ids(self) -> array[int]:
        """A copy of all tokens, for a follow-up turn."""
        return self._all_token_ids[:]

    def append_output_token_ids(self, token_id: int) -> None:
        """One token was generated."""
        self._all_token_ids.append(token_id)
        if len(self._all_token_ids) % self._block_size == 0:
            self._hash_full_blocks()

    def is_finished(self) -> bool:
        """Whether it has ended."""
        return RequestStatus.is_finished(self.status)

    def _hash_full_blocks(self) -> None:
        # Each name covers everything before it, so equal names mean equal prefixes.
        size = self._block_size
        for start in range(len(self.block_hashes) * size, self.num_tokens - size + 1, size):
            parent = self.block_hashes[-1] if self.block_hashes else b""
            content = self._all_token_ids[start : start + size].tobytes()
            self.block_hashes.append(hashlib.blake2b(parent + content, digest_size=16).digest())
