"""Clients of the simulated server: who asks what, when, and who leaves.

A mixture of chats with shared system prompts and follow-up turns, questions about long
documents, single completions, bursts and idle gaps. All of it is drawn from one seeded
generator, and time is simulated, so a seed always gives the same run.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtop.demo.request import Request

Range = tuple[int, int]
"""Smallest and largest, both possible."""


@dataclass(frozen=True, slots=True)
class TrafficShape:
    """How busy the clients are. Lengths are tokens, times simulated seconds."""

    rate_s: float = 2.2
    """New conversations, documents and completions a second."""
    chat_weight: float = 0.55
    """Share of chats."""
    document_weight: float = 0.28
    """Share of questions about a long document."""
    completion_weight: float = 0.17
    """Share of single completions, which share nothing."""
    session_weight: float = 0.0
    """Share of streaming sessions whose client never sends its next input."""
    system_prompts: int = 4
    """Different system prompts."""
    system_tokens: Range = (900, 2400)
    """Length of a system prompt."""
    message_tokens: Range = (40, 400)
    """Length of a user's message."""
    document_tokens: Range = (6000, 20_000)
    """Length of a document."""
    output_tokens: Range = (80, 600)
    """Length of an answer."""
    follow_up: float = 0.55
    """Probability that a chat goes on after an answer."""
    burst_every_s: float = 25.0
    """Mean time between bursts; 0: none."""
    burst_size: Range = (8, 18)
    """Chats in a burst."""
    busy_s: float = 45.0
    """Length of a busy period."""
    idle_s: float = 4.0
    """Time without any request after it; 0: busy for ever."""
    drain_limit_s: float = 40.0
    """Longest wait for the last requests of a busy period."""
    abort_share: float = 0.05
    """Share of clients who leave early; the engine is told."""
    abort_after_s: tuple[float, float] = (0.5, 8.0)
    """When they leave."""
    silent_share: float = 0.0
    """Share of clients who leave while the engine is not told."""
    silent_output_tokens: Range = (1200, 2800)
    """How long the engine goes on for such a client."""
    patience_s: float = 120.0
    """Every other client leaves after this time."""
    max_in_flight: int = 200
    """Requests in the server at once, all clients together."""
    max_in_flight_tokens: int = 10**9
    """Sum of prompt and allowed output of those; more clients wait outside."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A client asks something."""

    request_id: str
    """As vLLM makes them: kind, 16 hex digits, and 8 more."""
    prompt_token_ids: array[int]
    """16-bit token ids."""
    max_tokens: int
    """Limit of generated tokens."""
    stop_after: int
    """Where the model ends by itself."""
    shared_tokens: int
    """Leading tokens that others may have too."""
    resumable: bool = False
    """A streaming session."""


@dataclass(frozen=True, slots=True)
class Leave:
    """A client is gone."""

    request_id: str
    """Whose client."""
    silent: bool
    """The engine is not told."""


Event = Arrival | Leave


@dataclass(slots=True)
class _Flight:
    tokens: int
    chat_turns: int | None
    conversation: array[int] = field(default_factory=lambda: array("H"))


