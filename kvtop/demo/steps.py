"""What goes into and comes out of the demo's scheduler.

Shapes and names as in vLLM 0.32: vllm/v1/core/sched/request_queue.py, output.py,
interface.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from kvtop.demo.request import Request


class PauseState(IntEnum):
    """Whether new requests, or any, are scheduled."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


class FCFSRequestQueue(deque[Request]):
    """First come, first served."""

    def add_request(self, request: Request) -> None:
        """Put a request at the end."""
        self.append(request)

    def pop_request(self) -> Request:
        """Take the first one."""
        return self.popleft()

    def peek_request(self) -> Request:
        """Look at the first one."""
        return self[0]

    def prepend_request(self, request: Request) -> None:
        """Put a request at the front."""
        self.appendleft(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Put requests at the front; the last of them becomes the first."""
        self.extendleft(requests)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Take requests out, wherever they are."""
        gone = set(map(id, requests))
        kept = [request for request in self if id(request) not in gone]
        self.clear()
        self.extend(kept)


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """A request that runs for the first time."""

    req_id: str
    """Its id."""
    num_computed_tokens: int
    """Tokens found in the prefix cache."""


@dataclass(slots=True)
class CachedRequestData:
    """Requests that ran before, the resumed ones among them."""

    req_ids: list[str] = field(default_factory=list)
    """Their ids."""
    resumed_req_ids: set[str] = field(default_factory=set)
    """Of these, back after a preemption."""
    num_computed_tokens: list[int] = field(default_factory=list)
    """Tokens each has in its blocks before this step."""


@dataclass(slots=True)
class SchedulerOutput:
    """What the model has to run in one step."""

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    """Requests that run for the first time."""
    scheduled_cached_reqs: CachedRequestData = field(default_factory=CachedRequestData)
    """All others."""
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens a request."""
    total_num_scheduled_tokens: int = 0
    """Their sum."""
    num_prefill_tokens: int = 0
    """Of these, tokens that are not the one token of a decode."""
    preempted_req_ids: list[str] = field(default_factory=list)
    """Requests that lost their blocks in this step."""


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One token of one request, and whether it was its last."""

    request: Request
    """Whose token."""
    finished: bool
    """The request has ended, or, for a streaming session, is parked."""


@dataclass(slots=True)
class PrefixCacheStats:
    """In tokens, since start; requests that were preempted are not counted again."""

    queries: int = 0
    """Tokens looked up."""
    hits: int = 0
    """Tokens found."""
