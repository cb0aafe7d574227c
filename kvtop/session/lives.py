"""The life of each request as one row: when it came, what it took, how it went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtop.model.snapshot import Phase, Request
from kvtop.session.numbers import Row
from kvtop.session.rows import micros

_RUNNING = (Phase.PREFILL, Phase.DECODE)
_TOLD = (Phase.PREEMPTED, Phase.HELD)


@dataclass(slots=True)
class _Life:
    last: Request
    first_run: int | None = None
    first_decode: int | None = None
    peak_blocks: int | None = None
    block_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Changes:
    """What one tick adds to the tables of requests."""

    ended: list[Row]
    """Rows of `request_life` for requests that are gone."""
    events: list[Row]
    """Rows of `request_event`."""
    samples: list[Row]
    """Rows of `request_sample`; empty at most ticks."""


class Lives:
    """Follows the requests of one file."""

    def __init__(self) -> None:
        self._lives: dict[int, _Life] = {}
        self._last_tick = 0

    def step(
        self,
        tick: int,
        elapsed_s: float,
        names: Sequence[int],
        requests: Sequence[Request],
        *,
        sample: bool,
    ) -> Changes:
        """Take in one tick.

        Args:
            tick: Its number.
            elapsed_s: Seconds since the tick before.
            names: The number of each request, all engines together.
            requests: The requests.
            sample: True: rows of `request_sample` are wanted.
        """
        before, now = self._lives, {}
        events: list[Row] = []
        for name, request in zip(names, requests, strict=True):
            life = before.get(name)
            was = None
            if life is None:
                life = _Life(request)
            else:
                was = life.last
            phase = request.phase
            if was is None or was.phase is not phase:
                if life.first_run is None and phase in _RUNNING:
                    life.first_run = tick
                if life.first_decode is None and phase is Phase.DECODE:
                    life.first_decode = tick
                if phase in _TOLD or (was is not None and was.phase in _TOLD):
                    events.append(_event(tick, name, was, request))
            blocks = request.blocks
            if blocks is not None:
                life.block_seconds += blocks * elapsed_s
                if life.peak_blocks is None or blocks > life.peak_blocks:
                    life.peak_blocks = blocks
            life.last = request
            now[name] = life
        ended = [
            _row(name, life, self._last_tick, ended=True)
            for name, life in before.items()
            if name not in now
        ]
        self._lives = now
        self._last_tick = tick
        samples = [_sample(tick, name, life.last) for name, life in now.items()] if sample else []
        return Changes(ended, events, samples)

    def rest(self) -> list[Row]:
        """Rows for the requests that are still there when the file is closed."""
        return [
            _row(name, life, self._last_tick, ended=False) for name, life in self._lives.items()
        ]


def _event(tick: int, name: int, was: Request | None, now: Request) -> Row:
    return (
        tick,
        name,
        None if was is None else was.phase.value,
        now.phase.value,
        None if was is None else was.blocks,
        now.owed_blocks,
    )


def _sample(tick: int, name: int, request: Request) -> Row:
    return (
        tick,
        name,
        request.blocks,
        request.shared_blocks,
        request.computed_tokens,
        request.output_tokens,
    )


def _row(name: int, life: _Life, last_tick: int, ended: bool) -> Row:
    last = life.last
    return (
        name,
        last_tick,
        ended,
        life.first_run,
        life.first_decode,
        micros(last.arrival_time_s),
        last.prompt_tokens,
        last.output_tokens,
        last.max_tokens,
        last.cached_tokens,
        life.peak_blocks,
        round(life.block_seconds),
        last.preemptions,
        last.lora,
    )