class Traffic:
    """All clients together.

    Args:
        shape: How busy they are.
        seed: Which run.
        max_model_len: Longest prompt plus output, tokens.
    """

    def __init__(self, shape: TrafficShape, seed: int, max_model_len: int) -> None:
        self.shape = shape
        self.max_model_len = max_model_len
        self._random = random.Random(seed)  # noqa: S311 - a simulation, no secret
        self._systems = [self._text(shape.system_tokens) for _ in range(shape.system_prompts)]
        self._documents: deque[array[int]] = deque(maxlen=6)
        self._flights: dict[str, _Flight] = {}
        self._flight_tokens = 0
        self._order = 0
        self._agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self._out: list[Event] = []
        self._quiet = False
        self._resume_planned = False
        self._period = 0
        self._begin_period(0.1)

    @property
    def in_flight(self) -> int:
        """Requests sent and not ended."""
        return len(self._flights)

    def next_time_s(self) -> float | None:
        """When something happens next if no request ends before; None: nothing."""
        return self._agenda[0][0] if self._agenda else None

    def due(self, now_s: float) -> list[Event]:
        """What has happened until `now_s`, in order, each once."""
        while self._agenda and self._agenda[0][0] <= now_s:
            when_s, _, action = heapq.heappop(self._agenda)
            action(when_s)
        out, self._out = self._out, []
        return out

    def ended(self, request: Request, now_s: float) -> None:
        """The server is done with a request, for whatever reason."""
        flight = self._flights.pop(request.request_id, None)
        if flight is None:
            return
        self._flight_tokens -= flight.tokens
        turns = flight.chat_turns
        if turns is None or request.num_output_tokens < request.stop_after:
            return
        if not self._quiet and turns < 5 and self._random.random() < self.shape.follow_up:
            history = request.all_token_ids
            think_s = self._random.uniform(1.0, 6.0)
            self._at(now_s + think_s, lambda when: self._chat(when, history, turns + 1))

    def idle(self, now_s: float) -> None:
        """The server has nothing to do."""
        if self._quiet and not self._resume_planned:
            self._resume_planned = True
            self._in_period(now_s + self.shape.idle_s, self._begin_period)

    def _at(self, when_s: float, action: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._agenda, (when_s, self._order, action))

    def _in_period(self, when_s: float, action: Callable[[float], None]) -> None:
        """Do something unless another period has begun by then."""
        period = self._period
        self._at(when_s, lambda when: action(when) if period == self._period else None)

    def _begin_period(self, now_s: float) -> None:
        shape = self.shape
        self._period += 1
        self._quiet = False
        self._resume_planned = False
        self._in_period(now_s, self._arrive)
        if shape.burst_every_s > 0:
            first_s = self._random.uniform(0.2, 1.0) * shape.burst_every_s
            self._in_period(now_s + first_s, self._burst)
        if shape.idle_s > 0:
            self._in_period(now_s + shape.busy_s, self._pause)

    def _pause(self, now_s: float) -> None:
        self._quiet = True
        self._in_period(now_s + self.shape.drain_limit_s, self._begin_period)

    def _arrive(self, now_s: float) -> None:
        if self._quiet:
            return
        shape = self.shape
        self._in_period(now_s + self._random.expovariate(shape.rate_s), self._arrive)
        kind = self._random.choices(
            (self._chat, self._document, self._completion, self._session),
            (
                shape.chat_weight,
                shape.document_weight,
                shape.completion_weight,
                shape.session_weight,
            ),
        )[0]
        kind(now_s)

    def _burst(self, now_s: float) -> None:
        if self._quiet:
            return
        self._in_period(now_s + self._random.expovariate(1 / self.shape.burst_every_s), self._burst)
        system = self._random.choice(self._systems)
        for _ in range(self._random.randint(*self.shape.burst_size)):
            self._chat(now_s, system)

    def _chat(self, now_s: float, history: array[int] | None = None, turn: int = 1) -> None:
        before = self._random.choice(self._systems) if history is None else history
        prompt = before + self._text(self.shape.message_tokens)
        self._send(now_s, "chatcmpl-", prompt, len(before), chat_turns=turn)

    def _document(self, now_s: float) -> None:
        if self._documents and self._random.random() < 0.4:
            document = self._random.choice(self._documents)
        else:
            document = self._text(self.shape.document_tokens)
            self._documents.append(document)
        prompt = document + self._text(self.shape.message_tokens)
        self._send(now_s, "chatcmpl-", prompt, len(document))

    def _completion(self, now_s: float) -> None:
        self._send(now_s, "cmpl-", self._text(self.shape.message_tokens), 0)

    def _session(self, now_s: float) -> None:
        prompt = self._text(self.shape.message_tokens)
        self._send(now_s, "realtime-", prompt, 0, resumable=True)

    def _send(
        self,
        now_s: float,
        kind: str,
        prompt: array[int],
        shared_tokens: int,
        *,
        chat_turns: int | None = None,
        resumable: bool = False,
    ) -> None:
        shape, rng = self.shape, self._random
        silent = not resumable and rng.random() < shape.silent_share
        output = rng.randint(*(shape.silent_output_tokens if silent else shape.output_tokens))
        # Most clients allow more than the model has to say; some cut it short.
        short = rng.random() < 0.15
        allowed = max(1, 3 * output // 4) if short else output + rng.randint(0, output)
        leave_s = shape.patience_s
        leaves = silent or rng.random() < shape.abort_share
        if leaves:
            leave_s = rng.uniform(*shape.abort_after_s)
        suffix = "-0" if kind == "cmpl-" else ""
        name = f"{kind}{rng.getrandbits(64):016x}{suffix}-{rng.getrandbits(32):08x}"
        tokens = len(prompt) + allowed
        if (
            tokens > self.max_model_len
            or self.in_flight >= shape.max_in_flight
            or self._flight_tokens + tokens > shape.max_in_flight_tokens
        ):
            return
        self._flights[name] = _Flight(tokens, chat_turns)
        self._flight_tokens += tokens
        self._out.append(Arrival(name, prompt, allowed, output, shared_tokens, resumable))
        if not resumable:
            self._at(now_s + leave_s, lambda _when: self._leave(name, silent))

    def _leave(self, name: str, silent: bool) -> None:
        if name in self._flights:
            self._out.append(Leave(name, silent))

    def _text(self, length: Range) -> array[int]:
        text = array("H")
        text.frombytes(self._random.randbytes(2 * self._random.randint(*length)))
        return text
