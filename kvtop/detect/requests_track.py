"""What is remembered of the requests of one engine, and their sums in the newest reading."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtop.model.snapshot import Phase, Request

_RUNNING = (Phase.PREFILL, Phase.DECODE)
DEFERRED = ("deferred", "remote KV", "grammar", "streaming", "paused")
"""Reasons why a waiting request waits for something other than room."""


@dataclass(slots=True)
class Seen:
    """One request over time."""

    first_mono_s: float
    """First reading with it."""
    status: str
    """Status in the newest reading."""
    status_mono_s: float
    """First reading in a row with that status."""
    running: bool
    """Whether it runs."""
    computed: int = 0
    """Computed tokens."""
    output: int = 0
    """Output tokens."""
    preemptions: int = 0
    """Preemptions by vLLM's count."""
    restarts: int = 0
    """Times that it lost its work since it last produced a token."""
    restarts_total: int = 0
    """Times that it lost its work, as far as was seen."""


@dataclass(slots=True)
class Totals:
    """Sums over the requests of one reading. None: at least one was not known."""

    live: int = 0
    """Requests that are not just held."""
    running: list[Request] = field(default_factory=list)
    """In a batch."""
    waiting: list[Request] = field(default_factory=list)
    """Waiting for room: not for something else."""
    deferred: list[Request] = field(default_factory=list)
    """Waiting for something else."""
    held: list[Request] = field(default_factory=list)
    """Finished or parked, with blocks."""
    owned: int | None = 0
    """Table entries of all requests."""
    slack: int | None = 0
    """Token slots that hold nothing."""


class RequestsTrack:
    """Follows the requests of one engine by id."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, bool], Seen] = {}
        """By id and whether it is held: an orphan's id may be in use again."""
        self.totals = Totals()
        self.arrival_mono_s: float | None = None
        """When a new request was last seen."""
        self.admitted_mono_s: float | None = None
        """When a request was last seen to start, or nothing was there to wait for."""
        self.progress_mono_s: float | None = None
        """When a running request was last seen to compute or to produce something."""
        self.ended = 0
        """Requests that are no more."""
        self.prompts = 0
        """Requests with a known prompt, so far."""
        self.short_prompts = 0
        """Of these, with a prompt shorter than a block."""

    def forget_times(self, mono_s: float) -> None:
        """After a gap: nothing is known about the time that was not seen."""
        self.admitted_mono_s = self.progress_mono_s = mono_s
        for seen in self.seen.values():
            seen.status_mono_s = max(seen.status_mono_s, mono_s)
            seen.restarts = 0

    def update(self, requests: tuple[Request, ...], mono_s: float, block_size: int | None) -> None:
        """Take one reading."""
        old, now, totals = self.seen, {}, Totals()
        first_reading = self.admitted_mono_s is None
        owned: int | None = 0
        slack: int | None = 0
        for request in requests:
            phase = request.phase
            held = phase is Phase.HELD
            running = phase is Phase.DECODE or phase is Phase.PREFILL
            key = (request.id, held)
            seen = old.get(key)
            if seen is None:
                seen = Seen(mono_s, request.status, mono_s, running)
                seen.computed = request.computed_tokens or 0
                seen.output = request.output_tokens or 0
                seen.preemptions = request.preemptions or 0
                if not held:
                    self._arrived(request, mono_s, block_size, first_reading)
            else:
                self._advance(seen, request, running, mono_s, block_size)
            now[key] = seen
            if held:
                totals.held.append(request)
            else:
                totals.live += 1
                if running:
                    totals.running.append(request)
                elif request.reason in DEFERRED:
                    totals.deferred.append(request)
                else:
                    totals.waiting.append(request)
            blocks, empty = request.blocks, request.slack_tokens
            owned = None if blocks is None or owned is None else owned + blocks
            slack = None if empty is None or slack is None else slack + empty
        totals.owned, totals.slack = owned, slack
        self.ended += len(old.keys() - now.keys())
        self.seen, self.totals = now, totals
        if first_reading or not totals.waiting:
            self.admitted_mono_s = mono_s
        if first_reading or not totals.running:
            self.progress_mono_s = mono_s

    def _arrived(
        self, request: Request, mono_s: float, block_size: int | None, first_reading: bool
    ) -> None:
        if not first_reading:
            self.arrival_mono_s = mono_s
        if request.phase in _RUNNING:
            self.admitted_mono_s = self.progress_mono_s = mono_s
        if request.prompt_tokens is not None and block_size:
            self.prompts += 1
            self.short_prompts += request.prompt_tokens < block_size

    def _advance(
        self, seen: Seen, request: Request, running: bool, mono_s: float, block_size: int | None
    ) -> None:
        if request.status != seen.status:
            seen.status, seen.status_mono_s = request.status, mono_s
        if running and not seen.running:
            self.admitted_mono_s = mono_s
        seen.running = running
        computed, output = request.computed_tokens, request.output_tokens
        if output is not None and output > seen.output:
            seen.output, seen.restarts = output, 0
            self.progress_mono_s = mono_s
        lost = 0
        if computed is not None:
            if computed > seen.computed:
                self.progress_mono_s = mono_s
            elif computed < seen.computed / 2 and seen.computed >= (block_size or 1):
                lost = 1
            seen.computed = computed
        if request.preemptions is not None:
            lost = max(lost, request.preemptions - seen.preemptions)
            seen.preemptions = request.preemptions
        if lost:
            # The preemption and the fall it causes can show in two readings; one loss is
            # counted twice at most, which the thresholds allow for.
            seen.restarts += lost
            seen.restarts_total += lost
